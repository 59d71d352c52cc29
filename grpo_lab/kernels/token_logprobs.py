"""Log-probs and entropies of tokens under an LM head, without the (N, V) logits.

    z_t = f(h_t W^T + b)     log p_t = z_t[y_t] - logsumexp(z_t)     H_t = -sum_v p_tv log p_tv

The rows that count are gathered and walked in chunks of `chunk_size`; one (chunk_size, V) tile of logits
exists at a time, from fp32 accumulators.

Backward, head frozen. For token t, d log p_t / d h_t = (d log p_t / d x_t) W is one row of length H, whatever
loss follows. It is computed while the tile is there and kept, so that the backward pass is `row * upstream`:
4NHV multiply-adds times two in all, and no product in the backward pass.

Backward, head trainable. d W = sum_t c_t (d log p_t / d x_t)^T h_t needs the upstream c_t, so the backward
pass computes each tile again (8NHV) and adds to fp32 accumulators for those of weight, bias and hidden states
that ask.

Source: chunking and recomputation as in cut-cross-entropy (Wijmans et al., arXiv 2411.09009) and TRL's
`ChunkedLogProbFunction`; keeping the derivative row is this project's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_lab.kernels.arguments import check_ids, check_shapes, compute_dtype
from grpo_lab.kernels.dispatch import resolve_implementation
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import add_product_
from grpo_lab.kernels.tiles import Tiles


def _chunks(positions: Tensor, size: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Each chunk's slice of the rows that count, and the index that selects it in tensors of shape (...)."""
    for start in range(0, positions.size(0), size):
        yield slice(start, start + size), positions[start : start + size].unbind(1)


class _FrozenHead(torch.autograd.Function):
    """Keeps the derivative rows that the backward pass scales."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        completion_ids: Tensor,
        positions: Tensor,
        options: HeadOptions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.hidden_shape, ctx.hidden_dtype, ctx.chunk_size = (
            hidden_states.shape,
            hidden_states.dtype,
            options.chunk_size,
        )
        count = positions.size(0)
        tiles = Tiles(count, weight, bias, options, dtype)
        logps = torch.zeros(completion_ids.shape, dtype=tiles.logits.dtype, device=hidden_states.device)
        entropies = torch.zeros_like(logps)
        kept_shape = (count, weight.size(1))
        needs_rows = ctx.needs_input_grad[0]
        logp_rows = weight.new_empty(kept_shape, dtype=dtype) if needs_rows else None
        needs_entropy_rows = needs_rows and options.entropies_require_grad
        entropy_rows = weight.new_empty(kept_shape, dtype=dtype) if needs_entropy_rows else None
        for rows, index in _chunks(positions, options.chunk_size):
            targets = completion_ids[index].long()
            tile, logps[index], normalizers, chunk_entropies = tiles.score(hidden_states[index].to(dtype), targets)
            entropies[index] = chunk_entropies
            ones = torch.ones_like(normalizers)
            for kept, coefficients in ((logp_rows, (ones, None)), (entropy_rows, (None, ones))):
                if kept is not None:
                    derivative = tiles.derivative(tile, targets, normalizers, chunk_entropies, *coefficients)
                    kept[rows] = tiles.hidden_product(derivative)
        ctx.save_for_backward(positions, logp_rows, entropy_rows)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        positions, logp_rows, entropy_rows = ctx.saved_tensors
        terms = [
            (kept, grad)
            for kept, grad in ((logp_rows, grad_logps), (entropy_rows, grad_entropies))
            if kept is not None and grad is not None
        ]
        if not terms:
            return (None,) * 7
        grad_hidden = positions.new_zeros(ctx.hidden_shape, dtype=ctx.hidden_dtype)
        for rows, index in _chunks(positions, ctx.chunk_size):
            grad_hidden[index] = sum(kept[rows] * grad[index][:, None] for kept, grad in terms).to(ctx.hidden_dtype)
        return grad_hidden, None, None, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """Computes each tile again in the backward pass, where the upstream gradient is known."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        completion_ids: Tensor,
        positions: Tensor,
        options: HeadOptions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtype = options, dtype
        tiles = Tiles(positions.size(0), weight, bias, options, dtype)
        logps = torch.zeros(completion_ids.shape, dtype=tiles.logits.dtype, device=hidden_states.device)
        entropies = torch.zeros_like(logps)
        for _, index in _chunks(positions, options.chunk_size):
            h, targets = hidden_states[index].to(dtype), completion_ids[index].long()
            _, logps[index], _, entropies[index] = tiles.score(h, targets)
        ctx.save_for_backward(hidden_states, weight, bias, completion_ids, positions)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logps is None and grad_entropies is None:
            return (None,) * 7
        hidden_states, weight, bias, completion_ids, positions = ctx.saved_tensors
        tiles = Tiles(positions.size(0), weight, bias, ctx.options, ctx.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_states) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=tiles.logits.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=tiles.logits.dtype) if needs_bias else None
        for _, index in _chunks(positions, ctx.options.chunk_size):
            h, targets = hidden_states[index].to(ctx.dtype), completion_ids[index].long()
            tile, _, normalizers, entropies = tiles.score(h, targets)
            coefficients = (None if g is None else g[index] for g in (grad_logps, grad_entropies))
            derivative = tiles.derivative(tile, targets, normalizers, entropies, *coefficients)
            if grad_hidden is not None:
                grad_hidden[index] = tiles.hidden_product(derivative).to(grad_hidden.dtype)
            if grad_weight is not None:
                add_product_(grad_weight, derivative.T, h)
            if grad_bias is not None:
                grad_bias += derivative.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
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

    `f(x) = logit_scale x / temperature`, with `cap tanh(. / cap)` before the division where `soft_cap` is
    given. At no time do more than `chunk_size` rows of logits exist: memory above the inputs is a `chunk_size
    x V` tile in fp32 and one in the compute dtype ("torch" needs two more, three with a soft-cap), and
    `V x H` in fp32 only for a weight that requires a gradient. With a frozen head the forward pass keeps one
    row of H values, in the compute dtype, for each token that counts. Masked tokens enter no product.

    The compute dtype of the products is autocast's where it is on, else the wider of hidden states and
    weight; accumulators are fp32 (fp64 for fp64). Each gradient has its own input's dtype. Backward may be
    repeated with `retain_graph=True`; second derivatives are not offered.

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
        (...) fp32 log-probs (fp64 for fp64 inputs), 0 where masked, and the (...) entropies in nats or
        `None`.

    Raises:
        ValueError: shapes or options do not fit, an id that counts lies outside [0, V) (named with its
            position), or fp64 is asked of Triton.
        RuntimeError: Triton cannot run here.
    """
    options = HeadOptions(temperature, chunk_size, implementation, logit_scale, soft_cap, entropies_require_grad)
    resolve_implementation(implementation, hidden_states.device)
    check_shapes(hidden_states, weight, bias, completion_ids, completion_mask)
    dtype = compute_dtype(hidden_states, weight)
    if implementation == "triton" and dtype == torch.float64:
        raise ValueError("implementation 'triton' computes in fp32; for fp64 inputs use implementation='torch'.")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    check_ids(completion_ids, mask, weight.size(0))
    if not torch.is_grad_enabled():
        # An autograd function sees what requires a gradient, not that gradients are off.
        hidden_states = hidden_states.detach()
    head_trains = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    function = _TrainableHead if head_trains else _FrozenHead
    logps, entropies = function.apply(hidden_states, weight, bias, completion_ids, mask.nonzero(), options, dtype)
    return logps, entropies if return_entropies else None
