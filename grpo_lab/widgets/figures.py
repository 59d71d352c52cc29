"""One-panel figures for the notebooks: drawn without pyplot, kept as a PNG with the same said in words."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import TYPE_CHECKING, Any

from grpo_lab.widgets.panels import AMBER, BLUE, GREY, VIOLET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A method has one colour in all notebooks.
METHOD_COLORS = {"reference": GREY, "torch": BLUE, "triton": VIOLET, "bf16 logits": AMBER}


def one_panel(finding: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes, in the style of the run's picture.

    Args:
        finding: the one thing that the figure shows, as its title.
        x_label: quantity and unit.
        y_label: quantity and unit.

    Returns:
        The figure and its axes.
    """
    # pyplot keeps global state, which the kernel's threads share; a Figure of one's own has none.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(finding, fontsize=11, loc="left")
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


class Picture:
    """A figure as the value of a cell: a PNG, and words where it cannot be seen.

    Args:
        figure: drawn when it is shown.
        alt: what it shows, with the numbers that matter.
    """

    def __init__(self, figure: Figure, alt: str) -> None:
        self._figure = figure
        self._alt = alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        buffer = BytesIO()
        FigureCanvasAgg(self._figure).print_png(buffer)
        png = b64encode(buffer.getvalue()).decode()
        return {"image/png": png, "text/plain": self._alt}, {"image/png": {"alt": self._alt}}

    def __repr__(self) -> str:
        return self._alt
