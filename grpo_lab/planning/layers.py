"""A decoder layer of Llama, Qwen2 or Qwen3 by size, in the order of transformers' modules.

What one layer leaves saved, for N = B x S tokens, w bytes an element of the compute dtype, S padded positions, q and k
the columns of the query and of the key heads; checked by hand in `tests/planning/test_layers.py`:

    norms        w = 4: the residual stream, N H 4, twice (pow and mul share it).  w = 2: its fp32 copies, N H 4 twice.
                 Qwen3: the same of queries and keys, N (q + k) 4. One rsqrt a row.
    attention    q, repeated k, repeated v, result: 4 N q w; the mask in the compute dtype, B S S w (SDPA makes it anew
                 in each layer); one fp32 log-sum-exp for each head and row.
    MLP          gate, silu(gate), up: 3 N I w. The product of the last two is saved only where down_proj's input is.
    LoRA         A's input for each linear: N in w; with w = 4 linears of one input share it, under autocast each
                 makes its own copy. A's result, N r w. Autocast's copies of A and B.
    full         each norm's result and what it was before the weight: 2 N H w twice; the MLP's product, N I w.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.planning import operators as op
from grpo_lab.planning.operators import ATTENTION, FP32_BYTES, LORA
from grpo_lab.planning.shape import LINEARS, LoraSettings, ModelShape, width_of
from grpo_lab.planning.tape import Block, Parameter, Tape, Value


@dataclass(frozen=True)
class Batch:
    """Sizes of a micro-batch.

    Attributes:
        sequences: B.
        positions: S, prompt and completion tokens with padding.
        padded: whether some positions are masked, so that attention gets a mask and a copy of keys and values.
        attention: `"sdpa"` or `"eager"`.
    """

    sequences: int
    positions: int
    padded: bool
    attention: str

    @property
    def rows(self) -> int:
        """N = B x S."""
        return self.sequences * self.positions


class Linear:
    """A linear of a decoder layer, with its adapter where it has one."""

    def __init__(self, shape: ModelShape, name: str, width: int, adapter: LoraSettings | None) -> None:
        self.columns, self.out = shape.linear(name)
        full = adapter is None
        self.weight = Parameter(self.columns * self.out, width, trainable=full)
        self.bias = Parameter(self.out, width, trainable=full) if shape.has_bias(name) else None
        self.rank = 0
        if adapter is not None and name in adapter.names:
            self.rank, self.adapter_width = adapter.r, width_of(adapter.dtype)
            self.a = Parameter(adapter.r * self.columns, self.adapter_width, trainable=True)
            self.b = Parameter(adapter.r * self.out, self.adapter_width, trainable=True)

    def __call__(self, tape: Tape, x: Value, rows: int) -> Value:
        """PEFT's `base(x) + B(A(x)) * scale`: x is cast to A's dtype first, and by autocast back again."""
        result = op.linear(tape, x, rows, self.out, self.weight)
        if not self.rank:
            return result
        width = result.width
        x = op.cast(tape, x, self.adapter_width)
        low = op.linear(tape, x, rows, self.rank, self.a, LORA)
        update = op.scale(tape, op.linear(tape, low, rows, self.out, self.b, LORA))
        return op.cast(tape, op.add(tape, result, update), width)


def norm(tape: Tape, x: Value, rows: int, weight: Parameter) -> Value:
    """RMSNorm: `weight * (x32 * rsqrt(mean(x32^2))).to(dtype)` with x32 = x in fp32."""
    width = x.width
    x = op.cast(tape, x, FP32_BYTES)
    root = op.inverse_root(tape, op.row_mean(tape, op.square(tape, x), rows))
    x = op.multiply(tape, x, root)
    return op.times_weight(tape, op.cast(tape, x, width), weight)


def sdpa(tape: Tape, q: Value, k: Value, v: Value, batch: Batch, heads: int) -> Value:
    """Fused attention: saves q, k, v, its result, a log-sum-exp, and the mask that it makes of True and False."""
    statistics = tape.block(batch.rows * heads * FP32_BYTES)
    result = tape.block(q.block.size_bytes)
    saves = [q.block, k.block, v.block, result, statistics]
    if batch.padded:
        saves.append(tape.block(batch.sequences * batch.positions**2 * q.width))
    sizes = [value.block.size_bytes for value in (q, k, v)]

    def backward(_: Block) -> list[Block | None]:
        return [tape.block(size_bytes) for size_bytes in sizes]

    return tape.value([q, k, v], q.elements, q.width, backward, saves=saves, component=ATTENTION, block=result)


def eager(tape: Tape, q: Value, k: Value, v: Value, batch: Batch, heads: int) -> Value:
    """`softmax(q k^T * scale + mask) v` in steps: the scores, B heads S S, exist several times, and in fp32 too."""
    scores, width = batch.sequences * heads * batch.positions**2, q.width
    sizes = [value.block.size_bytes for value in (q, k, v)]

    def of_product(one: int, other: int) -> list[Block | None]:
        return [tape.block(one), tape.block(other)]

    product = tape.value(
        [q, k], scores, width, lambda _: of_product(sizes[0], sizes[1]), saves=[q.block, k.block], component=ATTENTION
    )
    scaled = op.scale(tape, product)
    del product
    masked = tape.value([scaled], scores, width, lambda gradient: [gradient])
    del scaled
    wide = op.cast(tape, masked, FP32_BYTES)
    block = tape.block(scores * FP32_BYTES)
    shares = tape.value(
        [wide],
        scores,
        FP32_BYTES,
        lambda g: [tape.block(g.size_bytes)],
        saves=[block],
        component=ATTENTION,
        block=block,
    )
    del masked, wide, block
    shares = op.cast(tape, shares, width)
    return tape.value(
        [shares, v],
        q.elements,
        width,
        lambda _: of_product(scores * width, sizes[2]),
        saves=[shares.block, v.block],
        component=ATTENTION,
    )


class DecoderLayer:
    """One layer: its parameters, and its forward pass by size."""

    def __init__(self, shape: ModelShape, width: int, adapter: LoraSettings | None) -> None:
        full = adapter is None
        self.shape = shape
        self.linears = {name: Linear(shape, name, width, adapter) for name in LINEARS}
        self.norms = [Parameter(shape.hidden, width, trainable=full) for _ in range(2)]
        self.head_norms = [
            Parameter(shape.head_dim, width, trainable=full) for _ in range(2 if shape.family == "qwen3" else 0)
        ]

    def __call__(self, tape: Tape, x: Value, batch: Batch) -> Value:
        """The residual stream after attention and MLP."""
        residual = x
        x = norm(tape, x, batch.rows, self.norms[0])
        x = self._attention(tape, x, batch)
        x = op.add(tape, residual, x)
        residual = x
        x = norm(tape, x, batch.rows, self.norms[1])
        x = self._mlp(tape, x, batch.rows)
        return op.add(tape, residual, x)

    def _attention(self, tape: Tape, x: Value, batch: Batch) -> Value:
        shape, rows = self.shape, batch.rows
        q = self.linears["q_proj"](tape, x, rows)
        if self.head_norms:
            q = norm(tape, q, rows * shape.heads, self.head_norms[0])
        k = self.linears["k_proj"](tape, x, rows)
        if self.head_norms:
            k = norm(tape, k, rows * shape.key_value_heads, self.head_norms[1])
        v = self.linears["v_proj"](tape, x, rows)
        rotated = op.rotary(tape, q)
        q, k = rotated, op.rotary(tape, k)
        del rotated
        if batch.attention == "eager":
            repeated = [op.repeat(tape, value, shape.heads // shape.key_value_heads) for value in (k, v)]
            y = eager(tape, q, repeated[0], repeated[1], batch, shape.heads)
            y = op.scale(tape, y)
        else:
            times = shape.heads // shape.key_value_heads if batch.padded else 1
            repeated = [op.repeat(tape, value, times) for value in (k, v)]
            y = sdpa(tape, q, repeated[0], repeated[1], batch, shape.heads)
        del repeated
        return self.linears["o_proj"](tape, y, rows)

    def _mlp(self, tape: Tape, x: Value, rows: int) -> Value:
        gate = op.silu(tape, self.linears["gate_proj"](tape, x, rows))
        up = self.linears["up_proj"](tape, x, rows)
        product = op.multiply(tape, gate, up)
        del gate, up
        return self.linears["down_proj"](tape, product, rows)
