"""Refuse, once, a head whose log-probs the kernels would not give: an unknown adapter or transform of the logits."""

from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.heads.description import LMHead, base_model, read_head

_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 2e-3
# Past the caps in use (5 to 50): a cap bends logits that are large, and those of a young model are not.
_LARGEST_PROBE_LOGIT = 50.0
_BLOCK_ROWS = 8192


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
        ValueError: an adapter of an unknown kind sits on the head, its weight cannot be used, or the probe differs;
            the message names module, config fields and reason.
    """
    base = base_model(model)
    module = base.get_output_embeddings()
    try:
        head = read_head(model)
    except ValueError as error:
        name = next((name for name, child in base.named_modules() if child is module), None)
        raise ValueError(f"{error} (module {name!r})" if name else str(error)) from error
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
        product = _product(hidden_states, head)
    finally:
        for module in training_modules:
            module.training = True
    differences = _difference(own, product, head), _difference(own_of_ramp, ramp.to(own.dtype).float(), head)
    return float(torch.maximum(*differences))  # NaN stays NaN


def _product(hidden_states: Tensor, head: LMHead) -> Tensor:
    # Block by block: a (V, H) copy in fp32 would outweigh a small model.
    states = hidden_states.float()
    product = torch.cat([states @ rows.float().T for rows in head.weight.split(_BLOCK_ROWS)], -1)
    low_rank = head.low_rank_product(hidden_states)
    if low_rank is not None:
        product = product + low_rank[0].float() @ low_rank[1].float().T
    if head.vocabulary_scale is not None:
        product = product * head.vocabulary_scale.float()
    return product if head.bias is None else product + head.bias.float()


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
