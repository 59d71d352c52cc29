"""The four panels of a run, as data: which metric is which line, in which colour and unit.

The live view draws them as SVG and the saved picture with matplotlib, so both show the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from grpo_lab.monitoring import History

BLUE, AMBER, GREEN, VIOLET, GREY = "#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#8a8f98"


@dataclass(frozen=True)
class Line:
    """One metric over the optimizer steps.

    Attributes:
        name: in the legend.
        steps: optimizer steps.
        values: one each.
        color: CSS colour.
        spread: half the height of a band around the line, one value each; empty for no band.
        width: of the stroke, pixels.
        stepped: drawn as stairs, for a setting that holds until it is changed.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    color: str
    spread: Sequence[float] = ()
    width: float = 2.0
    stepped: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot: lines on a left axis, and at most one line on a logarithmic right axis.

    Attributes:
        title: what is plotted, with its unit.
        unit: behind each value.
        lines: those with at least one value.
        limits: of the left axis, where they are known beforehand.
        right: a line with an axis of its own.
        right_unit: of that axis.
    """

    title: str
    unit: str
    lines: list[Line] = field(default_factory=list)
    limits: tuple[float, float] | None = None
    right: Line | None = None
    right_unit: str = ""

    @property
    def axis(self) -> tuple[float, float]:
        """Ends of the left axis: `limits`, or 0 and every value with its spread, and a little room beyond them."""
        if self.limits:
            return self.limits
        ends = [0.0]
        for line in self.lines:
            spread = line.spread or [0.0] * len(line.values)
            for value, around in zip(line.values, spread, strict=True):
                ends += [value - around, value + around]
        low, high = min(ends), max(ends)
        if high == low:
            return low, low + 1
        room = 0.08 * (high - low)
        return (low - room if low < 0 else 0.0), (high + room if high > 0 else 0.0)


def _line(history: History, metric: str, name: str, color: str, **options: object) -> list[Line]:
    steps, values = history.series(metric)
    return [Line(name, steps, values, color, **options)] if values else []  # type: ignore[arg-type]


def run_panels(history: History, memory_label: str) -> list[Panel]:
    """Reward, memory, time and zero-spread groups of a run.

    Args:
        history: rows so far; a metric that was not computed draws nothing.
        memory_label: what the memory figures measure.

    Returns:
        Four panels, some perhaps without lines.
    """
    reward = _line(history, "reward", "mean reward", BLUE)
    spread_steps, spread = history.series("reward_std")
    if reward and list(spread_steps) == list(reward[0].steps):
        reward = [Line("mean reward", reward[0].steps, reward[0].values, BLUE, spread=spread)]
    reward += _line(history, "accuracy/lenient", "right answer, any form", GREEN, width=1.2)
    reward += _line(history, "format/share", "right form", GREY, width=1.2)
    memory = _line(history, "memory/peak_mib", "whole loss pass", AMBER)
    memory += _line(history, "memory/head_extra_mib", "added by the LM head", VIOLET)
    chunk = _line(history, "loss/chunk_size", "chunk size", GREY, width=1.4, stepped=True)
    seconds = _line(history, "time/step_s", "whole step", AMBER)
    seconds += _line(history, "time/loss_s", "loss, forward and backward", VIOLET)
    flat = [
        Line(line.name, line.steps, [100 * value for value in line.values], line.color)
        for line in _line(history, "frac_reward_zero_std", "groups with equal rewards", GREEN)
    ]
    reward_limits = (0.0, 1.0) if _within_one(reward) else None
    return [
        Panel("Reward of a step's completions, ± reward_std", "", reward, limits=reward_limits),
        Panel(f"Memory of a step, MiB ({memory_label})", " MiB", memory, right=chunk[0] if chunk else None,
              right_unit=" tokens"),
        Panel("Time of a step, seconds", " s", seconds),
        Panel("Groups that teach nothing, % of groups", " %", flat, limits=(0.0, 100.0)),
    ]  # fmt: skip


def _within_one(lines: list[Line]) -> bool:
    return all(0 <= value <= 1 for line in lines for value in line.values)


def axis_end(step: int, total_steps: int) -> int:
    """Right end of the step axis: a round number ahead of the run, so that a young one is not squeezed into a corner.

    Args:
        step: optimizer steps done.
        total_steps: of the whole run.

    Returns:
        A step >= 2, at most `total_steps` unless the run is further.

    Examples:
        >>> axis_end(7, 400), axis_end(60, 400), axis_end(250, 400)
        (20, 100, 400)
    """
    power = int(10.0 ** max(1, math.floor(math.log10(max(1, step)))))
    ahead = next(factor * power for factor in (2, 5, 10) if factor * power > step)
    return max(2, step, min(ahead, total_steps))


def thinned(line: Line, buckets: int) -> Line:
    """The line with at most two points a bucket, its smallest and its largest value, so that no spike is lost.

    Args:
        line: any length.
        buckets: parts of equal length that the points are split into.

    Returns:
        A line with at most `2 * buckets` points.
    """
    count = len(line.values)
    if count <= 2 * buckets:
        return line
    kept: list[int] = []
    edges = [round(bucket * count / buckets) for bucket in range(buckets + 1)]
    for start, stop in pairwise(edges):
        part = range(start, stop)
        kept += sorted({min(part, key=line.values.__getitem__), max(part, key=line.values.__getitem__)})
    return Line(
        line.name,
        [line.steps[n] for n in kept],
        [line.values[n] for n in kept],
        line.color,
        [line.spread[n] for n in kept] if line.spread else (),
        line.width,
        line.stepped,
    )
