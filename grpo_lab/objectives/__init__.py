"""The specification: one pure function a formula, in plain PyTorch, to read and to test against."""

from grpo_lab.objectives.advantages import group_advantages, zero_spread_fraction
from grpo_lab.objectives.policy_loss import (
    PolicyLoss,
    PolicyLossOptions,
    aggregate_token_losses,
    k3_kl,
    policy_loss,
)
from grpo_lab.objectives.token_logprobs import per_token_logps

__all__ = [
    "PolicyLoss",
    "PolicyLossOptions",
    "aggregate_token_losses",
    "group_advantages",
    "k3_kl",
    "per_token_logps",
    "policy_loss",
    "zero_spread_fraction",
]
