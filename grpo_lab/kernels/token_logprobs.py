"""Log-probs and entropies of tokens under an LM head, without the (N, V) logits.

    z_t = f(h_t W^T + b)     log p_t = z_t[y_t] - logsumexp(z_t)     H_t = -sum_v p_tv log p_tv

Rows are walked in chunks of `chunk_size`; one (chunk_size, V) tile of logits exists at a time, from fp32 accumulators.

Backward, head frozen. For token t, d log p_t / d h_t = (d log p_t / d x_t) W is one row of length H, whatever loss
follows. It is computed while the tile is there and kept in place of the hidden states, so that the backward pass is
`row * upstream`: 4NHV multiply-adds times two in all, and no product in the backward pass.

Backward, head trainable. d W = sum_t c_t (d log p_t / d x_t)^T h_t needs the upstream c_t, so the backward pass
computes each tile again (8NHV) and adds to fp32 accumulators for those of weight, bias and hidden states that ask.

Source: chunking and recomputation as in cut-cross-entropy (Wijmans et al., arXiv 2411.09009) and TRL's
`ChunkedLogProbFunction`; keeping the derivative row is this project's.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_lab.kernels import torch_rows
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import accumulator_dtype, add_product_, hidden_product_, logits_product_


def _row_functions(options: HeadOptions) -> ModuleType:
    if options.implementation == "torch":
        return torch_rows
    # Importing Triton's kernels compiles nothing, but needs Triton.
    from grpo_lab.kernels import triton_rows

    return triton_rows


class _Tiles:
    """One tile of logits and one of their derivative, reused from chunk to chunk."""

    def __init__(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> None:
        self.weight, self.bias, self.options = weight, bias, options
        self.rows = _row_functions(options)
        size = (min(options.chunk_size, hidden_states.size(0)), weight.size(0))
        self.logits = hidden_states.new_empty(size, dtype=accumulator_dtype(hidden_states.dtype))
        self._derivative: Tensor | None = None

    def score(self, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunk's tile of products, and its log-probs, normalisers and entropies."""
        tile = self.logits[: hidden_states.size(0)]
        logits_product_(tile, hidden_states, self.weight)
        if self.bias is not None:
            tile += self.bias.to(tile.dtype)
        return tile, *self.rows.row_statistics(tile, targets, self.options)

    def derivative(self, tile: Tensor, dtype: torch.dtype, *arguments: Any) -> Tensor:
        """The chunk's derivative with respect to the products, in the compute dtype."""
        if self._derivative is None:
            self._derivative = torch.empty_like(self.logits, dtype=dtype)
        out = self._derivative[: tile.size(0)]
        self.rows.row_derivatives(tile, *arguments, self.options, out)
        return out


class _FrozenHead(torch.autograd.Function):
    """Keeps the derivative rows that the backward pass scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        needs_rows = ctx.needs_input_grad[0]
        tiles = _Tiles(hidden_states, weight, bias, options)
        logps = torch.empty(hidden_states.size(0), dtype=tiles.logits.dtype, device=hidden_states.device)
        entropies = torch.empty_like(logps)
        logp_rows = torch.empty_like(hidden_states) if needs_rows else None
        entropy_rows = torch.empty_like(hidden_states) if needs_rows and options.entropies_require_grad else None
        for start in range(0, hidden_states.size(0), options.chunk_size):
            chunk = slice(start, start + options.chunk_size)
            h, y = hidden_states[chunk], targets[chunk]
            tile, logps[chunk], normalizers, entropies[chunk] = tiles.score(h, y)
            ones = torch.ones_like(normalizers)
            for rows, coefficients in ((logp_rows, (ones, None)), (entropy_rows, (None, ones))):
                if rows is not None:
                    product = torch.empty(h.shape, dtype=tile.dtype, device=h.device)
                    derivative = tiles.derivative(tile, h.dtype, y, normalizers, entropies[chunk], *coefficients)
                    hidden_product_(product, derivative, weight)
                    rows[chunk] = product
        ctx.save_for_backward(logp_rows, entropy_rows)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden = None
        for rows, grad in zip(ctx.saved_tensors, (grad_logps, grad_entropies), strict=True):
            if rows is not None and grad is not None:
                term = (rows * grad[:, None]).to(rows.dtype)
                grad_hidden = term if grad_hidden is None else grad_hidden + term
        return grad_hidden, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """Computes each tile again in the backward pass, where the upstream gradient is known."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tiles = _Tiles(hidden_states, weight, bias, options)
        logps = torch.empty(hidden_states.size(0), dtype=tiles.logits.dtype, device=hidden_states.device)
        entropies = torch.empty_like(logps)
        for start in range(0, hidden_states.size(0), options.chunk_size):
            chunk = slice(start, start + options.chunk_size)
            _, logps[chunk], _, entropies[chunk] = tiles.score(hidden_states[chunk], targets[chunk])
        ctx.options = options
        ctx.save_for_backward(hidden_states, weight, bias, targets)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, targets = ctx.saved_tensors
        options: HeadOptions = ctx.options
        tiles = _Tiles(hidden_states, weight, bias, options)
        dtype, device = tiles.logits.dtype, hidden_states.device
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_states) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=device) if needs_weight else None
        grad_bias = torch.zeros(weight.size(0), dtype=dtype, device=device) if needs_bias else None
        for start in range(0, hidden_states.size(0), options.chunk_size):
            chunk = slice(start, start + options.chunk_size)
            h, y = hidden_states[chunk], targets[chunk]
            tile, _, normalizers, entropies = tiles.score(h, y)
            coefficients = (None if g is None else g[chunk].contiguous() for g in (grad_logps, grad_entropies))
            derivative = tiles.derivative(tile, h.dtype, y, normalizers, entropies, *coefficients)
            if grad_hidden is not None:
                product = torch.empty(h.shape, dtype=dtype, device=device)
                hidden_product_(product, derivative, weight)
                grad_hidden[chunk] = product
            if grad_weight is not None:
                add_product_(grad_weight, derivative.T, h)
            if grad_bias is not None:
                grad_bias += derivative.sum(0, dtype=dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _compute_dtype(hidden_states: Tensor, weight: Tensor) -> torch.dtype:
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden_states.dtype, weight.dtype)


def _check_shapes(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, completion_ids: Tensor, mask: Tensor | None
) -> None:
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a whole (V, H) float matrix; got shape {tuple(weight.shape)}, {weight.dtype}. A sharded "
            "weight is gathered and a quantised one dequantised before it comes here."
        )
    if hidden_states.shape[:-1] != completion_ids.shape or hidden_states.size(-1) != weight.size(1):
        raise ValueError(
            f"hidden_states must be (..., {weight.size(1)}) with completion_ids (...); got "
            f"{tuple(hidden_states.shape)} and {tuple(completion_ids.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.size(0)},); got {tuple(bias.shape)}.")
    if mask is not None and mask.shape != completion_ids.shape:
        raise ValueError(
            f"completion_mask must have the shape of completion_ids, {tuple(completion_ids.shape)}; got "
            f"{tuple(mask.shape)}."
        )


def _check_ids(ids: Tensor, positions: Tensor, vocabulary: int) -> None:
    wrong = (ids < 0) | (ids >= vocabulary)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"completion_ids must lie in [0, {vocabulary}) where completion_mask is 1; got {int(ids[first])} at "
            f"position {tuple(positions[first].tolist())}."
        )


def per_token_logps(
    hidden_states: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    implementation: str,
    completion_mask: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    return_entropies: bool = False,
    entropies_require_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `completion_ids`: `log_softmax(f(hidden_states @ weight.T + bias))` gathered at them.

    `f(x) = logit_scale x / temperature`, with `cap tanh(. / cap)` before the division where `soft_cap` is given. At no
    time do more than `chunk_size` rows of logits exist: memory above the inputs is `chunk_size x V` values (one tile
    in fp32 and one in the compute dtype), and `V x H` in fp32 only for a weight that requires a gradient. Masked rows
    cost nothing. With a frozen head the forward pass also keeps one row of H values a token, in the compute dtype.

    The compute dtype of the products is autocast's where it is on, else the wider of hidden states and weight;
    accumulators are fp32 (fp64 for fp64). Each gradient has its own input's dtype. Backward may be repeated with
    `retain_graph=True`; second derivatives are not offered.

    Args:
        hidden_states: (..., H) float, at the positions that predict `completion_ids`; gradient flows.
        weight: (V, H) float; gradient flows where required.
        completion_ids: (...) integer; anything where masked.
        temperature: > 0; divides the logits.
        chunk_size: tokens, >= 1; the result does not depend on it.
        implementation: `"torch"` or `"triton"`.
        completion_mask: (...) bool, integer or float, 1 counts; `None` counts all.
        bias: (V,) float; gradient flows where required.
        logit_scale: multiplies the products.
        soft_cap: > 0 or `None`.
        return_entropies: whether the entropies are returned.
        entropies_require_grad: whether gradient flows through them; costs a second kept row.

    Returns:
        (...) fp32 log-probs (fp64 for fp64 inputs), 0 where masked, and the (...) entropies in nats or `None`.

    Raises:
        ValueError: shapes or options do not fit, or an id that counts lies outside [0, V) (named with its position).
        RuntimeError: Triton cannot run here.
    """
    options = HeadOptions(temperature, chunk_size, implementation, logit_scale, soft_cap, entropies_require_grad)
    _check_shapes(hidden_states, weight, bias, completion_ids, completion_mask)
    dtype = _compute_dtype(hidden_states, weight)
    if completion_mask is None:
        mask = torch.ones_like(completion_ids, dtype=torch.bool)
    else:
        mask = completion_mask != 0
    ids = completion_ids[mask].long()
    _check_ids(ids, mask.nonzero(), weight.size(0))
    rows = hidden_states[mask].to(dtype)
    head_trains = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    function = _TrainableHead if head_trains else _FrozenHead
    logps, entropies = function.apply(rows, weight, bias, ids, options)
    # Scattering keeps the result attached to the hidden states even where every row is masked.
    scattered = (torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mask, x) for x in (logps, entropies))
    per_token, per_token_entropies = scattered
    return per_token, per_token_entropies if return_entropies else None
