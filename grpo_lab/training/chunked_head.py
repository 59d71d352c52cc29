"""The LM head of a causal model, scored chunk by chunk in answer to TRL's fused-head call.

TRL >= 1.15 asks a model for log-probs with `model(..., labels=labels, fused_lm_head=True)` and reads `log_probs` and
`entropy` from the output. That call goes through the wrappers around the model (PEFT, DDP, FSDP), so it is the place
to answer with our kernels: `attach_chunked_head` gives one model the forward that does, and leaves every other call
(generation, plain logits) to the forward that was there.
"""

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from grpo_lab import kernels, objectives
from grpo_lab.heads import LMHead, read_head
from grpo_lab.training.config import IMPLEMENTATIONS
from grpo_lab.training.router_loss import router_loss


def resolve_implementation(name: str, device: torch.device) -> str:
    """Name the implementation that will run: `"auto"` becomes `"triton"` or `"torch"`, the others stay.

    Args:
        name: one of `"auto"`, `"triton"`, `"torch"`, `"reference"`.
        device: where the hidden states live.

    Returns:
        `"triton"`, `"torch"` or `"reference"`.

    Raises:
        ValueError: `name` is none of these.
        RuntimeError: `"triton"` was asked for where it cannot run.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {name!r}.")
    return name if name == "reference" else kernels.resolve_implementation(name, device)


@dataclass(frozen=True)
class HeadSettings:
    """What one scoring pass needs besides the tensors.

    Attributes:
        temperature: divides the logits, as in sampling; > 0.
        chunk_size: tokens scored at a time; the reference ignores it.
        implementation: `"triton"`, `"torch"` or `"reference"` (resolved, never `"auto"`).
        entropies_require_grad: whether the loss differentiates the entropies.
        cast_to_fp32: whether hidden states go to fp32, outside autocast, before the head.
    """

    temperature: float
    chunk_size: int
    implementation: str
    entropies_require_grad: bool = False
    cast_to_fp32: bool = False


@dataclass
class ChunkedHeadOutput(ModelOutput):
    """What TRL reads from a fused-head call.

    Attributes:
        log_probs: (B, S - 1) fp32, log-prob of each next token; 0 where its label is -100.
        entropy: (B, S - 1) fp32, in nats; 0 where the label is -100.
        aux_loss: scalar, the router loss of a mixture of experts where `output_router_logits` asks for it, else `None`.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


def score_tokens(
    hidden_states: Tensor, head: LMHead, token_ids: Tensor, mask: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of `token_ids` under `softmax(logits / temperature)`, by the implementation named.

    Args:
        hidden_states: (B, T, H) at the positions that predict `token_ids`; gradient flows.
        head: weight (V, H), bias, logit scale and soft-cap; gradient flows into what requires it.
        token_ids: (B, T) int64; anything where `mask` is 0.
        mask: (B, T), 1 counts.
        settings: temperature, chunk size and implementation.

    Returns:
        (B, T) fp32 log-probs and (B, T) fp32 entropies, both 0 where masked.
    """
    options: dict[str, Any] = {
        "temperature": settings.temperature,
        "completion_mask": mask,
        "bias": head.bias,
        "low_rank": head.low_rank_product(hidden_states),
        "vocabulary_scale": head.vocabulary_scale,
        "logit_scale": head.logit_scale,
        "soft_cap": head.soft_cap,
        "return_entropies": True,
    }
    if settings.implementation == "reference":
        logps, entropies = objectives.per_token_logps(hidden_states, head.weight, token_ids, **options)
        assert entropies is not None, "asked for above"
        return logps, entropies if settings.entropies_require_grad else entropies.detach()
    logps, entropies = kernels.per_token_logps(
        hidden_states,
        head.weight,
        token_ids,
        chunk_size=settings.chunk_size,
        implementation=settings.implementation,
        entropies_require_grad=settings.entropies_require_grad,
        **options,
    )
    assert entropies is not None, "asked for above"
    return logps, entropies


def attach_chunked_head(
    model: nn.Module,
    settings: Callable[[], HeadSettings],
    measure: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Let `model(..., labels=labels, fused_lm_head=True)` return chunked log-probs instead of logits.

    Args:
        model: a causal LM (the base model where PEFT wraps it). Its forward is replaced on this instance; every call
            without `fused_lm_head=True` reaches the forward that was there.
        settings: called at each pass, so that the chunk size may change between passes.
        measure: a context entered around each pass through the head.
    """
    plain_forward = model.forward

    # The class's signature stays visible: `generate` checks its keyword arguments against it.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            if labels is not None:
                kwargs["labels"] = labels
            return plain_forward(*args, **kwargs)
        assert labels is not None, "a fused-head call carries labels"
        text_config = self.config.get_text_config()
        wants_router_loss = kwargs.get("output_router_logits", getattr(text_config, "output_router_logits", False))
        if wants_router_loss:
            kwargs["output_router_logits"] = True
        outputs = self.base_model(*args, use_cache=False, **kwargs)
        hidden_states = outputs.last_hidden_state[:, :-1]
        next_ids = labels[:, 1:]
        current = settings()
        device_type = hidden_states.device.type
        autocast: AbstractContextManager[Any] = nullcontext()
        if current.cast_to_fp32:
            hidden_states = hidden_states.float()
            autocast = torch.autocast(device_type, enabled=False)
        with autocast, measure():
            log_probs, entropies = score_tokens(hidden_states, read_head(self), next_ids, next_ids != -100, current)
        aux_loss = None
        if wants_router_loss:
            aux_loss = router_loss(self, outputs.router_logits, kwargs.get("attention_mask"))
        return ChunkedHeadOutput(log_probs=log_probs, entropy=entropies, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)
