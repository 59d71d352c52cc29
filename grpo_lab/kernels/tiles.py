"""The two tiles that exist at one time, reused from chunk to chunk: logits in fp32, and their derivative."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_lab.kernels import torch_rows
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import accumulator_dtype, hidden_product_, logits_product_


def _row_functions(options: HeadOptions) -> ModuleType:
    if options.implementation == "torch":
        return torch_rows
    # Importing Triton's kernels compiles nothing, but needs Triton.
    from grpo_lab.kernels import triton_rows

    return triton_rows


class Tiles:
    """One tile of logits and, from its first use, one of their derivative.

    Args:
        rows: how many rows will be walked; a tile has at most `options.chunk_size` of them.
        weight: (V, H) float.
        bias: (V,) float or `None`.
        options: temperature, scale, cap, chunk size, implementation.
        dtype: compute dtype of the products.
    """

    def __init__(
        self, rows: int, weight: Tensor, bias: Tensor | None, options: HeadOptions, dtype: torch.dtype
    ) -> None:
        self.weight, self.bias, self.options, self.dtype = weight, bias, options, dtype
        self.functions = _row_functions(options)
        size = (min(options.chunk_size, rows), weight.size(0))
        self.logits = weight.new_empty(size, dtype=accumulator_dtype(dtype))
        self._derivative: Tensor | None = None

    def score(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunk's tile of products, and its log-probs, normalisers and entropies."""
        tile = self.logits[: h.size(0)]
        logits_product_(tile, h, self.weight)
        if self.bias is not None:
            tile += self.bias.to(tile.dtype)
        return tile, *self.functions.row_statistics(tile, targets, self.options)

    def derivative(self, tile: Tensor, *arguments: Any) -> Tensor:
        """The chunk's derivative with respect to the products, in the compute dtype."""
        if self._derivative is None:
            self._derivative = torch.empty_like(self.logits, dtype=self.dtype)
        out = self._derivative[: tile.size(0)]
        self.functions.row_derivatives(tile, *arguments, self.options, out)
        return out

    def hidden_product(self, derivative: Tensor) -> Tensor:
        """`derivative @ weight`, (n, H) in the accumulator's dtype."""
        out = self.weight.new_empty(derivative.size(0), self.weight.size(1), dtype=self.logits.dtype)
        hidden_product_(out, derivative, self.weight)
        return out
