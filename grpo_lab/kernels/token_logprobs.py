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

With `vocabulary_tile` the frozen head's pass walks the vocabulary too, see `vocabulary_tiles`.

Source: chunking and recomputation as in cut-cross-entropy (Wijmans et al., arXiv 2411.09009) and TRL's
`ChunkedLogProbFunction`; keeping the derivative row is this project's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_lab.kernels.arguments import Head, check_ids, check_shapes, compute_dtype
from grpo_lab.kernels.dispatch import resolve_implementation
from grpo_lab.kernels.options import HeadOptions
from grpo_lab.kernels.products import add_product_
from grpo_lab.kernels.tiles import Tiles
from grpo_lab.kernels.vocabulary_tiles import VocabularyTiles


def _chunks(positions: Tensor, size: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Each chunk's slice of the rows that count, and the index that selects it in tensors of shape (...)."""
    for start in range(0, positions.size(0), size):
        yield slice(start, start + size), positions[start : start + size].unbind(1)


def _chunk_of(states: tuple[Tensor, ...], index: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [state[index].to(dtype) for state in states]


class _FrozenHead(torch.autograd.Function):
    """Keeps the derivative rows that the backward pass scales."""

    @staticmethod
    def forward(
        ctx: Any,
        completion_ids: Tensor,
        positions: Tensor,
        options: HeadOptions,
        dtype: torch.dtype,
        head: Head,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.chunk_size = options.chunk_size
        ctx.shapes_and_dtypes = [(state.shape, state.dtype) for state in states]
        count = positions.size(0)
        walker = Tiles if options.vocabulary_tile is None else VocabularyTiles
        tiles = walker(count, head, options, dtype)
        logps = torch.zeros(completion_ids.shape, dtype=tiles.logits.dtype, device=completion_ids.device)
        entropies = torch.zeros_like(logps)
        needed = list(ctx.needs_input_grad[-len(states) :])

        def rows_to_keep(differentiable: bool) -> list[Tensor | None]:
            return [
                weight.new_empty((count, weight.size(1)), dtype=dtype) if needs and differentiable else None
                for needs, weight in zip(needed, head.weights, strict=True)
            ]

        logp_rows, entropy_rows = rows_to_keep(True), rows_to_keep(options.entropies_require_grad)
        for rows, index in _chunks(positions, options.chunk_size):
            targets = completion_ids[index].long()
            walked = tiles.walk(_chunk_of(states, index, dtype), targets, needed, options.entropies_require_grad)
            logps[index], entropies[index] = walked.logps, walked.entropies
            for kept, found in zip(logp_rows + entropy_rows, walked.logp_rows + walked.entropy_rows, strict=True):
                if kept is not None and found is not None:
                    kept[rows] = found
        ctx.save_for_backward(positions, *logp_rows, *entropy_rows)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        positions, *kept = ctx.saved_tensors
        count = len(ctx.shapes_and_dtypes)
        grads: list[Tensor | None] = []
        for (shape, dtype), *parts in zip(ctx.shapes_and_dtypes, kept[:count], kept[count:], strict=True):
            terms = [
                (part, grad)
                for part, grad in zip(parts, (grad_logps, grad_entropies), strict=True)
                if part is not None and grad is not None
            ]
            if not terms:
                grads.append(None)
                continue
            grad_state = positions.new_zeros(shape, dtype=dtype)
            for rows, index in _chunks(positions, ctx.chunk_size):
                grad_state[index] = sum(part[rows] * grad[index][:, None] for part, grad in terms).to(dtype)
            grads.append(grad_state)
        return (None,) * 5 + tuple(grads)


class _TrainableHead(torch.autograd.Function):
    """Computes each tile again in the backward pass, where the upstream gradient is known."""

    @staticmethod
    def forward(
        ctx: Any,
        completion_ids: Tensor,
        positions: Tensor,
        options: HeadOptions,
        dtype: torch.dtype,
        bias: Tensor | None,
        vocabulary_scale: Tensor | None,
        *states_and_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtype = options, dtype
        half = len(states_and_weights) // 2
        states, head = states_and_weights[:half], Head(states_and_weights[half:], bias, vocabulary_scale)
        tiles = Tiles(positions.size(0), head, options, dtype)
        logps = torch.zeros(completion_ids.shape, dtype=tiles.logits.dtype, device=completion_ids.device)
        entropies = torch.zeros_like(logps)
        for _, index in _chunks(positions, options.chunk_size):
            targets = completion_ids[index].long()
            _, logps[index], _, entropies[index] = tiles.score(_chunk_of(states, index, dtype), targets)
        ctx.save_for_backward(completion_ids, positions, bias, vocabulary_scale, *states_and_weights)
        if not options.entropies_require_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logps is None and grad_entropies is None:
            return (None,) * len(ctx.needs_input_grad)
        completion_ids, positions, bias, vocabulary_scale, *states_and_weights = ctx.saved_tensors
        half = len(states_and_weights) // 2
        states, weights = tuple(states_and_weights[:half]), tuple(states_and_weights[half:])
        needs_bias, needs_scale, *needs = ctx.needs_input_grad[4:]
        tiles = Tiles(positions.size(0), Head(weights, bias, vocabulary_scale), ctx.options, ctx.dtype, needs_scale)
        wide = tiles.logits.dtype
        grad_states = [torch.zeros_like(t) if n else None for t, n in zip(states, needs[:half], strict=True)]
        grad_weights = [
            torch.zeros_like(t, dtype=wide) if n else None for t, n in zip(weights, needs[half:], strict=True)
        ]
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        grad_scale = torch.zeros_like(vocabulary_scale, dtype=wide) if needs_scale else None
        for _, index in _chunks(positions, ctx.options.chunk_size):
            chunk, targets = _chunk_of(states, index, ctx.dtype), completion_ids[index].long()
            tile, _, normalizers, entropies = tiles.score(chunk, targets)
            coefficients = (None if g is None else g[index] for g in (grad_logps, grad_entropies))
            derivative = tiles.derivative(tile, targets, normalizers, entropies, *coefficients)
            if grad_bias is not None:
                grad_bias += derivative.sum(0, dtype=wide)
            if grad_scale is not None:
                assert tiles.unscaled is not None, "kept where the scale needs its gradient"
                grad_scale += (tiles.unscaled[: derivative.size(0)] * derivative).sum(0)
            tiles.scale_(derivative)
            for number, state in enumerate(chunk):
                if (grad := grad_states[number]) is not None:
                    grad[index] = tiles.state_product(derivative, number).to(grad.dtype)
                if (grad := grad_weights[number]) is not None:
                    add_product_(grad, derivative.T, state)
        grad_weights = [None if g is None else g.to(w.dtype) for g, w in zip(grad_weights, weights, strict=True)]
        return (
            *(None,) * 4,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None if grad_scale is None else grad_scale.to(vocabulary_scale.dtype),
            *grad_states,
            *grad_weights,
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
    low_rank: tuple[Tensor, Tensor] | None = None,
    vocabulary_scale: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    return_entropies: bool = False,
    entropies_require_grad: bool = False,
    vocabulary_tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `completion_ids`: `log_softmax(f(x))` gathered at them, with `x = hidden_states @ weight.T + bias`.

    `f(x) = logit_scale x / temperature`, with `cap tanh(. / cap)` before the division where `soft_cap` is
    given. An adapter on the head comes as `low_rank` (u, B) and `vocabulary_scale` s, which make `x` into `s
    (hidden_states @ weight.T + u @ B.T) + bias` at the cost of r more columns, never of a (V, H) matrix. At
    no time do more than `chunk_size` rows of logits exist: memory above the inputs is a `chunk_size x V` tile
    in fp32 and one in the compute dtype ("torch" needs two more, three with a soft-cap), and `V x H` in fp32
    only for a weight that requires a gradient. With a frozen head the forward pass keeps one row of H values,
    in the compute dtype, for each token that counts. Masked tokens enter no product.

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
        low_rank: states u (..., r) and weight B (V, r), float; gradient flows where required. They are
            rounded to the compute dtype, as autocast would.
        vocabulary_scale: (V,) float, multiplies the products before the bias; gradient flows where required,
            for one more tile.
        logit_scale: multiplies the products.
        soft_cap: > 0 or `None`.
        return_entropies: whether the entropies are returned.
        entropies_require_grad: whether gradient flows through them; costs a second kept row.
        vocabulary_tile: entries of the vocabulary whose logits exist at one time, >= 1, for a frozen head and
            entropies without gradient; the result does not depend on it, and the tiles above are `chunk_size
            x vocabulary_tile`, with an fp32 `chunk_size x H` accumulator beside them. `None` for all entries.

    Returns:
        (...) fp32 log-probs (fp64 for fp64 inputs), 0 where masked, and the (...) entropies in nats or
        `None`.

    Raises:
        ValueError: shapes or options do not fit, an id that counts lies outside [0, V) (named with its
            position), or fp64 is asked of Triton.
        RuntimeError: Triton cannot run here.
    """
    options = HeadOptions(
        temperature, chunk_size, implementation, logit_scale, soft_cap, entropies_require_grad, vocabulary_tile
    )
    resolve_implementation(implementation, hidden_states.device)
    states: tuple[Tensor, ...] = (hidden_states,) if low_rank is None else (hidden_states, low_rank[0])
    head = Head((weight,) if low_rank is None else (weight, low_rank[1]), bias, vocabulary_scale)
    check_shapes(states, head, completion_ids, completion_mask)
    dtype = compute_dtype(hidden_states, weight)
    if implementation == "triton" and dtype == torch.float64:
        raise ValueError("implementation 'triton' computes in fp32; for fp64 inputs use implementation='torch'.")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    check_ids(completion_ids, mask, weight.size(0))
    arguments = (completion_ids, mask.nonzero(), options, dtype)
    if vocabulary_tile is not None and (head.requires_grad or entropies_require_grad):
        raise ValueError(
            "vocabulary_tile is for a frozen head and entropies without a gradient; got "
            f"{'a tensor of the head that requires one' if head.requires_grad else 'entropies_require_grad=True'}."
        )
    if head.requires_grad:
        logps, entropies = _TrainableHead.apply(*arguments, bias, vocabulary_scale, *states, *head.weights)
    else:
        if not torch.is_grad_enabled():
            # An autograd function sees what requires a gradient, not that gradients are off.
            states = tuple(state.detach() for state in states)
        logps, entropies = _FrozenHead.apply(*arguments, head, *states)
    return logps, entropies if return_entropies else None
