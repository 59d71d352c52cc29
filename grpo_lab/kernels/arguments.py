"""What the caller passed: grouped, and checked before anything is computed."""

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """The tensors that turn states into products: `x = vocabulary_scale (h W^T + u B^T) + bias`.

    Attributes:
        weights: `(W,)` of shape (V, H), or `(W, B)` with B of shape (V, r).
        bias: (V,) or `None`.
        vocabulary_scale: (V,) or `None`.
    """

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    vocabulary_scale: Tensor | None

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient into any of the tensors is due."""
        tensors = (*self.weights, self.bias, self.vocabulary_scale)
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def compute_dtype(hidden_states: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on and no input is fp64, else the wider of the two."""
    widest = torch.promote_types(hidden_states.dtype, weight.dtype)
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and widest != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return widest


def check_shapes(states: tuple[Tensor, ...], head: Head, completion_ids: Tensor, mask: Tensor | None) -> None:
    """Refuse, with `ValueError`, shapes that do not fit each other."""
    weight, hidden_states = head.weights[0], states[0]
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a whole (V, H) float matrix; got shape {tuple(weight.shape)}, {weight.dtype}. "
            "A sharded weight is gathered and a quantised one dequantised before it comes here."
        )
    if completion_ids.is_floating_point() or completion_ids.is_complex() or completion_ids.dtype == torch.bool:
        raise ValueError(f"completion_ids must be integers; got {completion_ids.dtype}.")
    if completion_ids.dim() == 0 or hidden_states.shape != (*completion_ids.shape, weight.size(1)):
        raise ValueError(
            f"hidden_states must be (..., {weight.size(1)}) with completion_ids (...), at least one axis; "
            f"got {tuple(hidden_states.shape)} and {tuple(completion_ids.shape)}."
        )
    for u, b in zip(states[1:], head.weights[1:], strict=True):
        if b.dim() != 2 or b.size(0) != weight.size(0) or u.shape != (*completion_ids.shape, b.size(1)):
            raise ValueError(
                f"low_rank must be states (..., r) and a weight ({weight.size(0)}, r); got {tuple(u.shape)} and "
                f"{tuple(b.shape)}."
            )
    for name, vector in (("bias", head.bias), ("vocabulary_scale", head.vocabulary_scale)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} must be ({weight.size(0)},); got {tuple(vector.shape)}.")
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
