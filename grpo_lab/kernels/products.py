"""Matrix products around the head: low-precision inputs, fp32 accumulators and results (or all in fp64)."""

import torch
from torch import Tensor

_CAST_BLOCK = 4096


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mixed(a: Tensor) -> bool:
    # `out_dtype` takes bf16 or fp16 inputs to an fp32 result; CUDA only, torch >= 2.8.
    return a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16)


def logits_product_(out: Tensor, hidden_states: Tensor, weight: Tensor) -> None:
    """`out = hidden_states @ weight.T`, accumulated in fp32.

    Args:
        out: (n, V), the accumulator's dtype; overwritten.
        hidden_states: (n, H), compute dtype.
        weight: (V, H), any float dtype; cast in blocks of the vocabulary, so that no second (V, H) copy is
            made.
    """
    for start in range(0, weight.size(0), _block(weight, hidden_states)):
        stop = start + _block(weight, hidden_states)
        rows = weight[start:stop].to(hidden_states.dtype)
        if _mixed(hidden_states):
            torch.mm(hidden_states, rows.T, out_dtype=out.dtype, out=out[:, start:stop])
        else:
            torch.mm(hidden_states.to(out.dtype), rows.to(out.dtype).T, out=out[:, start:stop])


def hidden_product_(out: Tensor, tile: Tensor, weight: Tensor) -> None:
    """`out = tile @ weight`, accumulated in fp32 over the vocabulary.

    Args:
        out: (n, H), the accumulator's dtype; overwritten.
        tile: (n, V), compute dtype.
        weight: (V, H), any float dtype; cast in blocks as in `logits_product_`.
    """
    out.zero_()
    for start in range(0, weight.size(0), _block(weight, tile)):
        stop = start + _block(weight, tile)
        add_product_(out, tile[:, start:stop], weight[start:stop].to(tile.dtype))


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b`, the product never rounded to the inputs' dtype: in bf16 that biases training.

    Args:
        out: (n, m), the accumulator's dtype.
        a: (n, k), compute dtype.
        b: (k, m), compute dtype.
    """
    if _mixed(a):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def _block(weight: Tensor, other: Tensor) -> int:
    whole = weight.dtype == other.dtype and (_mixed(other) or weight.dtype == accumulator_dtype(weight.dtype))
    return weight.size(0) if whole else _CAST_BLOCK
