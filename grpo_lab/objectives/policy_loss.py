"""The clipped policy-gradient losses of the GRPO family, from log-probs: TRL's `grpo`, `bnpo`, `dr_grpo`, `dapo`.

    ratio   = exp(logp - old_logp)                         by token, or its geometric mean by sequence (GSPO)
    clipped = clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss_t  = -min(min(ratio, delta) A, clipped A) + beta KL_t

The loss types differ in what the sum of `loss_t` over counted tokens is divided by.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class PolicyLossOptions:
    """What the loss is; names and meaning are TRL's.

    Attributes:
        loss_type: what the sum over tokens is divided by, see `aggregate_token_losses`.
        epsilon_low: ratios below `1 - epsilon_low` are clipped; >= 0.
        epsilon_high: ratios above `1 + epsilon_high` are clipped; >= 0.
        delta: bounds the ratio where the advantage is negative; > 1 + epsilon_high, or `None` for no bound.
        beta: weight of the KL to the reference; >= 0.
        use_bias_correction_kl: whether the KL is multiplied by the ratio, which makes its gradient that of
            the reverse KL (DeepSeek-V3.2, arXiv 2512.02556).
        importance_sampling_level: `"token"`, or `"sequence"` for one ratio a sequence (GSPO, arXiv
            2507.18071).

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"]
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {self.loss_type!r}.")
        if self.importance_sampling_level not in LEVELS:
            raise ValueError(
                f"importance_sampling_level must be token or sequence; got {self.importance_sampling_level!r}."
            )
        for name in ("epsilon_low", "epsilon_high", "beta"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number >= 0; got {value!r}.")
        if self.delta is not None and not self.delta > 1 + self.epsilon_high:
            raise ValueError(f"delta must be None or > 1 + epsilon_high; got {self.delta!r}.")


class PolicyLoss(NamedTuple):
    """A loss to differentiate, and TRL's metrics by name (none where no token counts)."""

    loss: Tensor
    metrics: dict[str, float]


def k3_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) by token: `exp(d) - d - 1` with `d = ref - logp`; never negative.

    Args:
        per_token_logps: (B, T) float; gradient flows.
        ref_per_token_logps: (B, T) float.

    Returns:
        (B, T).

    Source: k3 of J. Schulman, "Approximating KL Divergence" (2020).
    """
    difference = ref_per_token_logps - per_token_logps
    return torch.exp(difference) - difference - 1


def aggregate_token_losses(
    per_token_loss: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
    gradient_accumulation_steps: int = 1,
) -> Tensor:
    """One number from the token losses, divided so that the micro-batches of a step may be summed.

    `grpo`: mean over sequences of each one's mean. `bnpo`: sum over the tokens of this micro-batch.
    `dr_grpo`: sum over `B max_completion_length`. These three are then divided by
    `gradient_accumulation_steps`. `dapo`: sum over `num_items_in_batch`.

    Args:
        per_token_loss: (B, T) or (B, 1) float; gradient flows.
        completion_mask: (B, T), 1 counts.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: tokens, for `dr_grpo`.
        num_items_in_batch: counted tokens of all micro-batches of this optimizer step, for `dapo`.
        gradient_accumulation_steps: micro-batches of this optimizer step.

    Returns:
        A scalar; 0, attached to the graph, where no token counts.

    Raises:
        ValueError: the loss type is unknown, or lacks its number.
    """
    mask = completion_mask != 0
    losses = torch.where(mask, per_token_loss, 0)
    if loss_type == "grpo":
        return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / gradient_accumulation_steps
    if loss_type == "bnpo":
        return losses.sum() / mask.sum().clamp(min=1) / gradient_accumulation_steps
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' divides by max_completion_length; got None.")
        return losses.sum() / (mask.size(0) * max_completion_length) / gradient_accumulation_steps
    if loss_type == "dapo":
        if num_items_in_batch is None:
            raise ValueError("loss_type 'dapo' divides by num_items_in_batch; got None.")
        return losses.sum() / max(num_items_in_batch, 1)
    raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {loss_type!r}.")


def policy_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    options: PolicyLossOptions,
    *,
    ref_per_token_logps: Tensor | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
    gradient_accumulation_steps: int = 1,
) -> PolicyLoss:
    """Clipped surrogate of the policy gradient, plus `beta` times the KL to the reference.

    Args:
        per_token_logps: (B, T) float, of the current policy; gradient flows; anything where masked.
        old_per_token_logps: (B, T) float, of the policy that sampled; anything where masked.
        advantages: (B,), or (B, T) by token.
        completion_mask: (B, T), 1 counts.
        options: which loss.
        ref_per_token_logps: (B, T) float, of the reference; needed where `beta > 0`; anything where masked.
        max_completion_length: see `aggregate_token_losses`.
        num_items_in_batch: see `aggregate_token_losses`.
        gradient_accumulation_steps: see `aggregate_token_losses`.

    Returns:
        The scalar loss, and `clip_ratio/low_mean`, `clip_ratio/high_mean`, `clip_ratio/region_mean` (shares
        of counted tokens, or of sequences where the ratio is by sequence, that the clip cuts off from the
        gradient: low where the advantage is negative, high where it is positive) and `kl` where `beta > 0`.

    Raises:
        ValueError: `beta > 0` without `ref_per_token_logps`, or the loss type lacks its number.

    Source: DeepSeekMath (arXiv 2402.03300) equation 3; clip-higher and the token normaliser DAPO
        (2503.14476); the constant normaliser Dr. GRPO (2503.20783); delta INTELLECT-2 (2505.07291). Formulas
        as TRL 1.16's.
    """
    mask = completion_mask != 0
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    # Before any exp: 0 times its infinity would be NaN.
    per_token_logps = per_token_logps.masked_fill(~mask, 0)
    log_ratio = per_token_logps - old_per_token_logps.masked_fill(~mask, 0)
    if options.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
    per_token_loss = -torch.min(bounded * advantages, clipped * advantages)
    counted = {
        "clip_ratio/low_mean": (ratio < 1 - options.epsilon_low) & (advantages < 0),
        "clip_ratio/high_mean": (ratio > 1 + options.epsilon_high) & (advantages > 0),
    }
    counted["clip_ratio/region_mean"] = counted["clip_ratio/low_mean"] | counted["clip_ratio/high_mean"]
    if options.beta > 0:
        if ref_per_token_logps is None:
            raise ValueError(f"ref_per_token_logps is needed where beta > 0; got None, beta {options.beta}.")
        per_token_kl = k3_kl(per_token_logps, ref_per_token_logps.masked_fill(~mask, 0))
        if options.use_bias_correction_kl:
            per_token_kl = per_token_kl * ratio
        per_token_loss = per_token_loss + options.beta * per_token_kl
        counted["kl"] = per_token_kl.detach()
    loss = aggregate_token_losses(
        per_token_loss,
        mask,
        options.loss_type,
        max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    return PolicyLoss(loss, {name: _mean(values, mask) for name, values in counted.items()} if mask.any() else {})


def _mean(values: Tensor, mask: Tensor) -> float:
    """Mean over counted tokens of (B, T) values, or over sequences of (B, 1) values."""
    counted = values[mask] if values.shape == mask.shape else values
    return counted.float().mean().item()
