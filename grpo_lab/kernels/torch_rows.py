"""What is done to each row of a tile of logits, in PyTorch on any device.

With x = h W^T + b the product of a row, z = f(x) its logits at temperature T and y the target:

    f(x) = scale x / T                        without a soft-cap
    f(x) = cap tanh(scale x / cap) / T        with one
    log p_y = z_y - log sum_v exp z_v         H = log sum_v exp z_v - sum_v p_v z_v

    d log p_y / d x_v = (1[v = y] - p_v) f'(x_v)
    d H / d x_v       = -p_v (log p_v + H) f'(x_v)

`triton_rows` computes the same with one program a row.
"""

import torch
from torch import Tensor

from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.rows import RowSums


def _logits(tile: Tensor, options: HeadOptions) -> Tensor:
    z = tile * options.logit_scale
    if options.soft_cap is not None:
        z = z.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    return z.div_(options.temperature)


def row_statistics(tile: Tensor, targets: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor, Tensor]:
    """`log_softmax(f(tile))` at the targets, its normaliser, and the entropy of each row.

    Args:
        tile: (n, V) fp32 or fp64, products without temperature, scale or cap; not changed.
        targets: (n,) int64 in [0, V).
        options: temperature, scale, cap.

    Returns:
        logps, log_normalizers and entropies (nats), each (n,) in the tile's dtype.
    """
    z = _logits(tile, options)
    log_normalizers = z.logsumexp(-1)
    logps = z.gather(-1, targets[:, None]).squeeze(-1) - log_normalizers
    z.sub_(log_normalizers[:, None])
    p = z.exp()
    # 0 times the infinity of an entry that cannot be is 0.
    entropies = -p.mul_(z.masked_fill_(p == 0, 0)).sum(-1)
    return logps, log_normalizers, entropies


def row_derivatives(
    tile: Tensor,
    targets: Tensor,
    log_normalizers: Tensor,
    entropies: Tensor,
    logp_coefficients: Tensor | None,
    entropy_coefficients: Tensor | None,
    options: HeadOptions,
    out: Tensor,
) -> None:
    """Write `c_logp * d log p_y / d x + c_entropy * d H / d x` into `out`.

    Args:
        tile: (n, V) fp32 or fp64, as for `row_statistics`; not changed.
        targets: (n,) int64 in [0, V).
        log_normalizers: (n,), from `row_statistics`.
        entropies: (n,), from `row_statistics`.
        logp_coefficients: (n,) or `None` for no such term; one of the two is given.
        entropy_coefficients: (n,) or `None` for no such term.
        options: temperature, scale, cap.
        out: (n, V), any float dtype.
    """
    z = _logits(tile, options)
    cap_slope = None
    if options.soft_cap is not None:
        # tanh is z T / cap, and its derivative 1 - tanh^2.
        cap_slope = 1 - (z * (options.temperature / options.soft_cap)).square_()
    log_p = z.sub_(log_normalizers[:, None])
    gradient = log_p.exp()
    if entropy_coefficients is None:
        assert logp_coefficients is not None, "a derivative has a coefficient"
        gradient *= -logp_coefficients[:, None]
    else:
        factor = log_p.masked_fill_(gradient == 0, 0).add_(entropies[:, None]).mul_(-entropy_coefficients[:, None])
        gradient *= factor if logp_coefficients is None else factor.sub_(logp_coefficients[:, None])
    if logp_coefficients is not None:
        gradient.scatter_add_(-1, targets[:, None], logp_coefficients[:, None])
    gradient *= options.logit_scale / options.temperature
    if cap_slope is not None:
        gradient *= cap_slope
    out.copy_(gradient)


def row_maxima(tile: Tensor, options: HeadOptions) -> Tensor:
    """The largest of `f(tile)` in each row, (n,) in the tile's dtype; the tile is not changed."""
    return _logits(tile, options).amax(-1)


def fold_tile(tile: Tensor, targets: Tensor, sums: RowSums, options: HeadOptions, weights: Tensor | None) -> None:
    """Add a tile of some columns of the vocabulary to the rows' sums; formulas in `vocabulary_tiles`.

    Args:
        tile: (n, C) fp32 or fp64, products without temperature, scale or cap; not changed.
        targets: (n,) int64, counted from the tile's first column; outside [0, C) where another tile holds it.
        sums: its reference is there; the rest is updated in place.
        options: temperature, scale, cap.
        weights: (n, C), any float dtype, gets `e f'(x)`, and 0 at the target; or `None`.
    """
    z = _logits(tile, options)
    slope = torch.full_like(z, options.logit_scale / options.temperature)
    if options.soft_cap is not None:
        slope *= 1 - (z * (options.temperature / options.soft_cap)).square_()
    place = targets.clamp(0, tile.size(1) - 1)[:, None]
    held = (targets >= 0) & (targets < tile.size(1))

    def of_target(values: Tensor) -> Tensor:
        return torch.where(held, values.gather(-1, place).squeeze(-1), 0)

    sums.target_logit += of_target(z)
    sums.target_slope += of_target(slope)
    difference = z.sub_(sums.reference[:, None])
    e = difference.exp()
    sums.weighted += torch.where(e > 0, e * difference, 0).sum(-1)  # 0 times the infinity of an entry that cannot be
    sums.target += of_target(e)
    e.scatter_(-1, place, e.gather(-1, place) * ~held[:, None])
    sums.others += e.sum(-1)
    if weights is not None:
        weights.copy_(e * slope)
