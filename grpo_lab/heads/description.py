"""A causal model's LM head as the kernels take it: tensors and numbers, as they are at this moment.

The head is read anew at each pass, since PEFT switches adapters on and off and swaps a trained copy
(`modules_to_save`) for the original.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from grpo_lab.heads.adapters import LowRank, read_adapters

# Families multiply by these config fields; most of those with `logits_scaling` divide by it.
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)


@dataclass(frozen=True)
class LMHead:
    """What turns a hidden state into logits: `cap(logit_scale * (s * (h @ weight.T + u @ B.T) + bias))`.

    Attributes:
        weight: (V, H) float.
        bias: (V,) float or `None`.
        logit_scale: multiplies the product.
        soft_cap: where given, logits become `soft_cap * tanh(logits / soft_cap)`.
        low_rank: `u = low_rank.down(h)` (..., r) and `B = low_rank.weight` (V, r) of adapters on the head, or `None`.
        vocabulary_scale: s, (V,) float of a DoRA adapter, or `None`.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    low_rank: LowRank | None = None
    vocabulary_scale: Tensor | None = None

    def low_rank_product(self, hidden_states: Tensor) -> tuple[Tensor, Tensor] | None:
        """The states u (..., r) and the weight B (V, r) for (..., H) hidden states, or `None` without adapters."""
        return None if self.low_rank is None else (self.low_rank.down(hidden_states), self.low_rank.weight)


def base_model(model: Any) -> Any:
    """The causal LM inside PEFT's wrapper, or `model` itself."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _scale_and_cap(model: Any) -> tuple[float, float | None]:
    config = model.config.get_text_config()
    scale = next((getattr(config, n) for n in _MULTIPLIERS if getattr(config, n, None) is not None), None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        multiply = config.model_type in _MULTIPLY_BY_LOGITS_SCALING
        scale = config.logits_scaling if multiply else 1 / config.logits_scaling
    return 1.0 if scale is None else float(scale), getattr(config, "final_logit_softcapping", None)


def read_head(model: nn.Module) -> LMHead:
    """The head that a forward pass of `model` would use now.

    Args:
        model: a causal LM, plain or inside PEFT.

    Returns:
        Its weight and bias (the parameters themselves, so gradients reach them), adapters, scale and soft-cap.

    Raises:
        ValueError: the model has no output embeddings, their weight is sharded away or quantised, or an adapter of an
            unknown kind sits on them.
    """
    base = base_model(model)
    module = base.get_output_embeddings()
    if module is None:
        raise ValueError(f"model: {type(base).__name__} has no output embeddings, so it has no LM head to score with.")
    adapted = read_adapters(module)
    weight = getattr(adapted.base, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        found = f"{tuple(weight.shape)} {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"model: the weight of its LM head ({type(adapted.base).__name__}) must be a whole (V, H) float matrix, "
            f"and is {found}. A sharded weight must be gathered first; a quantised head is not supported: keep "
            "lm_head out of the quantisation (llm_int8_skip_modules=['lm_head'])."
        )
    biases = [bias for bias in (getattr(adapted.base, "bias", None), adapted.bias) if bias is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    scale, cap = _scale_and_cap(base)
    return LMHead(weight, bias, scale, cap, adapted.low_rank, adapted.vocabulary_scale)
