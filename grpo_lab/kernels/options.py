"""The options of one scoring pass, validated once."""

import math
from dataclasses import dataclass

IMPLEMENTATIONS = ("torch", "triton")


@dataclass(frozen=True)
class HeadOptions:
    """How logits become probabilities, and how the rows are walked.

    Attributes:
        temperature: divides the logits; > 0.
        chunk_size: tokens whose logits exist at one time; >= 1.
        implementation: `"torch"` or `"triton"`: who walks the rows of a tile.
        logit_scale: multiplies the product of hidden state and head, before the soft-cap.
        soft_cap: where given, logits become `soft_cap * tanh(logits / soft_cap)`; > 0.
        entropies_require_grad: whether gradient flows through the entropies.
        vocabulary_tile: entries of the vocabulary whose logits exist at one time, >= 1; `None` for all of them.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    temperature: float
    chunk_size: int
    implementation: str
    logit_scale: float = 1.0
    soft_cap: float | None = None
    entropies_require_grad: bool = False
    vocabulary_tile: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a finite number > 0; got {self.temperature!r}.")
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size must be a number of tokens, an int >= 1; got {self.chunk_size!r}.")
        tile = self.vocabulary_tile
        if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
            raise ValueError(f"vocabulary_tile must be None or a number of entries, an int >= 1; got {tile!r}.")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}; got {self.implementation!r}.")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite; got {self.logit_scale!r}.")
        if self.soft_cap is not None and not (self.soft_cap > 0 and math.isfinite(self.soft_cap)):
            raise ValueError(f"soft_cap must be None or a finite number > 0; got {self.soft_cap!r}.")
