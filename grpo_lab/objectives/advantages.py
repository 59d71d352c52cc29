"""Advantages of completions relative to the other completions of their prompt."""

from typing import Literal

import torch
from torch import Tensor

SCALES = ("group", "batch", "none")


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    if num_generations < 2:
        raise ValueError(f"num_generations must be >= 2, since a group of one has no spread; got {num_generations}.")
    if rewards.dim() != 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"rewards must be (B,) with B a multiple of num_generations ({num_generations}), the completions of a "
            f"prompt side by side; got {tuple(rewards.shape)}."
        )
    return rewards.view(-1, num_generations)


def _spread(rewards: Tensor) -> Tensor:
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
    grouped = _grouped(rewards, num_generations)
    advantages = grouped - grouped.nanmean(-1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (_spread(grouped)[:, None] + epsilon)
    elif scale_rewards == "batch":
        advantages = advantages / (_spread(rewards) + epsilon)
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
    grouped = _grouped(rewards, num_generations)
    size = grouped.abs().nan_to_num(0).amax(-1)
    return (_spread(grouped) <= torch.clamp(1e-6 * size, min=1e-8)).float().mean().item()
