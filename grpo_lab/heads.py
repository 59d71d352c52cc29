"""One description of a causal model's LM head: its weight, bias, scale and soft-cap, as they are at this moment.

The head is read anew at each pass, since PEFT swaps a trained copy (`modules_to_save`) for the original while its
adapters are off. What cannot be described (an adapter on the head, a quantised or sharded weight, a transform of the
logits that no known config field explains) is refused once, when a trainer is made.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 2e-3
# Past the caps in use (5 to 50): a cap bends logits that are large, and those of a young model are not.
_LARGEST_PROBE_LOGIT = 50.0
# Families multiply by these config fields; Granite's family divides by `logits_scaling`.
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


@dataclass(frozen=True)
class LMHead:
    """What turns a hidden state into logits: `cap(logit_scale * (h @ weight.T + bias))`.

    Attributes:
        weight: (V, H) float.
        bias: (V,) float or `None`.
        logit_scale: multiplies the product.
        soft_cap: where given, logits become `soft_cap * tanh(logits / soft_cap)`.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None


def _base_model(model: nn.Module) -> Any:
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _current_module(module: Any) -> Any:
    """The module that a forward pass would use: the active copy of `modules_to_save`, or the original."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not active:
        return module.original_module
    return module.modules_to_save[active[0]]


def _scale_and_cap(model: Any) -> tuple[float, float | None]:
    config = model.config.get_text_config()
    scale = next((getattr(config, n) for n in _MULTIPLIERS if getattr(config, n, None) is not None), None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = 1 / config.logits_scaling
    return 1.0 if scale is None else float(scale), getattr(config, "final_logit_softcapping", None)


def read_head(model: nn.Module) -> LMHead:
    """The head that a forward pass of `model` would use now.

    Args:
        model: a causal LM, plain or inside PEFT.

    Returns:
        Its weight and bias (the parameters themselves, so gradients reach them), scale and soft-cap.

    Raises:
        ValueError: the model has no output embeddings, or their weight is sharded away or quantised.
    """
    base = _base_model(model)
    module = _current_module(base.get_output_embeddings())
    if module is None:
        raise ValueError(f"model: {type(base).__name__} has no output embeddings, so it has no LM head to score with.")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        found = f"{tuple(weight.shape)} {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"model: the weight of its LM head ({type(module).__name__}) must be a whole (V, H) float matrix, and is "
            f"{found}. A sharded weight must be gathered first; a quantised head is not supported: keep lm_head out "
            "of the quantisation (llm_int8_skip_modules=['lm_head'])."
        )
    scale, cap = _scale_and_cap(base)
    return LMHead(weight, getattr(module, "bias", None), scale, cap)


@torch.no_grad()
def check_head(model: nn.Module) -> LMHead:
    """Refuse, by name, a head whose log-probs the kernels would not give.

    A few tokens are run through the model: `log_softmax` of its own logits must equal `log_softmax` of what `LMHead`
    describes, once as they are and once with a ramp of large logits in place of the head's product. So a family with
    a transform that is not known here is refused instead of trained wrongly.

    Args:
        model: a causal LM, plain or inside PEFT.

    Returns:
        The head as it is now.

    Raises:
        ValueError: an adapter sits on the head, its weight cannot be used, or the probe differs; the message names
            module, config fields and reason.
    """
    base = _base_model(model)
    module = base.get_output_embeddings()
    if isinstance(module, BaseTunerLayer):
        name = next((name for name, child in base.named_modules() if child is module), "lm_head")
        raise ValueError(
            f"model: {type(module).__name__} puts an adapter on the LM head {name!r}, which the chunked head does not "
            f"apply yet. Leave {name!r} out of target_modules, or train it in full with modules_to_save=[{name!r}]."
        )
    head = read_head(model)
    difference = _probe(base, head)
    if not difference < _PROBE_TOLERANCE:
        config = base.config.get_text_config()
        fields = [name for name in vars(config) if "logit" in name or "head_mult" in name]
        raise ValueError(
            f"model: log-probs of {type(base).__name__} differ by {difference:.2g} from those of its LM head with "
            f"logit_scale {head.logit_scale:g} and soft_cap {head.soft_cap}. It transforms its logits in a way that "
            f"is not known here (config fields about logits: {', '.join(fields) or 'none'})."
        )
    return head


def _probe(base: Any, head: LMHead) -> float:
    """Largest difference between the model's own log-probs and those of `head`, in nats."""
    ids = torch.arange(_PROBE_TOKENS, device=head.weight.device)[None] % head.weight.size(0)
    ramp = torch.linspace(-_LARGEST_PROBE_LOGIT, _LARGEST_PROBE_LOGIT, head.weight.size(0), device=ids.device)
    training_modules = [module for module in base.modules() if module.training]
    base.eval()
    try:
        hidden_states = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        own = base(input_ids=ids, use_cache=False).logits
        with base.get_output_embeddings().register_forward_hook(
            lambda _module, _args, out: ramp.to(out).expand_as(out)
        ):
            own_of_ramp = base(input_ids=ids, use_cache=False).logits
    finally:
        for module in training_modules:
            module.training = True
    # Block by block: a (V, H) copy in fp32 would outweigh a small model.
    product = torch.cat([hidden_states.float() @ rows.float().T for rows in head.weight.split(8192)], -1)
    if head.bias is not None:
        product = product + head.bias.float()
    differences = _difference(own, product, head), _difference(own_of_ramp, ramp.to(own.dtype).float(), head)
    return float(torch.maximum(*differences))  # NaN stays NaN


def _difference(own: Tensor, product: Tensor, head: LMHead) -> Tensor:
    """Largest difference in nats between log-probs of the logits `own` and of `head`'s transform of `product`."""
    logits = product * head.logit_scale
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    # Low-precision models round their own logits; so is the comparison.
    rounded = logits.to(own.dtype).float()
    difference = (rounded.log_softmax(-1) - own.float().log_softmax(-1)).abs()
    slack = own.float().abs().max() * torch.finfo(own.dtype).eps * 4
    return (difference - slack).clamp(min=0).max()
