"""The load-balancing loss of a mixture of experts, by the function of the model's own family."""

import sys
from typing import Any

import torch
from torch import Tensor

_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-3


def router_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """What the model's plain forward pass returns as `aux_loss`: how unevenly the routers load their experts.

    Args:
        model: a causal LM of a family that has such a loss.
        router_logits: as the backbone returns them for `output_router_logits=True`; gradient flows.
        attention_mask: (B, S), 1 counts, or `None` where every token does.

    Returns:
        A scalar.

    Raises:
        ValueError: the family has no such loss, or gave no router logits.

    Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6, as transformers' model files compute it.
    """
    family_loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if family_loss is None or router_logits is None:
        raise ValueError(
            f"model: {type(model).__name__} has no router loss that is known here. "
            "Set router_aux_loss_coef=0.0 to train without it."
        )
    loss: Tensor = family_loss(router_logits, model.num_experts, model.num_experts_per_tok, attention_mask)
    return loss


@torch.no_grad()
def check_router_loss(model: Any) -> None:
    """Refuse a model whose own `aux_loss` is not what `router_loss` gives.

    Args:
        model: a causal LM, without PEFT's wrapper.

    Raises:
        ValueError: as for `router_loss`, or the two differ by more than a thousandth.
    """
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    own = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
    router_logits = model.base_model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    ours = router_loss(model, router_logits, None)
    if not abs(float(own) - float(ours)) <= _PROBE_TOLERANCE * abs(float(own)):
        raise ValueError(
            f"model: the router loss of {type(model).__name__} is {float(own):.4g}, and {float(ours):.4g} as it is "
            "known here. Set router_aux_loss_coef=0.0 to train without it."
        )
