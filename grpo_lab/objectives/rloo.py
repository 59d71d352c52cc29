"""REINFORCE with the mean of the other completions as baseline (RLOO), as TRL 1.16's `RLOOTrainer` computes it."""

import torch
from torch import Tensor

from grpo_lab.objectives.advantages import grouped, spread
from grpo_lab.objectives.policy_loss import PolicyLoss


def k1_sequence_kl(old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) by sequence: the sum over counted tokens of `old_logp - ref_logp`.

    Args:
        old_per_token_logps: (B, T) float, of the policy that sampled; anything where masked.
        ref_per_token_logps: (B, T) float, of the reference; anything where masked.
        completion_mask: (B, T), 1 counts.

    Returns:
        (B,); may be negative for a sequence, never in expectation.

    Source: k1 of J. Schulman, "Approximating KL Divergence" (2020); in the reward Ahmadian et al. (arXiv 2402.14740).
    """
    return (old_per_token_logps - ref_per_token_logps).masked_fill(completion_mask == 0, 0).sum(-1)


def rloo_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_clip_range: tuple[float, float] | None = None,
    sequence_kl: Tensor | None = None,
    beta: float = 0.0,
    normalize: bool = False,
    epsilon: float = 1e-4,
) -> Tensor:
    """`r_i` minus the mean `r_j` of the other completions of the prompt, with `r = clip(reward) - beta KL`.

    Args:
        rewards: (B,) float, the completions of a prompt side by side; NaN for a completion without a reward.
        num_generations: completions a prompt, >= 2.
        reward_clip_range: smallest and largest reward before the KL is taken off, or `None`.
        sequence_kl: (B,) float, from `k1_sequence_kl`; needed where `beta` is not 0.
        beta: weight of the KL in the reward.
        normalize: whether the advantages of the batch are brought to mean 0 and standard deviation 1.
        epsilon: added to that standard deviation; > 0.

    Returns:
        (B,); 0 where the reward is NaN, and in a group with a single reward that is none.

    Raises:
        ValueError: an argument is out of its range, or the KL is missing; the message names it.

    Source: Ahmadian et al. (arXiv 2402.14740), section 3.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0; got {epsilon!r}.")
    if reward_clip_range is not None:
        if not reward_clip_range[0] < reward_clip_range[1]:
            raise ValueError(f"reward_clip_range must be (smallest, largest); got {reward_clip_range!r}.")
        rewards = rewards.clamp(*reward_clip_range)
    if beta != 0:
        if sequence_kl is None:
            raise ValueError(f"sequence_kl is needed where beta is not 0; got None, beta {beta}.")
        rewards = rewards - beta * sequence_kl
    groups = grouped(rewards, num_generations)
    others = (~groups.isnan()).sum(-1, keepdim=True) - 1
    advantages = (groups - (groups.nansum(-1, keepdim=True) - groups) / others).flatten()
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (spread(advantages) + epsilon)
    return advantages.nan_to_num(nan=0.0)


def rloo_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    entropies: Tensor | None = None,
) -> PolicyLoss:
    """`-mean_i min(rho_i A_i, clip(rho_i) A_i)` with `rho_i` the ratio of whole sequences, a product over tokens.

    Args:
        per_token_logps: (B, T) float, of the current policy; gradient flows; anything where masked.
        old_per_token_logps: (B, T) float, of the policy that sampled; anything where masked.
        advantages: (B,).
        completion_mask: (B, T), 1 counts.
        epsilon_low: ratios below `1 - epsilon_low` are clipped; >= 0.
        epsilon_high: ratios above `1 + epsilon_high` are clipped; >= 0.
        entropies: (B, T) float, nats, for the metric alone; anything where masked.

    Returns:
        The scalar loss, to be divided by the micro-batches of the optimizer step, and TRL's metrics (none where no
        token counts). A sequence without a counted token has ratio 1: it adds its `-A`, without a gradient.

    Raises:
        ValueError: a range below 0, or advantages by token.

    Source: Ahmadian et al. (arXiv 2402.14740) with PPO's clip (arXiv 1707.06347), equation 7, as TRL's.
    """
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high)):
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0; got {value!r}.")
    mask = completion_mask != 0
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages must be {tuple(mask.shape[:1])}; got {tuple(advantages.shape)}.")
    log_ratio = per_token_logps.masked_fill(~mask, 0) - old_per_token_logps.masked_fill(~mask, 0)
    ratio = log_ratio.sum(-1).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    if not mask.any():
        return PolicyLoss(loss, {})
    low = ((ratio < 1 - epsilon_low) & (advantages < 0)).double()
    high = ((ratio > 1 + epsilon_high) & (advantages > 0)).double()
    metrics = {
        "clip_ratio/low_mean": low.mean().item(),
        "clip_ratio/low_min": low.min().item(),
        "clip_ratio/high_mean": high.mean().item(),
        "clip_ratio/high_max": high.max().item(),
        "clip_ratio/region_mean": (low + high).mean().item(),
    }
    if entropies is not None:
        metrics["entropy"] = entropies[mask].double().mean().item()
    return PolicyLoss(loss, metrics)
