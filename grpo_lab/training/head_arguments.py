"""How the LM head is scored, as arguments beside those of a TRL trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_lab.training.config import IMPLEMENTATIONS


@dataclass
class ChunkedHeadArguments:
    """How the LM head is scored, beside the arguments of a TRL trainer.

    It stands after TRL's class among the bases, so that TRL's defaults stay.

    Args:
        chunk_size: tokens whose logits exist at one time; memory of the head grows with it, results do not change.
        implementation: `"auto"` (Triton where it runs, else torch), `"triton"`, `"torch"`, or `"reference"`
            (full logits, to compare with).
    """

    chunk_size: int = field(default=1024, metadata={"help": "Tokens whose logits exist at one time."})
    implementation: str = field(default="auto", metadata={"help": f"One of {', '.join(IMPLEMENTATIONS)}."})

    def check_head_arguments(self, temperature: float) -> None:
        """Refuse values that no pass through the head can use.

        Args:
            temperature: divides the logits.

        Raises:
            ValueError: `chunk_size` < 1, an unknown implementation, or `temperature` <= 0.
        """
        check_chunk_size(self.chunk_size)
        if not temperature > 0:
            raise ValueError(
                f"temperature must be > 0, since sampling and scoring divide the logits by it; got {temperature}."
            )
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {self.implementation!r}."
            )


@contextmanager
def split_groups_explained(config: Any) -> Iterator[None]:
    """List the group sizes that fit, where TRL's own check says that groups would be split.

    Args:
        config: TRL's arguments, whose `__post_init__` runs in here.

    Raises:
        ValueError: what TRL raised, with the sizes that fit where it was about groups.
    """
    try:
        yield
    except ValueError as error:
        batch = config.generation_batch_size
        if batch is None or batch % config.num_generations == 0:
            raise
        valid = [size for size in range(2, batch + 1) if batch % size == 0]
        raise ValueError(
            f"num_generations must divide the {batch} completions of a generation batch, so that no group is "
            f"split; got {config.num_generations}. Valid here: {', '.join(map(str, valid)) or 'none'}."
        ) from error


def check_chunk_size(chunk_size: Any) -> int:
    """Return `chunk_size` if it is an int >= 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a number of tokens, an int >= 1; got {chunk_size!r}.")
    return chunk_size
