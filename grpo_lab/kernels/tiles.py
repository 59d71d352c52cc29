"""The two tiles that exist at one time, reused from chunk to chunk: logits in fp32, and their derivative."""

from typing import Any

import torch
from torch import Tensor

from grpo_lab.kernels.arguments import Head
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import accumulator_dtype, add_product_, hidden_product_, logits_product_
from grpo_lab.kernels.rows import WalkedRows, row_functions


class Tiles:
    """One tile of logits and, from its first use, one of their derivative.

    Args:
        rows: how many rows will be walked; a tile has at most `options.chunk_size` of them.
        head: weights, bias and scale.
        options: temperature, scale, cap, chunk size, implementation.
        dtype: compute dtype of the products.
        keep_unscaled: whether a third tile keeps the products before `vocabulary_scale`, for its gradient.
    """

    def __init__(
        self, rows: int, head: Head, options: HeadOptions, dtype: torch.dtype, keep_unscaled: bool = False
    ) -> None:
        self.head, self.options, self.dtype = head, options, dtype
        self.functions = row_functions(options)
        weight = head.weights[0]
        size = (min(options.chunk_size, rows), weight.size(0))
        self.logits = weight.new_empty(size, dtype=accumulator_dtype(dtype))
        self.unscaled = torch.empty_like(self.logits) if keep_unscaled else None
        self._derivative: Tensor | None = None

    def score(self, states: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunk's tile of products, and its log-probs, normalisers and entropies."""
        tile = self.logits[: targets.size(0)]
        logits_product_(tile, states[0], self.head.weights[0])
        for u, b in zip(states[1:], self.head.weights[1:], strict=True):
            add_product_(tile, u, b.to(self.dtype).T)
        if self.unscaled is not None:
            self.unscaled[: targets.size(0)] = tile
        if self.head.vocabulary_scale is not None:
            tile *= self.head.vocabulary_scale.to(tile.dtype)
        if self.head.bias is not None:
            tile += self.head.bias.to(tile.dtype)
        return tile, *self.functions.row_statistics(tile, targets, self.options)

    def walk(self, states: list[Tensor], targets: Tensor, needed: list[bool], with_entropy: bool) -> WalkedRows:
        """Log-probs and entropies of the chunk, and their derivatives with respect to each of `states`.

        Args:
            states: (n, H) and maybe (n, r), compute dtype.
            targets: (n,) int64 in [0, V).
            needed: which of `states` get derivatives.
            with_entropy: whether those of the entropy are wanted too.

        Returns:
            The results, in the accumulator's dtype.
        """
        tile, logps, normalizers, entropies = self.score(states, targets)
        ones = torch.ones_like(normalizers)

        def rows(wanted: bool, *coefficients: Tensor | None) -> list[Tensor | None]:
            if not (wanted and any(needed)):
                return [None for _ in needed]
            derivative = self.derivative(tile, targets, normalizers, entropies, *coefficients)
            self.scale_(derivative)
            return [self.state_product(derivative, number) if need else None for number, need in enumerate(needed)]

        return WalkedRows(logps, entropies, rows(True, ones, None), rows(with_entropy, None, ones))

    def derivative(self, tile: Tensor, *arguments: Any) -> Tensor:
        """The chunk's derivative with respect to the tile, in the compute dtype."""
        if self._derivative is None:
            self._derivative = torch.empty_like(self.logits, dtype=self.dtype)
        out = self._derivative[: tile.size(0)]
        self.functions.row_derivatives(tile, *arguments, self.options, out)
        return out

    def scale_(self, derivative: Tensor) -> None:
        """Turn the derivative with respect to the tile into that with respect to the products."""
        if self.head.vocabulary_scale is not None:
            derivative *= self.head.vocabulary_scale.to(derivative.dtype)

    def state_product(self, derivative: Tensor, index: int) -> Tensor:
        """`derivative @ head.weights[index]`, (n, H or r) in the accumulator's dtype."""
        weight = self.head.weights[index]
        out = weight.new_empty(derivative.size(0), weight.size(1), dtype=self.logits.dtype)
        hidden_product_(out, derivative, weight)
        return out
