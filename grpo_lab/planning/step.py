"""The predicted peak memory of one training step, from a transformers config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lab.planning.head import HEAD, IMPLEMENTATIONS, LOG_PROBS, HeadSizes, frozen_head, trainable_head
from grpo_lab.planning.layers import Batch, DecoderLayer, norm
from grpo_lab.planning.operators import ATTENTION, FP32_BYTES, LORA
from grpo_lab.planning.shape import LoraSettings, ModelShape, width_of
from grpo_lab.planning.tape import ACTIVATIONS, GRADIENTS, WORKING, Block, Ledger, Node, Parameter, Tape, Value

CHECKPOINTS = "checkpoints"
WEIGHTS, ADAPTERS, OPTIMIZER = "weights", "adapters", "optimizer"
COMPONENTS = {
    WEIGHTS: "weights of the model",
    ADAPTERS: "weights of the adapters, and a trained copy of the head",
    OPTIMIZER: "optimizer state (AdamW: two moments)",
    GRADIENTS: "gradients",
    ACTIVATIONS: "activations saved for the backward pass",
    CHECKPOINTS: "checkpoints: each layer's input",
    LORA: "what LoRA saves besides",
    ATTENTION: "attention: q, k, v, result, mask",
    HEAD: "LM head: tiles, kept rows, its gradient",
    LOG_PROBS: "log-probs and entropies",
    WORKING: "passing tensors: gradients of activations, operators' own",
}
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class StepPlan:
    """Predicted memory of forward and backward of the loss of one micro-batch.

    Attributes:
        component_bytes: what is alive at the predicted peak, for each of `COMPONENTS`.
        logits_bytes: the logits of all completion tokens in fp32, had they been kept; not in the peak.
    """

    component_bytes: Mapping[str, int]
    logits_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The predicted peak."""
        return sum(self.component_bytes.values())

    @property
    def resident_bytes(self) -> int:
        """The part that is there between steps too: weights, adapters and optimizer state."""
        return sum(self.component_bytes[name] for name in (WEIGHTS, ADAPTERS, OPTIMIZER))


@dataclass(frozen=True)
class StepSettings:
    """What a plan depends on besides the model.

    Attributes:
        batch: B, sequences of the micro-batch, >= 1.
        prompt_length: P, tokens with padding, >= 1.
        completion_length: T, tokens with padding, >= 0.
        dtype: of the weights, `"float32"` or `"bfloat16"`.
        adapter: LoRA, or `None`: all weights learn.
        gradient_checkpointing: whether each layer keeps its input alone and is computed again in the backward pass.
        chunk_size: tokens whose logits exist at one time, >= 1.
        implementation: of the head, `"torch"` or `"triton"`.
        head_trainable: whether the head learns: with an adapter, as a copy of it (`modules_to_save`); `None`: it does
            where all weights do.
        autocast: whether products run in bfloat16 whatever the weights are; `None`: as a run does, where dtype is
            bfloat16.
        attention: `"sdpa"` or `"eager"`.
        padded: whether sequences differ in length; without padding attention needs no mask and no repeated keys.
        accumulates: whether earlier micro-batches of the step left gradients.
        device: `"cpu"` or `"cuda"`; on a CPU the head's products in low precision cast to fp32.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    batch: int
    prompt_length: int
    completion_length: int
    dtype: str = "float32"
    adapter: LoraSettings | None = None
    gradient_checkpointing: bool = True
    chunk_size: int = 512
    implementation: str = "torch"
    head_trainable: bool | None = None
    autocast: bool | None = None
    attention: str = "sdpa"
    padded: bool = True
    accumulates: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        width_of(self.dtype)
        for name, lowest in (("batch", 1), ("prompt_length", 1), ("completion_length", 0), ("chunk_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} must be an int >= {lowest}; got {value!r}.")
        for name, known in (
            ("implementation", IMPLEMENTATIONS),
            ("attention", ATTENTIONS),
            ("device", ("cpu", "cuda")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: the memory plan knows {', '.join(known)}; got {getattr(self, name)!r}.")
        if self.adapter is None and self.head_trainable is False:
            raise ValueError("head_trainable=False needs an adapter: without one all weights learn.")

    @property
    def trains_head(self) -> bool:
        """Whether the head learns."""
        return self.adapter is None if self.head_trainable is None else self.head_trainable

    @property
    def autocast_width(self) -> int | None:
        """Bytes of an element under autocast, or `None` where it is off."""
        on = self.dtype == "bfloat16" if self.autocast is None else self.autocast
        return width_of("bfloat16") if on else None


class _Model:
    """The parameters of a model, and its forward pass by size."""

    def __init__(self, shape: ModelShape, settings: StepSettings) -> None:
        self.shape, self.settings, adapter = shape, settings, settings.adapter
        width, full = width_of(settings.dtype), adapter is None
        size = shape.vocabulary * shape.hidden
        self.embedding = Parameter(size, width, trainable=full, uses=2 if shape.tied and full else 1)
        own_head = not (full and shape.tied)
        self.head = Parameter(size, width, trainable=settings.trains_head) if own_head else self.embedding
        self.layers = [DecoderLayer(shape, width, adapter) for _ in range(shape.layers)]
        self.norm = Parameter(shape.hidden, width, trainable=full)

    def log_probs(self, tape: Tape) -> Value:
        """Embedding, layers, last norm and head."""
        settings = self.settings
        batch = Batch(
            settings.batch, settings.prompt_length + settings.completion_length, settings.padded, settings.attention
        )
        # The model's forward pass holds the embeddings and a mask of True and False to its end.
        embedded = self._embed(tape, batch.rows)
        mask = tape.block(batch.sequences * batch.positions**2 if batch.padded else 0).keep(ATTENTION)
        states = embedded
        for layer in self.layers:
            if settings.gradient_checkpointing:
                states = self._checkpoint(tape, layer, states, batch, mask)
            else:
                states = layer(tape, states, batch)
        states = norm(tape, states, batch.rows, self.norm)
        del embedded, mask
        return self._score(tape, states, batch)

    def _embed(self, tape: Tape, rows: int) -> Value:
        weight, trains = self.embedding, self.embedding.trainable

        def backward(_: Block) -> list[Block | None]:
            if trains:
                weight.receive(tape.block(weight.size_bytes), accumulates=tape.accumulates)
            return []

        # With adapters, checkpointing needs a gradient into the first layer's input.
        trains_input = trains or self.settings.gradient_checkpointing
        return tape.value([], rows * self.shape.hidden, weight.width, backward, trains=trains_input)

    @staticmethod
    def _checkpoint(tape: Tape, layer: DecoderLayer, x: Value, batch: Batch, mask: Block) -> Value:
        """The layer with its input saved alone; the backward pass computes it again, with a graph."""
        with tape.without_graph():
            result = layer(tape, x, batch)

        def replay() -> Node:
            # The checkpoint holds its input until the whole layer has gone back.
            again = tape.value(
                [x], x.elements, x.width, lambda g: [g], saves=[x.block], component=CHECKPOINTS, block=x.block
            )
            node = layer(tape, again, batch).node
            tape.end_autocast()
            assert node is not None, "its input has a gradient"
            return node

        return tape.value(
            [x],
            result.elements,
            result.width,
            lambda _: [None],
            saves=[x.block, mask],
            component=CHECKPOINTS,
            block=result.block,
            replay=replay,
        )

    def _score(self, tape: Tape, states: Value, batch: Batch) -> Value:
        settings, shape = self.settings, self.shape
        rows = settings.batch * settings.completion_length
        width = tape.autocast_width or states.width
        sizes = HeadSizes(
            rows=rows,
            chunk=min(settings.chunk_size, rows),
            vocabulary=shape.vocabulary,
            hidden=shape.hidden,
            width=width,
            weight_width=self.head.width,
            casts=settings.device == "cpu" and width != FP32_BYTES,
            implementation=settings.implementation,
        )
        # All positions but the last, a view; its gradient is copied into one of all positions.
        size_bytes = states.block.size_bytes
        view = tape.value(
            [states], states.elements, states.width, lambda _: [tape.block(size_bytes)], block=states.block
        )
        positions = settings.batch * (batch.positions - 1)
        if settings.trains_head:
            return trainable_head(tape, view, self.head, sizes, positions)
        return frozen_head(tape, view, sizes, positions)


def resident_bytes(shape: ModelShape, settings: StepSettings) -> dict[str, int]:
    """Weights, adapters and AdamW's two moments (each of its weight's dtype), and gradients kept from earlier.

    Args:
        shape: of the model.
        settings: of the step.

    Returns:
        Bytes by component.
    """
    width = width_of(settings.dtype)
    weights = shape.parameters * width
    adapter = settings.adapter
    trained = weights
    if adapter is not None:
        trained = shape.adapter_parameters(adapter) * width_of(adapter.dtype)
        trained += shape.vocabulary * shape.hidden * width if settings.trains_head else 0
    return {
        WEIGHTS: weights,
        ADAPTERS: 0 if adapter is None else trained,
        OPTIMIZER: 2 * trained,
        GRADIENTS: trained if settings.accumulates else 0,
    }


def predict_step(config: Any, settings: StepSettings) -> StepPlan:
    """The predicted peak of live tensor storages during forward and backward of the loss, by component.

    The step is played with sizes in place of tensors (`tape`, `layers`, `head`), so no weight is loaded: a plan takes
    milliseconds.

    Args:
        config: a transformers config of a Llama, Qwen2 or Qwen3 model.
        settings: batch, lengths, dtypes, adapter, checkpointing, head.

    Returns:
        The plan.

    Raises:
        ValueError: the model's family is not known to the planner.
    """
    shape = ModelShape.of(config)
    ledger = Ledger()
    for component, size_bytes in resident_bytes(shape, settings).items():
        ledger.add(component, size_bytes)
    tape = Tape(ledger, settings.autocast_width, accumulates=settings.accumulates)
    model = _Model(shape, settings)  # holds the gradients
    logps = model.log_probs(tape)
    tape.end_autocast()
    assert logps.node is not None, "something learns"
    tape.walk_back(logps.node, tape.block(logps.block.size_bytes))
    peak: Counter[str] = ledger.peak_bytes
    rows = settings.batch * settings.completion_length
    return StepPlan({name: peak[name] for name in COMPONENTS}, rows * shape.vocabulary * FP32_BYTES)
