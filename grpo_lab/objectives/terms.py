"""The policy term of a token, before masks, corrections and KL: one function an objective.

    clip   -min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A)    grpo, bnpo, dr_grpo, dapo, luspo
    cispo  -sg(min(rho, epsilon_high)) A log p
    sapo   -4/tau sigmoid(tau (rho - 1)) A, tau by the sign of A
    vespo  -sg(phi(W)) A log p, see `gamma_weights`

`sg` lets no gradient through.
"""

import torch
from torch import Tensor

from grpo_lab.objectives.options import PolicyLossOptions


def clipped_term(ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> Tensor:
    """`-min(min(rho, delta) A, clip(rho) A)`: no gradient past the clip range on the side that A rewards.

    Args:
        ratio: (B, T), or (B, 1) by sequence; gradient flows.
        advantages: (B, 1), or (B, T) by token.
        options: epsilon_low, epsilon_high, delta.

    Returns:
        The broadcast shape of both.

    Source: PPO (arXiv 1707.06347), equation 7; clip-higher DAPO (2503.14476), equation 8; delta INTELLECT-2
        (2505.07291), section 3.4.
    """
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.min(bounded * advantages, clipped * advantages)


def cispo_term(ratio: Tensor, advantages: Tensor, per_token_logps: Tensor, epsilon_high: float) -> Tensor:
    """`-sg(min(rho, epsilon_high)) A log p`: every token keeps a gradient, its weight is bounded.

    Args:
        ratio: (B, T) or (B, 1); no gradient flows.
        advantages: (B, 1) or (B, T).
        per_token_logps: (B, T); gradient flows.
        epsilon_high: the largest weight.

    Returns:
        (B, T).

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; without a lower bound as ScaleRL (2510.13786).
    """
    return -ratio.clamp(max=epsilon_high).detach() * advantages * per_token_logps


def sapo_term(ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> Tensor:
    """`-4/tau sigmoid(tau (rho - 1)) A`: a soft gate with slope 1 at rho = 1.

    Args:
        ratio: (B, T) or (B, 1); gradient flows.
        advantages: (B, 1) or (B, T).
        options: sapo_temperature_pos where A > 0, sapo_temperature_neg elsewhere.

    Returns:
        The broadcast shape of both.

    Source: SAPO (arXiv 2511.20347).
    """
    # A where of two Python numbers would round them to fp32, whatever the ratio has.
    temperature = torch.full_like(advantages, options.sapo_temperature_neg, dtype=ratio.dtype)
    temperature = temperature.masked_fill(advantages > 0, options.sapo_temperature_pos)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages
