"""The specification: one pure function a formula, in plain PyTorch, to read and to test against."""

from grpo_lab.objectives.advantages import (
    group_advantages,
    normalized_then_summed_advantages,
    weighted_rewards,
    zero_spread_fraction,
)
from grpo_lab.objectives.aggregation import aggregate_token_losses
from grpo_lab.objectives.entropy import AdaptiveEntropy, adapt_entropy_coefficient, entropy_bonus, top_entropy_mask
from grpo_lab.objectives.options import PolicyLossOptions
from grpo_lab.objectives.policy_loss import PolicyLoss, k3_kl, policy_loss
from grpo_lab.objectives.ratios import gamma_weights, log_importance_ratio, off_policy_keep, sampler_ratio
from grpo_lab.objectives.rloo import k1_sequence_kl, rloo_advantages, rloo_loss
from grpo_lab.objectives.terms import cispo_term, clipped_term, sapo_term
from grpo_lab.objectives.token_logprobs import per_token_logps

__all__ = [
    "AdaptiveEntropy",
    "PolicyLoss",
    "PolicyLossOptions",
    "adapt_entropy_coefficient",
    "aggregate_token_losses",
    "cispo_term",
    "clipped_term",
    "entropy_bonus",
    "gamma_weights",
    "group_advantages",
    "k1_sequence_kl",
    "k3_kl",
    "log_importance_ratio",
    "normalized_then_summed_advantages",
    "off_policy_keep",
    "per_token_logps",
    "policy_loss",
    "rloo_advantages",
    "rloo_loss",
    "sampler_ratio",
    "sapo_term",
    "top_entropy_mask",
    "weighted_rewards",
    "zero_spread_fraction",
]
