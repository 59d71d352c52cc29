"""Operators by size: what each allocates, what it saves, and what its backward pass allocates.

As PyTorch's `derivatives.yaml` has them, seen one by one in a trace of live storages. A width is the bytes of an
element; rows are sequences times positions.
"""

from __future__ import annotations

from grpo_lab.planning.tape import ACTIVATIONS, Block, Parameter, Tape, Value

FP32_BYTES = 4
LORA = "lora"
ATTENTION = "attention"


def cast(tape: Tape, x: Value, width: int) -> Value:
    """`x.to(dtype)`: the same storage where the dtype is the same, else a copy; the gradient is copied back."""
    if x.width == width:
        return x
    size_bytes = x.block.size_bytes
    return tape.value([x], x.elements, width, lambda _: [tape.block(size_bytes)])


def add(tape: Tape, a: Value, b: Value) -> Value:
    """`a + b` in the wider dtype: nothing is saved; the gradient itself goes to both, or its copy to the narrower."""
    width, elements, widths = max(a.width, b.width), a.elements, (a.width, b.width)

    def backward(gradient: Block) -> list[Block | None]:
        return [gradient if own == width else tape.block(elements * own) for own in widths]

    return tape.value([a, b], elements, width, backward)


def scale(tape: Tape, x: Value) -> Value:
    """`x * number`: nothing is saved."""
    return tape.value([x], x.elements, x.width, lambda gradient: [tape.block(gradient.size_bytes)])


def multiply(tape: Tape, a: Value, b: Value) -> Value:
    """`a * b`: each is saved where the other needs a gradient; `b` may be one number a row, broadcast."""
    needs, sizes = (a.needs_grad, b.needs_grad), (a.block.size_bytes, b.block.size_bytes)

    def backward(_: Block) -> list[Block | None]:
        into_a = tape.block(sizes[0]) if needs[0] else None
        into_b = tape.block(sizes[0]) if needs[1] else None
        if into_b is not None and sizes[1] < sizes[0]:  # of a's size first, and then summed
            into_b = tape.block(sizes[1])
        return [into_a, into_b]

    saves = [v.block for v, other in ((a, b), (b, a)) if other.needs_grad]
    return tape.value([a, b], a.elements, a.width, backward, saves=saves)


def silu(tape: Tape, x: Value) -> Value:
    """`silu(x)`: saves its input."""
    return tape.value([x], x.elements, x.width, lambda g: [tape.block(g.size_bytes)], saves=[x.block])


def square(tape: Tape, x: Value) -> Value:
    """`x.pow(2)`: saves its input; its gradient `2 x g` passes through three more blocks."""

    def backward(gradient: Block) -> list[Block | None]:
        power = tape.block(gradient.size_bytes)
        twice = tape.block(gradient.size_bytes)
        product = tape.block(gradient.size_bytes)
        del power, twice
        return [product]

    return tape.value([x], x.elements, x.width, backward, saves=[x.block])


def row_mean(tape: Tape, x: Value, rows: int) -> Value:
    """`x.mean(-1)`: saves nothing; its gradient is spread over the row again."""
    size_bytes = x.block.size_bytes
    return tape.value([x], rows, x.width, lambda _: [tape.block(size_bytes)])


def inverse_root(tape: Tape, x: Value) -> Value:
    """`rsqrt(x)`: saves its result."""
    block = tape.block(x.block.size_bytes)
    return tape.value([x], x.elements, x.width, lambda g: [tape.block(g.size_bytes)], saves=[block], block=block)


def times_weight(tape: Tape, x: Value, weight: Parameter) -> Value:
    """`weight * x` of a norm: saves x where the weight learns."""

    def backward(gradient: Block) -> list[Block | None]:
        if weight.trainable:
            product = tape.block(gradient.size_bytes)
            total = tape.block(weight.size_bytes)
            del product
            weight.receive(total, accumulates=tape.accumulates)
            del total
        return [tape.block(gradient.size_bytes)]

    saves = [x.block] if weight.trainable else []
    return tape.value([x], x.elements, x.width, backward, saves=saves, trains=weight.trainable)


def linear(
    tape: Tape, x: Value, rows: int, out_features: int, weight: Parameter, component: str = ACTIVATIONS
) -> Value:
    """`x @ weight.T`: saves x where the weight learns, and autocast's copy of the weight where there is one.

    Under autocast x is copied to the autocast dtype, and so is a weight in another one (once a pass where it learns).
    The weight's gradient comes before x's, in the width of the product, and is copied to the weight's own.

    Args:
        tape: of the pass.
        x: (rows, in).
        rows: of x.
        out_features: columns of the result.
        weight: (out, in).
        component: what is saved counts as this.

    Returns:
        The product, (rows, out).
    """
    width = tape.autocast_width or x.width
    x = cast(tape, x, width)
    needs_x, x_bytes = x.needs_grad, x.block.size_bytes
    copy = None if weight.width == width else tape.cast_weight(weight, width)

    def backward(_: Block) -> list[Block | None]:
        if weight.trainable:
            gradient = tape.block(weight.elements * width)
            if weight.width != width:
                gradient = tape.block(weight.size_bytes)
            weight.receive(gradient, accumulates=tape.accumulates)
            del gradient
        return [tape.block(x_bytes) if needs_x else None]

    saves = ([x.block] if weight.trainable else []) + ([copy] if copy and needs_x else [])
    return tape.value(
        [x], rows * out_features, width, backward, saves=saves, component=component, trains=weight.trainable
    )


def rotary(tape: Tape, x: Value) -> Value:
    """`x * cos + rotate_half(x) * sin`: nothing is saved, since cos and sin need no gradient."""
    whole = x.block.size_bytes

    def backward(_: Block) -> list[Block | None]:
        by_sin = tape.block(whole)
        minus = tape.block(whole // 2)
        one, other = tape.block(whole), tape.block(whole)  # each half's gradient, padded to a whole one
        del by_sin, minus
        joined = tape.block(whole)
        del one, other
        by_cos = tape.block(whole)
        total = tape.block(whole)
        del joined, by_cos
        return [total]

    by_cos = tape.block(whole)
    minus = tape.block(whole // 2)
    joined = tape.block(whole)
    del minus
    by_sin = tape.block(whole)
    del joined
    result = tape.value([x], x.elements, x.width, backward)
    del by_cos, by_sin
    return result


def repeat(tape: Tape, x: Value, times: int) -> Value:
    """`repeat_kv(x)`: a copy for each query head that shares the key or value; the gradient is summed again."""
    if times == 1:
        return x
    size_bytes = x.block.size_bytes
    return tape.value([x], x.elements * times, x.width, lambda _: [tape.block(size_bytes)])
