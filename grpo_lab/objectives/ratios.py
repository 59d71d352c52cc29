"""Ratios of the current policy to the one that sampled, by token and by sequence, and what is made of them."""

import math

import torch
from torch import Tensor

# exp(20) is 5e8. The lower bound is the log of 1e-8.
LARGEST_LOG_RATIO, SMALLEST_LOG_WEIGHT = 20.0, -18.420680743952367


def log_importance_ratio(log_ratio: Tensor, completion_mask: Tensor, level: str) -> Tensor:
    """`log rho_t` by token, or its mean over the counted tokens of each sequence.

    Args:
        log_ratio: (B, T) float, `logp - old_logp`, 0 where masked; gradient flows.
        completion_mask: (B, T) bool.
        level: `"token"` or `"sequence"`.

    Returns:
        (B, T), or (B, 1) by sequence; 0 for a sequence without a counted token.

    Source: by sequence GSPO (arXiv 2507.18071), equation 7.
    """
    if level == "token":
        return log_ratio
    return log_ratio.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True).clamp(min=1)


def off_policy_keep(
    advantages: Tensor,
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    threshold: float,
) -> Tensor:
    """Which sequences stay: `A >= 0`, or a mean of `sampling_logp - logp` of at most `threshold`.

    Args:
        advantages: (B, 1), or (B, T) by token.
        per_token_logps: (B, T) float, of the current policy; no gradient flows.
        sampling_per_token_logps: (B, T) float, of whatever sampled; NaN counts as no drift; anything where masked.
        completion_mask: (B, T) bool.
        threshold: nats a token.

    Returns:
        (B, 1) bool, or (B, T) for advantages by token.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 9.
    """
    drift = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0).masked_fill(~completion_mask, 0)
    mean_drift = drift.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (mean_drift <= threshold)


@torch.no_grad()
def gamma_weights(
    advantages: Tensor,
    log_ratio: Tensor,
    importance_sampling_ratio: Tensor | None,
    *,
    k: tuple[float, float],
    decay: tuple[float, float],
) -> Tensor:
    """VESPO's weight of a sequence: `phi(W) = W^k exp(decay (1 - W))` with `W = prod_t rho_t`; phi(1) = 1.

    Args:
        advantages: (B, 1), or (B, T) by token.
        log_ratio: (B, T) float, 0 where masked.
        importance_sampling_ratio: (B, T) float, of the old policy to the sampler, 1 where masked, multiplied into W;
            `None` for 1.
        k: exponents where the advantage is >= 0, and elsewhere.
        decay: the same two decays.

    Returns:
        (B, 1), or (B, T) for advantages by token; no gradient flows. `log rho_t` is bounded by 20 in size, `log W` by
        the log of 1e-8 and 20.

    Source: VESPO (arXiv 2602.10693).
    """
    log_weight = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_sampler_ratio = importance_sampling_ratio.log().clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_RATIO)
        log_weight = log_weight + log_sampler_ratio.sum(-1, keepdim=True)
    log_weight = log_weight.clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_RATIO)
    # A where of two Python numbers would round them to fp32, whatever the ratio has.
    exponent, rate = (
        torch.full_like(advantages, elsewhere, dtype=log_ratio.dtype).masked_fill(advantages >= 0, positive)
        for positive, elsewhere in (k, decay)
    )
    return (rate + exponent * log_weight - rate * log_weight.exp()).exp()


SAMPLER_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """How likelier the training engine held what another engine sampled: `exp(old_logp - sampling_logp)`, bounded.

    `token_*`: a ratio a token. `sequence_*`: `exp` of the sum over counted tokens. `*_truncate` moves a ratio to the
    nearer bound (TIS), `*_mask` sets one outside the bounds to 0 (MIS).

    Args:
        old_per_token_logps: (B, T) float, of the policy that sampled, by the training engine.
        sampling_per_token_logps: (B, T) float, by the engine that sampled; NaN gives the ratio 1.
        completion_mask: (B, T), 1 counts.
        mode: one of `SAMPLER_MODES`.
        clip_min: lower bound, >= 0, or `None`.
        clip_max: upper bound, > `clip_min`, or `None`.

    Returns:
        (B, T) with 1 where masked, unless a bound excludes it, or (B, 1) by sequence.

    Raises:
        ValueError: the mode is unknown, or the bounds hold no ratio.

    Source: IcePop (arXiv 2510.18855) for masking; modes as TRL 1.16's.
    """
    if mode not in SAMPLER_MODES:
        raise ValueError(f"mode must be one of {', '.join(SAMPLER_MODES)}; got {mode!r}.")
    lowest, highest = (0.0 if clip_min is None else clip_min), (math.inf if clip_max is None else clip_max)
    if not 0 <= lowest < highest:
        raise ValueError(f"clip_min and clip_max must be 0 <= clip_min < clip_max; got {clip_min!r} and {clip_max!r}.")
    difference = (old_per_token_logps - sampling_per_token_logps).masked_fill(completion_mask == 0, 0)
    difference = difference.nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(lowest, highest)
    return ratio.masked_fill((ratio < lowest) | (ratio > highest), 0)
