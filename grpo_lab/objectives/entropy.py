"""What entropies do in the loss: choose the tokens that learn, and be raised themselves."""

from typing import NamedTuple

import torch
from torch import Tensor


def top_entropy_mask(entropies: Tensor, completion_mask: Tensor, top_entropy_quantile: float) -> Tensor:
    """The counted tokens whose entropy is at least the `1 - top_entropy_quantile` quantile of all counted tokens.

    Args:
        entropies: (B, T) float, nats; anything where masked.
        completion_mask: (B, T), 1 counts.
        top_entropy_quantile: share of tokens kept, in (0, 1].

    Returns:
        (B, T) bool.

    Source: Wang et al. (arXiv 2506.01939), section 5.
    """
    mask = completion_mask != 0
    if not mask.any():
        return mask
    threshold = torch.quantile(entropies[mask].float(), 1 - top_entropy_quantile)
    return mask & (entropies >= threshold)


def entropy_bonus(entropies: Tensor, completion_mask: Tensor) -> Tensor:
    """Mean entropy of the counted tokens, to be subtracted from the loss times a coefficient.

    Args:
        entropies: (B, T) float, nats; gradient flows; anything where masked.
        completion_mask: (B, T) bool, of the tokens that it acts on.

    Returns:
        A scalar; 0, attached to the graph, where no token counts.

    Source: Skywork-OR1 (arXiv 2505.22312), section 3.1.
    """
    return torch.where(completion_mask, entropies, 0).sum() / completion_mask.sum().clamp(min=1)


class AdaptiveEntropy(NamedTuple):
    """The coefficient for the next optimizer step, and whether the bonus is applied there."""

    coefficient: float
    applies: bool


def adapt_entropy_coefficient(
    coefficient: float, entropy: float, *, target: float, delta: float, minimum: float, maximum: float
) -> AdaptiveEntropy:
    """Raise the coefficient by `delta` while the entropy is at most `target`, else lower it.

    Args:
        coefficient: of the optimizer step that ended.
        entropy: nats, mean over that step's tokens.
        target: nats; the bonus applies at or below it.
        delta: step of the coefficient.
        minimum: of the coefficient.
        maximum: of the coefficient.

    Returns:
        The coefficient within its bounds, and whether the bonus applies. The first step, with no entropy known yet,
        has no bonus.

    Source: Skywork-OR1 (arXiv 2505.22312), section 3.1.
    """
    low = entropy <= target
    moved = min(coefficient + delta, maximum) if low else max(coefficient - delta, minimum)
    return AdaptiveEntropy(moved, low)
