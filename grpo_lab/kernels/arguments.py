"""Checks of what the caller passed, before anything is computed."""

import torch
from torch import Tensor


def compute_dtype(hidden_states: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on and no input is fp64, else the wider of the two."""
    widest = torch.promote_types(hidden_states.dtype, weight.dtype)
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and widest != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return widest


def check_shapes(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, completion_ids: Tensor, mask: Tensor | None
) -> None:
    """Refuse, with `ValueError`, shapes that do not fit each other."""
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a whole (V, H) float matrix; got shape {tuple(weight.shape)}, {weight.dtype}. "
            "A sharded weight is gathered and a quantised one dequantised before it comes here."
        )
    if completion_ids.dim() == 0 or hidden_states.shape != (*completion_ids.shape, weight.size(1)):
        raise ValueError(
            f"hidden_states must be (..., {weight.size(1)}) with completion_ids (...), at least one axis; "
            f"got {tuple(hidden_states.shape)} and {tuple(completion_ids.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.size(0)},); got {tuple(bias.shape)}.")
    if mask is not None and mask.shape != completion_ids.shape:
        raise ValueError(
            f"completion_mask must have the shape of completion_ids, {tuple(completion_ids.shape)}; got "
            f"{tuple(mask.shape)}."
        )


def check_ids(completion_ids: Tensor, mask: Tensor, vocabulary: int) -> None:
    """Refuse, with `ValueError`, the first id outside [0, vocabulary) where the (...) bool `mask` is set."""
    wrong = ((completion_ids < 0) | (completion_ids >= vocabulary)) & mask
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"completion_ids must lie in [0, {vocabulary}) where completion_mask is 1; got "
            f"{int(completion_ids[position])} at position {position}."
        )
