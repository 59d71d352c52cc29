"""Advantages of completions relative to the other completions of their prompt."""

from typing import Literal

import torch
from torch import Tensor

SCALES = ("group", "batch", "none")


def grouped(rewards: Tensor, num_generations: int) -> Tensor:
    """(B,) rewards as (B / G, G), refused where they do not fill whole groups of two or more."""
    if num_generations < 2:
        raise ValueError(f"num_generations must be >= 2, since a group of one has no spread; got {num_generations}.")
    if rewards.dim() != 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"rewards must be (B,) with B a multiple of num_generations ({num_generations}), the completions of a "
            f"prompt side by side; got {tuple(rewards.shape)}."
        )
    return rewards.view(-1, num_generations)


def spread(rewards: Tensor) -> Tensor:
    """Bessel-corrected standard deviation over the last axis without NaN; 0 where fewer than two are left."""
    count = (~rewards.isnan()).sum(-1)
    squares = (rewards - rewards.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-4,
) -> Tensor:
    """How much better each completion is than its group: `(reward - group mean) / (spread + epsilon)`.

    A group whose rewards are all equal has advantages near 0. Its tokens still count in the loss and in its
    normaliser, so with `beta > 0` they are still pulled to the reference; mask the group's tokens to drop it.

    Args:
        rewards: (B,) float, the completions of a prompt side by side; NaN for a completion without a reward.
        num_generations: completions a prompt, >= 2.
        scale_rewards: the spread is the standard deviation of the `"group"`, of the whole `"batch"`, or the
            difference is not scaled (`"none"`, Dr. GRPO).
        epsilon: added to the spread; > 0. Well above the rounding of equal rewards, which it must not
            amplify.

    Returns:
        (B,), the dtype of `rewards`; 0 where the reward is NaN.

    Raises:
        ValueError: an argument is out of its range; the message names it.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, with TRL's epsilon and Bessel's correction;
        `"batch"` arXiv 2508.08221, `"none"` arXiv 2503.20783. A group with a single reward that is no NaN
        gets 0.
    """
    if scale_rewards not in SCALES:
        raise ValueError(f"scale_rewards must be one of {', '.join(SCALES)}; got {scale_rewards!r}.")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0; got {epsilon!r}.")
    groups = grouped(rewards, num_generations)
    advantages = groups - groups.nanmean(-1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (spread(groups)[:, None] + epsilon)
    elif scale_rewards == "batch":
        advantages = advantages / (spread(rewards) + epsilon)
    return advantages.flatten().masked_fill(rewards.isnan(), 0)


def zero_spread_fraction(rewards: Tensor, num_generations: int) -> float:
    """Share of groups whose rewards do not spread, and so teach nothing.

    Args:
        rewards: (B,) float, as for `group_advantages`.
        num_generations: completions a prompt, >= 2.

    Returns:
        In [0, 1]: the share of groups with a standard deviation below 1e-6 of the group's largest reward or
        1e-8.

    Raises:
        ValueError: `rewards` do not fit `num_generations`.
    """
    groups = grouped(rewards, num_generations)
    size = groups.abs().nan_to_num(0).amax(-1)
    return (spread(groups) <= torch.clamp(1e-6 * size, min=1e-8)).float().mean().item()


def weighted_rewards(rewards_per_func: Tensor, weights: Tensor) -> Tensor:
    """Sum over reward functions of `weight x reward`, without those that gave none.

    Args:
        rewards_per_func: (B, K) float; NaN where a function gave no reward.
        weights: (K,) float.

    Returns:
        (B,); NaN for a completion that no function rewarded.
    """
    summed = (rewards_per_func * weights).nansum(-1)
    return summed.masked_fill(rewards_per_func.isnan().all(-1), torch.nan)


def normalized_then_summed_advantages(
    rewards_per_func: Tensor, weights: Tensor, num_generations: int, *, epsilon: float = 1e-4
) -> Tensor:
    """Each reward normalised within its group, then summed by weight, then normalised over the batch.

    No reward function drowns another by its scale, and two completions with equal sums but different parts differ.

    Args:
        rewards_per_func: (B, K) float, the completions of a prompt side by side; NaN where a function gave no reward.
        weights: (K,) float.
        num_generations: completions a prompt, >= 2.
        epsilon: added to each standard deviation; > 0.

    Returns:
        (B,); 0 for a completion that no function rewarded.

    Raises:
        ValueError: the rewards do not fit `num_generations`.

    Source: GDPO (arXiv 2601.05242).
    """
    normalized = []
    for rewards in rewards_per_func.unbind(-1):
        groups = grouped(rewards, num_generations)
        centred = groups - groups.nanmean(-1, keepdim=True)
        normalized.append((centred / (spread(groups)[:, None] + epsilon)).flatten())
    summed = weighted_rewards(torch.stack(normalized, -1), weights)
    return ((summed - summed.nanmean()) / (spread(summed) + epsilon)).nan_to_num(nan=0.0)
