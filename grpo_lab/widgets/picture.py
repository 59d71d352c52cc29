"""The panels as a PNG: what stays in a saved notebook when the kernel and its widgets are gone."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from grpo_lab.widgets.panels import axis_end

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from grpo_lab.widgets.panels import Line, Panel


def panels_png(panels: list[Panel], total_steps: int, headline: str) -> bytes:
    """Four panels, two by two, on white.

    Args:
        panels: what the live view shows.
        total_steps: of the whole run, where the step axis ends at last.
        headline: one line above them.

    Returns:
        The bytes of a PNG.
    """
    # pyplot keeps global state, which the kernel's threads share; a Figure of one's own has none.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    figure.suptitle(headline, fontsize=11, x=0.01, ha="left")
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        _draw(axes, panel, total_steps)
    buffer = BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _draw(axes: Axes, panel: Panel, total_steps: int) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.set_xlim(1, axis_end(max((line.steps[-1] for line in panel.lines), default=0), total_steps))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for line in panel.lines:
        axes.plot(line.steps, line.values, color=line.color, linewidth=line.width * 0.8, label=_label(line, panel.unit))
        if line.spread:
            pairs = list(zip(line.values, line.spread, strict=True))
            axes.fill_between(
                line.steps, [v - s for v, s in pairs], [v + s for v, s in pairs], color=line.color, alpha=0.15
            )
    if panel.limits or panel.lines:
        axes.set_ylim(*panel.axis)
    if panel.right:
        _draw_right(axes, panel.right, panel.right_unit)
    if panel.lines:
        axes.legend(fontsize=8, frameon=False, loc="best")


def _draw_right(axes: Axes, line: Line, unit: str) -> None:
    right = axes.twinx()
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    right.tick_params(labelsize=8, colors=line.color)
    right.spines["top"].set_visible(False)
    right.set_ylabel(f"{line.name},{unit}", fontsize=8, color=line.color)
    right.plot(line.steps, line.values, color=line.color, linewidth=1.2, linestyle="--", drawstyle="steps-post")


def _label(line: Line, unit: str) -> str:
    return f"{line.name} ({line.values[-1]:.3g}{unit})"
