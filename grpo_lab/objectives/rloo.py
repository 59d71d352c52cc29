"""REINFORCE with the mean of the other completions as baseline (RLOO), as TRL 1.16's `RLOOTrainer` computes it."""

import torch
from torch import Tensor

from grpo_lab.objectives.advantages import grouped, spread


def rloo_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    sequence_kl: Tensor | None = None,
    beta: float = 0.0,
    normalize: bool = False,
    epsilon: float = 1e-4,
) -> Tensor:
    """Reward minus the mean reward of the other completions of the prompt, after `beta` times the KL is taken off.

    Args:
        rewards: (B,) float, the completions of a prompt side by side; NaN for a completion without a reward.
        num_generations: completions a prompt, >= 2.
        sequence_kl: (B,) float, sum over counted tokens of `old_logp - ref_logp`; needed where `beta` is not 0.
        beta: weight of the KL in the reward.
        normalize: whether the advantages of the batch are brought to mean 0 and standard deviation 1.
        epsilon: added to that standard deviation.

    Returns:
        (B,); 0 where the reward is NaN, and in a group with a single reward that is none.

    Raises:
        ValueError: the rewards do not fit `num_generations`, or the KL is missing.

    Source: Ahmadian et al. (arXiv 2402.14740), section 3.
    """
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
) -> Tensor:
    """`-mean_i min(rho_i A_i, clip(rho_i) A_i)` with `rho_i` the ratio of whole sequences, a product over tokens.

    Args:
        per_token_logps: (B, T) float, of the current policy; gradient flows; anything where masked.
        old_per_token_logps: (B, T) float, of the policy that sampled; anything where masked.
        advantages: (B,).
        completion_mask: (B, T), 1 counts.
        epsilon_low: ratios below `1 - epsilon_low` are clipped.
        epsilon_high: ratios above `1 + epsilon_high` are clipped.

    Returns:
        A scalar.

    Source: Ahmadian et al. (arXiv 2402.14740) with PPO's clip, as TRL's.
    """
    mask = completion_mask != 0
    log_ratio = per_token_logps.masked_fill(~mask, 0) - old_per_token_logps.masked_fill(~mask, 0)
    ratio = log_ratio.sum(-1).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.min(ratio * advantages, clipped * advantages).mean()
