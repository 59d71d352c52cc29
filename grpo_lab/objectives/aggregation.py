"""From token losses to one number: what their sum is divided by."""

import torch
from torch import Tensor

from grpo_lab.objectives.options import LOSS_TYPES


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

    `grpo`, `sapo`: mean over sequences of each one's mean. `luspo`: mean over sequences of each one's sum.
    `bnpo`: sum over the tokens of this micro-batch. `dr_grpo`: sum over `B max_completion_length`. These are then
    divided by `gradient_accumulation_steps`. `dapo`, `cispo`, `vespo`: sum over `num_items_in_batch`.

    Args:
        per_token_loss: (B, T) or (B, 1) float; gradient flows; anything where masked.
        completion_mask: (B, T), 1 counts.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: tokens, for `dr_grpo`.
        num_items_in_batch: counted tokens of all micro-batches of this optimizer step, for `dapo`, `cispo`, `vespo`.
        gradient_accumulation_steps: micro-batches of this optimizer step.

    Returns:
        A scalar; 0, attached to the graph, where no token counts.

    Raises:
        ValueError: the loss type is unknown, or lacks its number.

    Source: Dr. GRPO (arXiv 2503.20783), DAPO (2503.14476), LUSPO (2602.05261); formulas as TRL 1.16's.
    """
    mask = completion_mask != 0
    losses = torch.where(mask, per_token_loss, 0)
    if loss_type in ("grpo", "sapo"):
        return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / gradient_accumulation_steps
    if loss_type == "luspo":
        return losses.sum(-1).mean() / gradient_accumulation_steps
    if loss_type == "bnpo":
        return losses.sum() / mask.sum().clamp(min=1) / gradient_accumulation_steps
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' divides by max_completion_length; got None.")
        return losses.sum() / (mask.size(0) * max_completion_length) / gradient_accumulation_steps
    if loss_type in ("dapo", "cispo", "vespo"):
        if num_items_in_batch is None:
            raise ValueError(f"loss_type {loss_type!r} divides by num_items_in_batch; got None.")
        return losses.sum() / max(num_items_in_batch, 1)
    raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {loss_type!r}.")
