"""Panels drawn as SVG text: no front-end code, one string that a page reload brings back by itself."""

import math
from collections.abc import Callable
from html import escape
from itertools import pairwise

from grpo_lab.widgets.panels import Line, Panel, axis_end, thinned

WIDTH, HEIGHT = 560, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 52, 44, 24
_BUCKETS = 300
_HOVER_COLUMNS = 60


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / gap - 1e-9)
    last = math.floor(high / gap + 1e-9)
    return [n * gap for n in range(first, last + 1)]


class _Frame:
    """From steps and values to pixels."""

    def __init__(self, panel: Panel, total_steps: int) -> None:
        self.low, self.high = panel.axis
        self.last_step = axis_end(max((line.steps[-1] for line in panel.lines), default=0), total_steps)
        right = panel.right.values if panel.right else [1.0]
        self.right_low = math.floor(math.log2(min(right))) - 0.5
        self.right_high = math.ceil(math.log2(max(right))) + 0.5

    def x(self, step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - 1) / (self.last_step - 1)

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * part

    def y_right(self, value: float) -> float:
        part = (math.log2(value) - self.right_low) / (self.right_high - self.right_low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * part


def panel_svg(panel: Panel, total_steps: int) -> str:
    """One panel as an `<svg>` element; its text takes the colour of the page, so it reads on light and dark.

    Args:
        panel: lines and units.
        total_steps: of the whole run, where the step axis ends at last.

    Returns:
        The element as text.
    """
    frame = _Frame(panel, total_steps)
    style = "width:100%;height:auto;font:11px system-ui,sans-serif"
    label = escape(_summary(panel))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" style="{style}" fill="currentColor">',
        f'<text x="4" y="14" font-size="13" font-weight="600">{escape(panel.title)}</text>',
        *_axes(panel, frame),
    ]
    if not panel.lines:
        middle = (WIDTH / 2, HEIGHT / 2)
        parts.append(f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="middle" opacity="0.6">no steps yet</text>')
    if panel.right:
        parts.append(_path(thinned(panel.right, _BUCKETS), frame, frame.y_right, dashed=True))
    for line in panel.lines:
        shown = thinned(line, _BUCKETS)
        parts += [_band(shown, frame), _path(shown, frame, frame.y)]
    return "".join([*parts, *_legend(panel), *_hover(panel, frame), "</svg>"])


def _summary(panel: Panel) -> str:
    said = [f"{_reading(line, -1, panel.unit)} at step {line.steps[-1]}" for line in panel.lines]
    return f"{panel.title}: {', '.join(said) or 'no steps yet'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _reading(line: Line, index: int, unit: str) -> str:
    spread = f" ± {_number(line.spread[index])}" if line.spread else ""
    return f"{line.name} {_number(line.values[index])}{spread}{unit}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" opacity="0.75">{text}</text>'


def _axes(panel: Panel, frame: _Frame) -> list[str]:
    right_end, floor = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [_text(WIDTH, floor + 15, "step", anchor="end")]
    for value in ticks(frame.low, frame.high, 5):
        y = frame.y(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right_end}" stroke="currentColor" opacity="0.13"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(value), anchor="end"))
    steps = [value for value in ticks(1, frame.last_step, 6) if value >= 1]
    parts += [_text(frame.x(value), floor + 15, _number(value), anchor="middle") for value in steps]
    if panel.right:
        low, high = math.ceil(frame.right_low), math.floor(frame.right_high)
        values = [2.0**power for power in range(low, high + 1, max(1, (high - low) // 4))]
        color = panel.right.color
        parts += [_text(right_end + 6, frame.y_right(value) + 4, _number(value), fill=color) for value in values]
    return parts


def _path(line: Line, frame: _Frame, height: Callable[[float], float], *, dashed: bool = False) -> str:
    points = [(frame.x(step), height(value)) for step, value in zip(line.steps, line.values, strict=True)]
    x, y = points[0]
    drawn = [f"M{x:.1f} {y:.1f}"]
    for x, y in points[1:]:
        drawn.append(f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}")
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    stroke = f'stroke="{line.color}" stroke-width="{line.width}" stroke-linejoin="round"{dash}'
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{line.width + 0.6}" fill="{line.color}"/>'
    return f'<path d="{"".join(drawn)}" fill="none" {stroke}/>{dot}'


def _band(line: Line, frame: _Frame) -> str:
    if not line.spread:
        return ""
    rows = list(zip(line.steps, line.values, line.spread, strict=True))
    upper = [f"{frame.x(step):.1f},{frame.y(value + spread):.1f}" for step, value, spread in rows]
    lower = [f"{frame.x(step):.1f},{frame.y(value - spread):.1f}" for step, value, spread in reversed(rows)]
    return f'<polygon points="{" ".join(upper + lower)}" fill="{line.color}" opacity="0.15"/>'


def _with_units(panel: Panel) -> list[tuple[Line, str]]:
    entries = [(line, panel.unit) for line in panel.lines]
    return [*entries, (panel.right, panel.right_unit)] if panel.right else entries


def _hover(panel: Panel, frame: _Frame) -> list[str]:
    """Invisible columns that say the step and all values under the pointer."""
    steps = sorted({step for line in panel.lines for step in line.steps})
    chosen = steps[:: -max(1, math.ceil(len(steps) / _HOVER_COLUMNS))][::-1]
    if not chosen:
        return []
    said: dict[int, list[str]] = {step: [f"step {step}"] for step in chosen}
    for line, unit in _with_units(panel):
        for index, step in enumerate(line.steps):
            if step in said:
                said[step].append(_reading(line, index, unit))
    places = [frame.x(step) for step in chosen]
    edges = [places[0] - 5, *((left + right) / 2 for left, right in pairwise(places)), places[-1] + 5]
    box = f'y="{_TOP}" height="{HEIGHT - _TOP - _BOTTOM}" fill-opacity="0"'
    columns = []
    for step, (left, right) in zip(chosen, pairwise(edges), strict=True):
        title = escape("\n".join(said[step]))
        columns.append(f'<rect x="{left:.1f}" width="{right - left:.1f}" {box}><title>{title}</title></rect>')
    return columns


def _legend(panel: Panel) -> list[str]:
    parts, x = [], _LEFT
    for line, unit in _with_units(panel):
        label = _reading(line, -1, unit)
        parts.append(f'<rect x="{x}" y="25" width="10" height="4" rx="2" fill="{line.color}"/>')
        parts.append(f'<text x="{x + 14}" y="31">{escape(label)}</text>')
        x += 14 + round(5.9 * len(label)) + 14
    return parts
