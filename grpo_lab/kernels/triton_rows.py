"""What is done to each row of a tile of logits, one Triton program a row; formulas in `torch_rows`.

A program walks its row in blocks and keeps a running maximum m with s = sum exp(z - m) and w = sum exp(z - m)
z, rescaled when m grows (online softmax: Milakov and Gimelshein, arXiv 1805.02867). Sums are in the tile's
fp32. Rows lie on the first grid axis, which holds 2^31 - 1 programs, and offsets are 64-bit: row times V
passes 2^31 at 14,135 rows of a vocabulary of 151,936.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.rows import RowSums

BLOCK_SIZE = 2048


@triton.jit
def _logits(x, logit_scale, inv_temperature, soft_cap, HAS_CAP: tl.constexpr):
    z = x * logit_scale
    if HAS_CAP:
        # tanh(a) = 2 sigmoid(2 a) - 1
        z = soft_cap * (2 * tl.sigmoid(2 * z / soft_cap) - 1)
    return z * inv_temperature


@triton.jit
def _statistics_kernel(
    p_tile, p_targets, p_logps, p_log_normalizers, p_entropies,
    row_stride, V, logit_scale, inv_temperature, soft_cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_tile + i_row * row_stride
    m = -float("inf")
    s = 0.0
    w = 0.0
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < V
        b_x = tl.load(p_row + o_v, mask=m_v, other=0.0)
        b_z = _logits(b_x, logit_scale, inv_temperature, soft_cap, HAS_CAP)
        m_new = tl.maximum(m, tl.max(tl.where(m_v, b_z, -float("inf")), axis=0))
        b_e = tl.where(m_v, tl.exp(b_z - m_new), 0.0)
        rescale = tl.exp(m - m_new)
        s = s * rescale + tl.sum(b_e, axis=0)
        # 0 times the infinity of an entry that cannot be is 0.
        w = w * rescale + tl.sum(tl.where(b_e > 0, b_e * b_z, 0.0), axis=0)
        m = m_new
    log_normalizer = m + tl.log(s)
    target = tl.load(p_targets + i_row)
    z_target = _logits(tl.load(p_row + target), logit_scale, inv_temperature, soft_cap, HAS_CAP)
    tl.store(p_logps + i_row, z_target - log_normalizer)
    tl.store(p_log_normalizers + i_row, log_normalizer)
    tl.store(p_entropies + i_row, log_normalizer - w / s)


@triton.jit
def _derivatives_kernel(
    p_tile, p_targets, p_log_normalizers, p_entropies, p_logp_coefficients, p_entropy_coefficients, p_out,
    row_stride, out_stride, V, logit_scale, inv_temperature, soft_cap,
    HAS_CAP: tl.constexpr, HAS_LOGP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_tile + i_row * row_stride
    p_out_row = p_out + i_row * out_stride
    target = tl.load(p_targets + i_row)
    log_normalizer = tl.load(p_log_normalizers + i_row)
    if HAS_LOGP:
        c_logp = tl.load(p_logp_coefficients + i_row)
    if HAS_ENTROPY:
        c_entropy = tl.load(p_entropy_coefficients + i_row)
        entropy = tl.load(p_entropies + i_row)
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < V
        b_x = tl.load(p_row + o_v, mask=m_v, other=0.0)
        b_z = _logits(b_x, logit_scale, inv_temperature, soft_cap, HAS_CAP)
        b_logp = b_z - log_normalizer
        b_p = tl.exp(b_logp)
        b_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
        if HAS_LOGP:
            b_gradient += c_logp * (tl.where(o_v == target, 1.0, 0.0) - b_p)
        if HAS_ENTROPY:
            b_gradient -= c_entropy * tl.where(b_p > 0, b_p * (b_logp + entropy), 0.0)
        b_gradient *= logit_scale * inv_temperature
        if HAS_CAP:
            b_tanh = b_z / (soft_cap * inv_temperature)
            b_gradient *= 1 - b_tanh * b_tanh
        tl.store(p_out_row + o_v, b_gradient.to(p_out.dtype.element_ty), mask=m_v)


@triton.jit
def _maxima_kernel(
    p_tile, p_maxima, row_stride, V, logit_scale, inv_temperature, soft_cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_tile + i_row * row_stride
    m = -float("inf")
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < V
        b_x = tl.load(p_row + o_v, mask=m_v, other=0.0)
        b_z = _logits(b_x, logit_scale, inv_temperature, soft_cap, HAS_CAP)
        m = tl.maximum(m, tl.max(tl.where(m_v, b_z, -float("inf")), axis=0))
    tl.store(p_maxima + i_row, m)


@triton.jit
def _fold_kernel(
    p_tile, p_targets, p_reference, p_others, p_target, p_weighted, p_target_logit, p_target_slope, p_weights,
    row_stride, V, logit_scale, inv_temperature, soft_cap,
    HAS_CAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_tile + i_row * row_stride
    reference = tl.load(p_reference + i_row)
    target = tl.load(p_targets + i_row)
    s = 0.0
    w = 0.0
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < V
        b_x = tl.load(p_row + o_v, mask=m_v, other=0.0)
        b_z = _logits(b_x, logit_scale, inv_temperature, soft_cap, HAS_CAP)
        b_difference = b_z - reference
        b_e = tl.where(m_v, tl.exp(b_difference), 0.0)
        # 0 times the infinity of an entry that cannot be.
        w += tl.sum(tl.where(b_e > 0, b_e * b_difference, 0.0), axis=0)
        b_e = tl.where(o_v == target, 0.0, b_e)
        s += tl.sum(b_e, axis=0)
        if HAS_WEIGHTS:
            b_weights = b_e * logit_scale * inv_temperature
            if HAS_CAP:
                b_tanh = b_z / (soft_cap * inv_temperature)
                b_weights *= 1 - b_tanh * b_tanh
            tl.store(p_weights + i_row * row_stride + o_v, b_weights.to(p_weights.dtype.element_ty), mask=m_v)
    tl.store(p_others + i_row, tl.load(p_others + i_row) + s)
    tl.store(p_weighted + i_row, tl.load(p_weighted + i_row) + w)
    if (target >= 0) & (target < V):
        z = _logits(tl.load(p_row + target), logit_scale, inv_temperature, soft_cap, HAS_CAP)
        slope = logit_scale * inv_temperature
        if HAS_CAP:
            target_tanh = z / (soft_cap * inv_temperature)
            slope *= 1 - target_tanh * target_tanh
        tl.store(p_target + i_row, tl.exp(z - reference))
        tl.store(p_target_logit + i_row, z)
        tl.store(p_target_slope + i_row, slope)


def _launch_options(tile: Tensor, options: HeadOptions) -> dict[str, object]:
    return {
        "V": tile.size(1),
        "logit_scale": float(options.logit_scale),
        "inv_temperature": 1.0 / options.temperature,
        "soft_cap": options.soft_cap or 1.0,
        "HAS_CAP": options.soft_cap is not None,
        "BLOCK": min(BLOCK_SIZE, triton.next_power_of_2(tile.size(1))),
    }


def row_statistics(tile: Tensor, targets: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor, Tensor]:
    """As `torch_rows.row_statistics`, for an fp32 tile whose rows are contiguous."""
    logps, log_normalizers, entropies = torch.empty(3, tile.size(0), dtype=tile.dtype, device=tile.device)
    _statistics_kernel[(tile.size(0),)](
        tile, targets, logps, log_normalizers, entropies, tile.stride(0), **_launch_options(tile, options)
    )
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
    """As `torch_rows.row_derivatives`, for an fp32 tile whose rows are contiguous."""
    _derivatives_kernel[(tile.size(0),)](
        tile,
        targets,
        log_normalizers,
        entropies,
        log_normalizers if logp_coefficients is None else logp_coefficients,
        log_normalizers if entropy_coefficients is None else entropy_coefficients,
        out,
        tile.stride(0),
        out.stride(0),
        HAS_LOGP=logp_coefficients is not None,
        HAS_ENTROPY=entropy_coefficients is not None,
        **_launch_options(tile, options),
    )


def row_maxima(tile: Tensor, options: HeadOptions) -> Tensor:
    """As `torch_rows.row_maxima`, for an fp32 tile whose rows are contiguous."""
    maxima = torch.empty(tile.size(0), dtype=tile.dtype, device=tile.device)
    _maxima_kernel[(tile.size(0),)](tile, maxima, tile.stride(0), **_launch_options(tile, options))
    return maxima


def fold_tile(tile: Tensor, targets: Tensor, sums: RowSums, options: HeadOptions, weights: Tensor | None) -> None:
    """As `torch_rows.fold_tile`, for contiguous fp32 tiles and sums whose entries are contiguous."""
    _fold_kernel[(tile.size(0),)](
        tile,
        targets,
        sums.reference,
        sums.others,
        sums.target,
        sums.weighted,
        sums.target_logit,
        sums.target_slope,
        tile if weights is None else weights,
        tile.stride(0),
        HAS_WEIGHTS=weights is not None,
        **_launch_options(tile, options),
    )
