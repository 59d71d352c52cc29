"""A training step played with sizes in place of tensors: what is alive at each moment, by what it is for.

    Ledger     bytes alive by component, and a copy of them at the highest moment
    Block      one storage; it leaves the ledger when nothing holds it any more, as a tensor's storage does
    Value      what an operator returns: a block, and the node that made it where a gradient is due
    Tape       the graph, and PyTorch's order of the backward pass through it

`operators` says what each operator allocates, saves and allocates in its backward pass; `layers` calls them in the
order of transformers' and PEFT's modules and holds their local variables as long. So a peak is counted, not fitted.
Lifetimes are CPython's reference counts, as they are for tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

WORKING = "working"
ACTIVATIONS = "activations"
GRADIENTS = "gradients"

Backward = Callable[["Block"], list["Block | None"]]


class Ledger:
    """Bytes alive, by component.

    Attributes:
        live_bytes: by component, now.
        peak_bytes: by component, when the sum was highest.
    """

    def __init__(self) -> None:
        self.live_bytes: Counter[str] = Counter()
        self.peak_bytes: Counter[str] = Counter()
        self._total = self._highest = 0

    def add(self, component: str, size_bytes: int) -> None:
        """Count an allocation, or with a negative size its end."""
        self.live_bytes[component] += size_bytes
        self._total += size_bytes
        if self._total > self._highest:
            self._highest = self._total
            self.peak_bytes = self.live_bytes.copy()


class Block:
    """One storage of `size_bytes`, counted for as long as something refers to it."""

    __slots__ = ("component", "kept", "ledger", "size_bytes")

    def __init__(self, ledger: Ledger, size_bytes: int, component: str = WORKING) -> None:
        self.ledger, self.size_bytes, self.component, self.kept = ledger, size_bytes, component, False
        ledger.add(component, size_bytes)

    def __del__(self) -> None:
        self.ledger.add(self.component, -self.size_bytes)

    def keep(self, component: str) -> Block:
        """The block, now counted as `component`; the first that keeps it says what it is for."""
        if not self.kept:
            self.kept = True
            self.ledger.live_bytes[self.component] -= self.size_bytes
            self.ledger.live_bytes[component] += self.size_bytes
            self.component = component
        return self


@dataclass
class Value:
    """What an operator returned.

    Attributes:
        block: its storage; a view shares it.
        elements: how many.
        width: bytes of one.
        node: the operator, where a gradient is due.
    """

    block: Block
    elements: int
    width: int
    node: Node | None = None

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient into it is due."""
        return self.node is not None


class Node:
    """An operator in the graph.

    Attributes:
        number: in the order of the forward pass.
        inputs: nodes that made its inputs; `None` where no gradient is due.
        saved: blocks kept for the backward pass; they go with the node.
        backward: from the gradient's block to one for each input.
        replay: of a checkpoint: its forward pass with a graph this time; its result's node takes the gradient.
    """

    __slots__ = ("backward", "inputs", "number", "replay", "saved")

    def __init__(
        self,
        number: int,
        inputs: tuple[Node | None, ...],
        saved: tuple[Block, ...],
        backward: Backward,
        replay: Callable[[], Node] | None,
    ) -> None:
        self.number, self.inputs, self.saved, self.backward, self.replay = number, inputs, saved, backward, replay

    def release(self) -> None:
        """Let go of what was saved, and of the nodes before."""
        self.saved, self.inputs, self.replay = (), (), None


class Parameter:
    """A weight.

    Args:
        elements: how many.
        width: bytes of one.
        trainable: whether its gradient is due.
        uses: operators of one pass that use it (2 for an embedding tied to the head).
    """

    def __init__(self, elements: int, width: int, *, trainable: bool, uses: int = 1) -> None:
        self.elements, self.width, self.trainable = elements, width, trainable
        self._missing, self._gradient = uses, None

    _gradient: Block | None

    @property
    def size_bytes(self) -> int:
        """Of the weight itself."""
        return self.elements * self.width

    def receive(self, gradient: Block, *, accumulates: bool) -> None:
        """Take a gradient: the first one stays, a second use's is summed with it into a third block.

        Args:
            gradient: in the parameter's width.
            accumulates: whether earlier micro-batches left a gradient, to which this one is added in place.
        """
        if self._gradient is not None:
            gradient = Block(gradient.ledger, gradient.size_bytes)
        self._missing -= 1
        self._gradient = None if accumulates and not self._missing else gradient.keep(GRADIENTS)


class Tape:
    """The graph of one pass.

    Args:
        ledger: counts the blocks.
        autocast_width: bytes of an element that autocast gives to the inputs of matrix products; `None`: it is off.
        accumulates: whether gradients of earlier micro-batches are there.
    """

    def __init__(self, ledger: Ledger, autocast_width: int | None = None, *, accumulates: bool = False) -> None:
        self.ledger, self.autocast_width, self.accumulates = ledger, autocast_width, accumulates
        self._casts: dict[Parameter, Block] = {}
        self._nodes: list[Node] = []
        self._records = True

    def block(self, size_bytes: int) -> Block:
        """A new storage."""
        return Block(self.ledger, size_bytes)

    def cast_weight(self, weight: Parameter, width: int) -> Block:
        """Autocast's copy of a weight: made once for one that learns, and kept until autocast ends."""
        if not weight.trainable:
            return self.block(weight.elements * width)
        if weight not in self._casts:
            self._casts[weight] = self.block(weight.elements * width)
        return self._casts[weight]

    def end_autocast(self) -> None:
        """Let go of autocast's copies; those saved in the graph stay."""
        self._casts.clear()

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """No node is made in the body of this `with`."""
        records, self._records = self._records, False
        yield
        self._records = records

    def value(
        self,
        inputs: Sequence[Value],
        elements: int,
        width: int,
        backward: Backward,
        *,
        saves: Sequence[Block] = (),
        component: str = ACTIVATIONS,
        block: Block | None = None,
        trains: bool = False,
        replay: Callable[[], Node] | None = None,
    ) -> Value:
        """The result of an operator.

        Args:
            inputs: its tensors.
            elements: of the result.
            width: bytes of an element of the result.
            backward: as `Node.backward`.
            saves: blocks that the backward pass needs, its own result's among them if it does.
            component: what they are counted as.
            block: the result's storage; `None`: a new one.
            trains: whether a gradient is due, whatever the inputs are.
            replay: as `Node.replay`.

        Returns:
            The value.
        """
        result = Value(block or self.block(elements * width), elements, width)
        if self._records and (trains or any(value.needs_grad for value in inputs)):
            saved = tuple(block.keep(component) for block in saves)
            node = Node(len(self._nodes), tuple(value.node for value in inputs), saved, backward, replay)
            self._nodes.append(node)
            result.node = node
        return result

    def walk_back(self, last: Node, gradient: Block) -> None:
        """Run the backward pass: the node made last goes first, and lets go of what it saved.

        Args:
            last: the node that `gradient` belongs to.
            gradient: its result's.
        """
        arrived = {last.number: gradient}
        del gradient, last
        while self._nodes:
            node = self._nodes.pop()
            incoming = arrived.pop(node.number, None)
            if incoming is None:
                continue
            if node.replay is not None:
                arrived[node.replay().number] = incoming
                node.release()
                del incoming
                continue
            outgoing, sources = node.backward(incoming), node.inputs
            node.release()
            del incoming
            for source in sources:
                part = outgoing.pop(0)
                if source is not None and part is not None:
                    self._arrive(arrived, source.number, part)
                del part

    def _arrive(self, arrived: dict[int, Block], number: int, part: Block) -> None:
        """A value that went to two operators gets the sum of two gradients, in a third block."""
        arrived[number] = self.block(part.size_bytes) if number in arrived else part
