"""What the widgets read from a run and may set on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from grpo_lab.monitoring import History

FINAL_STATUSES = frozenset({"finished", "stopped", "failed"})


class RunView(Protocol):
    """The public surface of a run that a live view needs."""

    chunk_size: int
    folder: Path
    history: History
    notices: list[str]
    memory_label: str
    implementation: str
    tracker_description: str

    @property
    def status(self) -> str:
        """`"new"`, `"running"`, `"paused"`, `"finished"`, `"stopped"` or `"failed"`."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def error(self) -> BaseException | None:
        """What stopped a failed run."""

    @property
    def chunk_size_limits(self) -> tuple[int, int]:
        """Smallest and largest chunk size that makes a difference, in tokens."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each step and change of status; returns what ends it."""

    def pause(self) -> None:
        """Wait at the next step boundary."""

    def resume(self) -> None:
        """End a pause."""

    def stop(self) -> None:
        """End at the next step boundary."""

    def wait(self) -> str:
        """Block until the run has ended."""
