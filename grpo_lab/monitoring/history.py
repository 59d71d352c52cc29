"""What a run has learnt so far: one row of metrics a step and its completions, in memory and on disk.

On disk each row is one line of JSON, written and synced before `append` returns, so a killed process loses
nothing that was reported.
"""

import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_lab.monitoring.json_lines import JsonLines, Record

METRICS_NAME = "metrics.jsonl"
COMPLETIONS_NAME = "completions.jsonl"


class History:
    """Rows of metrics by optimizer step, and the latest completions; safe to use from several threads.

    A metric that was not computed is absent from its row. One that came out as NaN or infinite is `None` in
    its row and `null` on disk. A step may have several rows; steps never go back, see `truncate_after`.

    Args:
        folder: where `metrics.jsonl` and `completions.jsonl` are begun; `None` keeps everything in memory.

    Raises:
        ValueError: the folder does not exist, or holds the record of a run already.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._rows: list[Record] = []
        self._latest_completions: list[Record] = []
        self._metrics_file: JsonLines | None = None
        self._completions_file: JsonLines | None = None
        if folder is None:
            return
        for file in self._open(folder):
            if file.path.exists():
                raise ValueError(f"folder: {folder} holds a {file.path.name} already. Go on from it with History.load.")

    def _open(self, folder: Path) -> tuple[JsonLines, JsonLines]:
        if not folder.is_dir():
            raise ValueError(f"folder: {folder} is not a folder. Make it first.")
        metrics, completions = JsonLines(folder / METRICS_NAME), JsonLines(folder / COMPLETIONS_NAME)
        self._metrics_file, self._completions_file = metrics, completions
        return metrics, completions

    @classmethod
    def load(cls, folder: Path) -> "History":
        """The history that a run has left in `folder`, to read or to go on from.

        Args:
            folder: a run's folder.

        Returns:
            All rows, and the completions of the last step that has any. A last line that a crash cut short is
            left out.

        Raises:
            ValueError: there is no such folder, or a line before the last is broken.
        """
        history = cls()
        metrics, completions = history._open(folder)
        history._rows = metrics.read()
        history._latest_completions = _last_step(completions.read())
        return history

    @property
    def rows(self) -> list[Record]:
        """All rows so far, oldest first; treat them as read-only."""
        with self._lock:
            return list(self._rows)

    @property
    def latest_completions(self) -> list[Record]:
        """The completions added last, with their `step`; treat them as read-only."""
        with self._lock:
            return list(self._latest_completions)

    @property
    def names(self) -> list[str]:
        """Names of all metrics so far, in order of their first appearance, without `step`."""
        return [name for name in dict.fromkeys(name for row in self.rows for name in row) if name != "step"]

    def summary(self, window: int = 10) -> dict[str, float]:
        """A run in a few numbers: means of its first and last steps, time and highest peak.

        Args:
            window: steps averaged at either end; half of them where there are fewer than two windows.

        Returns:
            `steps`, `reward_first`, `reward_last`, `seconds` and `peak_mib`; what was not measured is absent.
        """
        steps, rewards = self.series("reward")
        _, seconds = self.series("time_s")
        _, peaks = self.series("memory/peak_mib")
        summary: dict[str, float] = {}
        if rewards:
            count = min(window, max(1, len(rewards) // 2))
            summary["steps"] = steps[-1]
            summary["reward_first"] = sum(rewards[:count]) / count
            summary["reward_last"] = sum(rewards[-count:]) / count
        if seconds:
            summary["seconds"] = seconds[-1]
        if peaks:
            summary["peak_mib"] = max(peaks)
        return summary

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """One metric over the steps.

        Args:
            name: as in the rows.

        Returns:
            Steps and values, of the rows that have a finite value.
        """
        points = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of a step, in memory and, where there is a folder, as one line on disk.

        Args:
            row: `step`, an int >= 1, and metrics by name: numbers, one-element tensors or text.

        Raises:
            ValueError: the step is not an int >= 1, or lies before the last row's.
            RuntimeError: the disk cannot be written; the row is kept and goes to disk with the next one.
        """
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"row: step must be an int >= 1; got {step!r}.")
        record = _plain_values(row)
        with self._lock:
            if self._rows and step < self._rows[-1]["step"]:
                raise ValueError(
                    f"row: step {step} comes after step {self._rows[-1]['step']}. "
                    f"Call truncate_after({step - 1}) to go back."
                )
            self._rows.append(record)
            if self._metrics_file:
                self._metrics_file.append([record])

    def add_completions(self, step: int, completions: Iterable[Mapping[str, Any]]) -> None:
        """Add the completions of a step; those of earlier steps stay on disk only.

        Args:
            step: optimizer step.
            completions: one a row: prompt, completion, reward, advantage, reason.

        Raises:
            RuntimeError: the disk cannot be written; the rows are kept and go to disk with the next ones.
        """
        records = [{"step": step} | _plain_values(completion) for completion in completions]
        with self._lock:
            self._latest_completions = records
            if self._completions_file:
                self._completions_file.append(records)

    def truncate_after(self, step: int) -> None:
        """Go back to the end of a step, to measure the later ones again.

        What is later leaves memory and moves to `metrics.superseded.jsonl`, and likewise for completions.

        Args:
            step: the last optimizer step that stays; 0 for none.

        Raises:
            RuntimeError: the disk cannot be written.
        """
        with self._lock:
            for file in (self._metrics_file, self._completions_file):
                if file:
                    target = file.path.with_suffix(".superseded.jsonl")
                    file.move_out(lambda record: record["step"] > step, target)
            self._rows = [row for row in self._rows if row["step"] <= step]
            self._latest_completions = [row for row in self._latest_completions if row["step"] <= step]
            if self._completions_file:
                self._latest_completions = _last_step(self._completions_file.read())


def _plain_values(record: Mapping[str, Any]) -> Record:
    return {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _last_step(records: list[Record]) -> list[Record]:
    return [record for record in records if record["step"] == records[-1]["step"]]
