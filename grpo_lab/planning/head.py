"""The chunked LM head by size: what one pass of `kernels.per_token_logps` allocates.

For n = min(chunk_size, N_c) rows of a chunk, of N_c completion tokens, w bytes an element of the compute dtype:

    tile of logits          n V 4, from the first chunk to the last
    tile of derivatives     n V w, from its first use to the last chunk
    "torch" beside them     statistics of a row: z and p, 2 n V 4, and a mask of a byte; derivative: z and the gradient
    kept rows               frozen head: N_c H w until the backward pass, in place of any tile
    gradient of the head    trainable: V H 4 in fp32, and V H w beside it where it is cast at the end
    low precision on a CPU  each product casts its inputs to fp32, the weight in blocks of 4,096 of the vocabulary

`"triton"` works in the tiles themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.planning.operators import FP32_BYTES
from grpo_lab.planning.tape import ACTIVATIONS, Block, Parameter, Tape, Value

HEAD = "head"
LOG_PROBS = "log_probs"
IMPLEMENTATIONS = ("torch", "triton")
_CAST_BLOCK = 4096


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of one pass through the head.

    Attributes:
        rows: N_c, completion tokens.
        chunk: n, rows of a tile; 0 where there are no rows.
        vocabulary: V.
        hidden: H.
        width: bytes of an element of the compute dtype.
        weight_width: of the weight.
        casts: whether products cast their inputs to fp32 (low precision on a CPU).
        implementation: `"torch"` or `"triton"`.
    """

    rows: int
    chunk: int
    vocabulary: int
    hidden: int
    width: int
    weight_width: int
    casts: bool
    implementation: str

    @property
    def tile_bytes(self) -> int:
        """The tile of logits."""
        return self.chunk * self.vocabulary * FP32_BYTES

    @property
    def derivative_bytes(self) -> int:
        """The tile of derivatives."""
        return self.chunk * self.vocabulary * self.width

    @property
    def kept_bytes(self) -> int:
        """The rows that a frozen head keeps."""
        return self.rows * self.hidden * self.width

    @property
    def states_bytes(self) -> int:
        """A chunk of hidden states."""
        return self.chunk * self.hidden * self.width

    @property
    def weight_block(self) -> int:
        """Rows of the vocabulary that are cast at a time."""
        whole = self.weight_width == self.width and not self.casts
        return 0 if whole else min(self.vocabulary, _CAST_BLOCK)

    @property
    def chunks(self) -> int:
        """Chunks of a pass."""
        return -(-self.rows // self.chunk) if self.chunk else 0


class _Walk:
    """The blocks of one walk over the chunks, counted as the head's."""

    def __init__(self, tape: Tape, sizes: HeadSizes) -> None:
        self.tape, self.sizes = tape, sizes
        self.tile = self.block(sizes.tile_bytes)
        self.derivatives: Block | None = None

    def block(self, size_bytes: int) -> Block:
        """A storage of the head's."""
        return self.tape.block(size_bytes).keep(HEAD)

    def cast_weight(self) -> list[Block]:
        """The block of the weight's rows, in the compute dtype and in fp32."""
        sizes = self.sizes
        rows = sizes.weight_block * sizes.hidden
        blocks = [self.block(rows * sizes.width)] if sizes.weight_width != sizes.width else []
        return [*blocks, self.block(rows * FP32_BYTES)] if sizes.casts else blocks

    def score(self) -> None:
        """The product, then normaliser, log-probs and entropies of the rows."""
        sizes = self.sizes
        states = self.block(sizes.chunk * sizes.hidden * FP32_BYTES) if sizes.casts else None
        weight = self.cast_weight()
        del states, weight
        if sizes.implementation == "torch":
            z = self.block(sizes.tile_bytes)
            p = self.block(sizes.tile_bytes)
            zeros = self.block(sizes.chunk * sizes.vocabulary)
            del z, p, zeros

    def derive(self) -> None:
        """The derivative of the tile."""
        if self.derivatives is None:
            self.derivatives = self.block(self.sizes.derivative_bytes)
        if self.sizes.implementation == "torch":
            z = self.block(self.sizes.tile_bytes)
            gradient = self.block(self.sizes.tile_bytes)
            del z, gradient

    def rows_product(self) -> Block:
        """The derivative times the weight: n rows of H in fp32."""
        sizes = self.sizes
        out = self.block(sizes.chunk * sizes.hidden * FP32_BYTES)
        weight = self.cast_weight()
        if sizes.casts:
            columns = self.block(sizes.chunk * sizes.weight_block * FP32_BYTES)
            del columns
        del weight
        return out

    def weight_product(self) -> None:
        """The derivative's transpose times the states, added to the head's gradient."""
        if self.sizes.casts:
            wide = self.block(self.sizes.tile_bytes)
            states = self.block(self.sizes.chunk * self.sizes.hidden * FP32_BYTES)
            del wide, states


def frozen_head(tape: Tape, states: Value, sizes: HeadSizes, positions: int) -> Value:
    """Log-probs under a head that does not learn: one walk forward; backward scales the kept rows.

    Args:
        tape: of the pass.
        states: hidden states of all positions but the last (a view).
        sizes: of the head.
        positions: elements of the log-probs.

    Returns:
        The log-probs.
    """
    state_bytes = states.block.size_bytes
    logps, entropies = (tape.block(positions * FP32_BYTES).keep(LOG_PROBS) for _ in range(2))
    walk = _Walk(tape, sizes)
    kept = tape.block(sizes.kept_bytes).keep(HEAD)
    for _ in range(min(2, sizes.chunks)):  # the third chunk is as the second
        chunk = walk.block(sizes.states_bytes)
        walk.score()
        walk.derive()
        walk.rows_product()
        del chunk
    del walk

    def backward(_: Block) -> list[Block | None]:
        gradient = tape.block(state_bytes)
        wide = tape.block(sizes.chunk * sizes.hidden * FP32_BYTES)
        total = tape.block(sizes.chunk * sizes.hidden * FP32_BYTES)
        del wide, total
        return [gradient]

    return tape.value([states], positions, FP32_BYTES, backward, saves=[kept, entropies], component=HEAD, block=logps)


def trainable_head(tape: Tape, states: Value, weight: Parameter, sizes: HeadSizes, positions: int) -> Value:
    """Log-probs under a head that learns: one walk forward, and one backward that adds up the head's gradient.

    Args:
        tape: of the pass.
        states: hidden states of all positions but the last (a view); saved.
        weight: of the head.
        sizes: of the head.
        positions: elements of the log-probs.

    Returns:
        The log-probs.
    """
    state_bytes, needs_states = states.block.size_bytes, states.needs_grad
    logps, entropies = (tape.block(positions * FP32_BYTES).keep(LOG_PROBS) for _ in range(2))
    walk = _Walk(tape, sizes)
    if sizes.rows:
        chunk = walk.block(sizes.states_bytes)
        walk.score()
        del chunk
    del walk

    def backward(_: Block) -> list[Block | None]:
        walk = _Walk(tape, sizes)
        into_states = tape.block(state_bytes) if needs_states else None
        total = walk.block(weight.elements * FP32_BYTES)
        for _chunk in range(min(2, sizes.chunks)):
            chunk = walk.block(sizes.states_bytes)
            walk.score()
            walk.derive()
            walk.rows_product()
            walk.weight_product()
            del chunk
        if weight.width != FP32_BYTES:
            total = walk.block(weight.size_bytes)
        del walk
        weight.receive(total, accumulates=tape.accumulates)
        return [into_states]

    saves = [states.block]
    logps_value = tape.value(
        [states], positions, FP32_BYTES, backward, saves=saves, component=ACTIVATIONS, block=logps, trains=True
    )
    del entropies
    return logps_value
