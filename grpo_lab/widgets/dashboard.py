"""The live view of a run: charts and texts that follow it, and controls that steer it.

The rules come from how JupyterLab and ipykernel 7 handle threads. Charts and texts are changed by one drawing thread
only; controls are separate widgets that it never touches, since a message published on a control's channel could bind
the control to a shell that a page reload ends. What a control does is set a plain value on the run. The drawing
thread runs in a copy of the context of the cell that made it, so that its output stays with that cell.
"""

import asyncio
import base64
import contextvars
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from grpo_lab.widgets.panels import AMBER, BLUE, GREEN, GREY, run_panels
from grpo_lab.widgets.picture import panels_png
from grpo_lab.widgets.protocol import FINAL_STATUSES, RunView
from grpo_lab.widgets.svg import panel_svg
from grpo_lab.widgets.tables import RED, completions_table

_STATUS_COLORS = {
    "new": GREY, "running": BLUE, "paused": AMBER, "finished": GREEN, "stopped": AMBER, "failed": RED,
}  # fmt: skip


def _button(label: str, icon: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=label, icon=icon, tooltip=tooltip, layout=widgets.Layout(width="auto"))
    button.on_click(lambda _: action())
    return button


def _from_here(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


class Dashboard:
    """Reward, memory, time, completions and controls of one run.

    Args:
        run: what is shown and steered.
        refresh_hz: redraws a second at most, however fast the run steps; the last state is always drawn.

    Raises:
        ValueError: `refresh_hz` is not > 0.
    """

    def __init__(self, run: RunView, refresh_hz: float = 4.0) -> None:
        if not refresh_hz > 0:
            raise ValueError(f"refresh_hz must be > 0; got {refresh_hz!r}.")
        self._run = run
        self._gap_s = 1 / refresh_hz
        self._handle: Any = None
        self._changed = threading.Event()
        self._over = threading.Event()
        self._drawn = threading.Event()
        self._lock = threading.Lock()
        self._status, self._charts, self._completions = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._order = "lowest"
        self._held = False
        self._slider_place = widgets.HBox([self._make_slider()])
        self._replaced: tuple[widgets.SelectionSlider, ...] = ()
        pause = _button("Pause or go on", "pause", "hold at the next step boundary, or end the pause", self._pause)
        stop = _button("Stop", "stop", "end at the next step boundary, with a checkpoint", run.stop)
        turn = _button("Lowest or highest reward first", "sort", "order of the completions", self._turn_order)
        turn.layout.align_self = "flex-start"
        self.view = widgets.VBox(
            [
                self._status,
                widgets.HBox([self._slider_place, pause, stop]),
                self._charts,
                turn,
                self._completions,
            ]
        )
        self._unsubscribe: Callable[[], None] = run.subscribe(self._on_change)
        self._draw()

    def _make_slider(self) -> widgets.SelectionSlider:
        low, high = self._run.chunk_size_limits
        sizes = {size for size in (2**power for power in range(4, 20)) if low <= size < high}
        options = sorted(sizes | {high, self._run.chunk_size})
        slider = widgets.SelectionSlider(
            options=options,
            value=self._run.chunk_size,
            description="chunk size, tokens",
            continuous_update=False,
            style={"description_width": "initial"},
            layout=widgets.Layout(width="420px"),
        )
        slider.observe(lambda change: self._take_chunk_size(change["new"]), names="value")
        return slider

    def _take_chunk_size(self, value: int) -> None:
        self._run.chunk_size = value
        # While a cell awaits, ipykernel 7.4 reports no end of a widget's message, and ipywidgets 8 sends a model's
        # second change only after the end of its first. A slider of its own for each change is always at its first.
        # The one before is closed a change later, since none may be closed within its own message.
        for slider in self._replaced:
            for widget in (slider.layout, slider.style, slider):
                widget.close()
        self._replaced = self._slider_place.children
        self._slider_place.children = [self._make_slider()]

    def _pause(self) -> None:
        self._held = not self._held
        if self._held:
            self._run.pause()
        else:
            self._run.resume()

    def _turn_order(self) -> None:
        self._order = "highest" if self._order == "lowest" else "lowest"
        self._draw()

    # Showing

    def show(self) -> None:
        """Display the view in the current cell, and follow the run until it ends."""
        self._handle = display(self._bundle(), raw=True, display_id=True)
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._follow,), name="dashboard", daemon=True).start()

    async def finished(self) -> str:
        """`await` the end of the run, then leave a picture of it in this cell; an interrupt stops the run cleanly.

        While a cell awaits, the kernel answers the controls; in a cell that blocks, they are dead. The picture stays
        when the notebook is saved, exported or opened without a kernel.

        Returns:
            The final status.

        Raises:
            RuntimeError: training failed; what the run's `wait` raises.
        """
        try:
            # The end comes from a thread, which sets no asyncio event.
            while self._run.status not in FINAL_STATUSES | {"new"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._run.stop()
        return self.wait()

    def wait(self) -> str:
        """As `finished`, for a cell or script that blocks.

        Returns:
            The final status.

        Raises:
            RuntimeError: training failed; what the run's `wait` raises.
        """
        try:
            return self._run.wait()
        finally:
            self._changed.set()
            if self._handle is not None:
                self._drawn.wait(5)
            self._draw()
            if self._handle is not None:
                self._handle.update(self._bundle(), raw=True)
            display({"image/png": self._png(), "text/plain": self._headline()}, raw=True)

    def _bundle(self) -> dict[str, Any]:
        bundle = dict(self.view._repr_mimebundle_())
        return bundle | {"image/png": self._png(), "text/plain": self._headline()}

    def _png(self) -> str:
        panels = run_panels(self._run.history, self._run.memory_label)
        return base64.b64encode(panels_png(panels, self._run.total_steps, self._headline())).decode()

    # Drawing

    def _on_change(self) -> None:
        if self._run.status in FINAL_STATUSES:
            self._over.set()
        self._changed.set()

    def _follow(self) -> None:
        try:
            while True:
                self._changed.wait(1.0)
                over = self._run.status in FINAL_STATUSES
                began_s = time.thread_time()
                if self._changed.is_set() or over:
                    self._changed.clear()
                    self._draw()
                if over:
                    return
                # What happens meanwhile is drawn together. A long history takes longer to draw, and is drawn less
                # often: the view takes at most 2 % of a core from the training.
                self._over.wait(max(self._gap_s, 50 * (time.thread_time() - began_s)))
        finally:
            self._unsubscribe()
            self._drawn.set()

    def _draw(self) -> None:
        with self._lock:
            panels = run_panels(self._run.history, self._run.memory_label)
            charts = "".join(f"<div>{panel_svg(panel, self._run.total_steps)}</div>" for panel in panels)
            self._status.value = self._status_html()
            self._charts.value = (
                '<div style="display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:6px 18px;'
                f'color:var(--jp-ui-font-color1,inherit)">{charts}</div>'
                '<div style="opacity:.7;font-size:11px;line-height:1.4">'
                "On policy the loss is a mean of advantages, near 0 whatever is learnt; the reward "
                "is what learning moves, and the gradient norm says whether it moves.</div>"
            )
            table = completions_table(self._run.history.latest_completions, order=self._order)
            self._completions.value = f'<div style="color:var(--jp-ui-font-color1,inherit)">{table}</div>'

    def _headline(self) -> str:
        run = self._run
        parts = [f"{run.status}, step {run.step} of {run.total_steps}"]
        _, rewards = run.history.series("reward")
        if rewards:
            window = min(10, len(rewards))
            last = sum(rewards[-window:]) / window
            parts.append(f"mean reward of the last {f'{window} steps' if window > 1 else 'step'} {last:.2f}")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left")
        return "; ".join(parts)

    def _seconds_left(self) -> float | None:
        _, step_s = self._run.history.series("time/step_s")
        if self._run.status not in ("running", "paused") or not step_s:
            return None
        recent = step_s[-10:]
        return (self._run.total_steps - self._run.step) * sum(recent) / len(recent)

    def _status_html(self) -> str:
        run = self._run
        color = _STATUS_COLORS.get(run.status, GREY)
        share = 100 * run.step / max(1, run.total_steps)
        bar = f"height:6px;border-radius:3px;width:{share:.1f}%;background:{color}"
        facts = (f"head: {run.implementation}", f"record: {_from_here(run.folder)}", run.tracker_description)
        hint = "Controls act at the next step boundary. Kernel > Interrupt, while a cell waits, stops the run cleanly."
        small = '<div style="opacity:.75;font-size:11px">'
        lines = [
            f'<div style="font-size:14px"><b style="color:{color}">●</b> {escape(self._headline())}</div>',
            f'<div style="border-radius:3px;background:rgba(128,128,128,.25)"><div style="{bar}"></div></div>',
            f"{small}{escape(' · '.join(facts))}</div>{small}{escape(hint)}</div>",
        ]
        lines += [f'<div style="color:{AMBER}">{escape(notice)}</div>' for notice in run.notices]
        if run.error is not None:
            message = f"{type(run.error).__name__}: {run.error}"
            lines.append(f'<div style="color:{RED};font-weight:600">{escape(message)}</div>')
        return f'<div style="color:var(--jp-ui-font-color1,inherit);line-height:1.5">{"".join(lines)}</div>'
