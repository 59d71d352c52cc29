"""Log-probs and entropies of tokens under an LM head, from the full logits: what the kernels must agree with."""

import torch
from torch import Tensor


def per_token_logps(
    hidden_states: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    *,
    temperature: float,
    completion_mask: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    vocabulary_scale: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    return_entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `completion_ids`: `log_softmax(logits / temperature)` gathered at them, from all (..., V) logits.

    Args:
        hidden_states: (..., H) float, at the positions that predict `completion_ids`; gradient flows.
        weight: (V, H) float; gradient flows.
        completion_ids: (...) integer; anything where masked.
        temperature: > 0; divides the logits.
        completion_mask: (...), 1 counts; `None` counts all.
        bias: (V,) float; gradient flows.
        low_rank: states u (..., r) and weight B (V, r) of an adapter on the head, whose product `u @ B.T` is
            added to that of hidden states and weight; gradient flows.
        vocabulary_scale: (V,) float, multiplies the products before the bias (DoRA); gradient flows.
        logit_scale: multiplies the products, before the soft-cap.
        soft_cap: where given, logits become `soft_cap * tanh(logits / soft_cap)`.
        return_entropies: whether the entropies are returned.

    Returns:
        (...) fp32 log-probs (fp64 for fp64 inputs), 0 where masked, and the (...) entropies in nats or `None`.

    Raises:
        ValueError: `temperature` <= 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0; got {temperature!r}.")
    dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = hidden_states.to(dtype) @ weight.to(dtype).T
        if low_rank is not None:
            logits = logits + low_rank[0].to(dtype) @ low_rank[1].to(dtype).T
        if vocabulary_scale is not None:
            logits = logits * vocabulary_scale.to(dtype)
        if bias is not None:
            logits = logits + bias.to(dtype)
        logits = logits * logit_scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        all_logps = (logits / temperature).log_softmax(-1)
        mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
        ids = completion_ids.long().masked_fill(~mask, 0)
        logps = all_logps.gather(-1, ids[..., None]).squeeze(-1).masked_fill(~mask, 0)
        if not return_entropies:
            return logps, None
        # 0 times the infinity of an entry that cannot be is 0, in its gradient too.
        possible = all_logps.masked_fill(all_logps == -torch.inf, 0)
        entropies = -(all_logps.exp() * possible).sum(-1).masked_fill(~mask, 0)
        return logps, entropies
