"""The single pass of a frozen head, with the vocabulary walked in tiles: no row of logits exists as a whole.

Against a reference m that never moves, everything about a row is a sum over the vocabulary, gathered tile by tile; the
target y stays out of the sums that are rounded, so that a token with p_y near 1 keeps its small derivative:

    e_v = exp(z_v - m)          s' = sum_{v != y} e_v          w = sum_v e_v (z_v - m)
    s = s' + e_y                O = sum_{v != y} e_v f'(x_v) W_v

    log p_y = z_y - m - log s                 d log p_y / d h = (s' / s) f'(x_y) W_y - O / s
    H = log s - w / s

m is the row's largest logit in the first tile, so that s >= 1 and nothing is rescaled when a larger one comes. Where
one comes that is larger by more than about 69, sums near the end of fp32's range say so, and the rows are walked again
with the true maximum as m.

Source: the sums are those of the online softmax (Milakov and Gimelshein, arXiv 1805.02867) without its rescaling.
"""

import torch
from torch import Tensor

from grpo_lab.kernels.arguments import Head
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import accumulator_dtype, add_product_, logits_product_
from grpo_lab.kernels.rows import RowSums, WalkedRows, row_functions

# exp(69): products with weights and sums over a vocabulary stay finite in fp32 and bf16.
_LARGEST_SUM = 1e30


class VocabularyTiles:
    """Buffers of one tile, and the walk over the vocabulary.

    Args:
        rows: how many rows will be walked; a tile has at most `options.chunk_size` of them.
        head: weights, bias and scale; none of them gets a gradient.
        options: temperature, scale, cap, chunk size, vocabulary tile, implementation.
        dtype: compute dtype of the products.
    """

    def __init__(self, rows: int, head: Head, options: HeadOptions, dtype: torch.dtype) -> None:
        self.head, self.options, self.dtype = head, options, dtype
        self.functions = row_functions(options)
        weight = head.weights[0]
        assert options.vocabulary_tile is not None, "the caller walks the vocabulary in tiles"
        size = (min(options.chunk_size, rows), min(options.vocabulary_tile, weight.size(0)))
        self.logits = weight.new_empty(size, dtype=accumulator_dtype(dtype))
        self._weights = torch.empty_like(self.logits, dtype=dtype)

    def walk(self, states: list[Tensor], targets: Tensor, needed: list[bool], with_entropy: bool) -> WalkedRows:
        """As `Tiles.walk`, without derivatives of the entropy."""
        assert not with_entropy, "refused with the arguments"
        # In fp16 the weights of a tile must not exceed 1.
        reference = self._largest_logits(states) if self.dtype == torch.float16 else None
        sums, products = self._gather(states, targets, needed, reference)
        if not (sums.total < _LARGEST_SUM).all():
            sums, products = self._gather(states, targets, needed, self._largest_logits(states))
        return WalkedRows(sums.logps, sums.entropies, self._rows(sums, targets, products), [None for _ in needed])

    def _starts(self) -> range:
        return range(0, self.head.weights[0].size(0), self.logits.size(1))

    def _products(self, states: list[Tensor], start: int) -> Tensor:
        """The tile x of columns `start` and on."""
        width = min(self.logits.size(1), self.head.weights[0].size(0) - start)
        # Contiguous, since products are written to it.
        tile = self.logits.view(-1)[: states[0].size(0) * width].view(-1, width)
        columns = slice(start, start + width)
        logits_product_(tile, states[0], self.head.weights[0][columns])
        for u, b in zip(states[1:], self.head.weights[1:], strict=True):
            add_product_(tile, u, b[columns].to(self.dtype).T)
        if self.head.vocabulary_scale is not None:
            tile *= self.head.vocabulary_scale[columns].to(tile.dtype)
        if self.head.bias is not None:
            tile += self.head.bias[columns].to(tile.dtype)
        return tile

    def _largest_logits(self, states: list[Tensor]) -> Tensor:
        largest = [self.functions.row_maxima(self._products(states, start), self.options) for start in self._starts()]
        return torch.stack(largest).amax(0)

    def _gather(
        self, states: list[Tensor], targets: Tensor, needed: list[bool], reference: Tensor | None
    ) -> tuple[RowSums, list[Tensor | None]]:
        sums = RowSums(*self.logits.new_zeros(6, targets.size(0)).unbind(0))
        products = [
            self.logits.new_zeros(targets.size(0), weight.size(1)) if need else None
            for need, weight in zip(needed, self.head.weights, strict=True)
        ]
        for start in self._starts():
            tile = self._products(states, start)
            if start == 0:
                sums.reference = self.functions.row_maxima(tile, self.options) if reference is None else reference
            weights = self._weights.view(-1)[: tile.numel()].view_as(tile) if any(needed) else None
            self.functions.fold_tile(tile, targets - start, sums, self.options, weights)
            if weights is None:
                continue
            columns = slice(start, start + tile.size(1))
            if self.head.vocabulary_scale is not None:
                weights *= self.head.vocabulary_scale[columns].to(weights.dtype)
            for product, factor in zip(products, self.head.weights, strict=True):
                if product is not None:
                    add_product_(product, weights, factor[columns].to(self.dtype))
        return sums, products

    def _rows(self, sums: RowSums, targets: Tensor, products: list[Tensor | None]) -> list[Tensor | None]:
        of_target = sums.target_slope * sums.others / sums.total
        if self.head.vocabulary_scale is not None:
            of_target = of_target * self.head.vocabulary_scale[targets].to(of_target.dtype)
        return [
            None if o is None else factor[targets].to(o.dtype) * of_target[:, None] - o / sums.total[:, None]
            for o, factor in zip(products, self.head.weights, strict=True)
        ]
