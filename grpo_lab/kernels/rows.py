"""What is known of a chunk's rows, and who walks them."""

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from grpo_lab.kernels.options import HeadOptions


def row_functions(options: HeadOptions) -> ModuleType:
    """The module that walks the rows of a tile: `torch_rows` or `triton_rows`."""
    if options.implementation == "torch":
        from grpo_lab.kernels import torch_rows

        return torch_rows
    # Importing Triton's kernels compiles nothing, but needs Triton.
    from grpo_lab.kernels import triton_rows

    return triton_rows


class WalkedRows(NamedTuple):
    """Results of n rows: (n,) log-probs and entropies, and their (n, H or r) derivatives, `None` where not wanted."""

    logps: Tensor
    entropies: Tensor
    logp_rows: list[Tensor | None]
    entropy_rows: list[Tensor | None]


@dataclass
class RowSums:
    """What is gathered of n rows, tile by tile; formulas in `vocabulary_tiles`. Each (n,), the accumulator's dtype.

    Attributes:
        reference: m.
        others: s', the sum without the target.
        target: e_y, from the tile that holds it.
        weighted: w.
        target_logit: z_y, from the tile that holds it.
        target_slope: f'(x_y), from the tile that holds it.
    """

    reference: Tensor
    others: Tensor
    target: Tensor
    weighted: Tensor
    target_logit: Tensor
    target_slope: Tensor

    @property
    def total(self) -> Tensor:
        """S."""
        return self.others + self.target

    @property
    def logps(self) -> Tensor:
        """Log p_y."""
        return self.target_logit - self.reference - self.total.log()

    @property
    def entropies(self) -> Tensor:
        """H, in nats."""
        return self.total.log() - self.weighted / self.total
