"""The drawing as data: what is in the element, not how it looks."""

import re
from xml.etree import ElementTree as ET

import pytest

from grpo_lab.monitoring import History
from grpo_lab.widgets.panels import Line, Panel, run_panels, thinned
from grpo_lab.widgets.svg import HEIGHT, panel_svg, ticks
from tests.widgets.fake_run import FakeRun


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in parse(svg).iter("title")]


def stroked(svg: str, color: str) -> list[str]:
    """The `d` of the paths drawn in `color`."""
    return [path.get("d", "") for path in parse(svg).iter("path") if path.get("stroke") == color]


def panel(values: list[float], **options: object) -> Panel:
    return Panel(
        "Time, seconds", " s", [Line("duration", list(range(1, len(values) + 1)), values, "#123456", **options)]
    )


def panels_of(*rows: dict[str, float]) -> list[Panel]:
    history = History()
    for step, row in enumerate(rows, start=1):
        history.append({"step": step, **row})
    return run_panels(history, "CPU tensors")


def test_panels_of_a_whole_run_are_well_formed():
    run = FakeRun(total_steps=30)
    run.start(background=False)
    for drawn in run_panels(run.history, "memory <of> a & b"):
        element = parse(panel_svg(drawn, run.total_steps))
        assert element.tag == "svg"
        assert "at step 30" in element.get("aria-label", "")


def test_hover_says_step_and_value():
    assert titles(panel_svg(panel([0.25, 0.5, 1.5]), 3)) == [
        "step 1\nduration 0.25 s",
        "step 2\nduration 0.5 s",
        "step 3\nduration 1.5 s",
    ]


def test_higher_values_are_drawn_higher_and_later_steps_further_right():
    (path,) = stroked(panel_svg(panel([1.0, 3.0, 2.0]), 3), "#123456")
    points = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x1 < x2 < x3
    assert y2 < y3 < y1
    assert y1 - y3 == pytest.approx(y3 - y2, abs=0.11)


def test_text_takes_the_colour_of_the_page():
    element = parse(panel_svg(panel([1.0, 2.0]), 2))
    assert element.get("fill") == "currentColor"
    assert {text.get("fill", "currentColor") for text in element.iter("text")} == {"currentColor"}


def test_a_metric_that_was_not_computed_draws_nothing():
    reward, memory, seconds, flat = panels_of({"reward": 0.5}, {"reward": 0.75})
    assert [line.name for line in reward.lines] == ["mean reward"]
    for empty in (memory, seconds, flat):
        assert empty.lines == []
        assert empty.right is None
        assert titles(panel_svg(empty, 2)) == []
        assert "no steps yet" in panel_svg(empty, 2)


def test_a_step_without_the_metric_is_left_out_not_drawn_as_zero():
    _, _, seconds, _ = panels_of(
        {"time/step_s": 1.0}, {"reward": 0.5}, {"time/step_s": float("nan")}, {"time/step_s": 3.0}
    )
    assert [title.splitlines()[0] for title in titles(panel_svg(seconds, 4))] == ["step 1", "step 4"]


def test_shares_are_percent():
    *_, flat = panels_of({"frac_reward_zero_std": 0.25})
    assert flat.lines[0].values == [25.0]
    assert flat.limits == (0.0, 100.0)


def test_the_spread_is_a_band_around_the_reward():
    reward, *_ = panels_of({"reward": 0.5, "reward_std": 0.2}, {"reward": 0.5, "reward_std": 0.2})
    svg = parse(panel_svg(reward, 2))
    (polygon,) = svg.iter("polygon")
    heights = {float(pair.split(",")[1]) for pair in polygon.get("points", "").split()}
    (line,) = stroked(panel_svg(reward, 2), reward.lines[0].color)
    middle = float(re.findall(r"M[\d.]+ ([\d.]+)", line)[0])
    assert len(heights) == 2
    assert sum(heights) / 2 == pytest.approx(middle, abs=0.1)


def test_the_chunk_size_is_stairs_on_the_memory_panel():
    rows = [{"memory/peak_mib": 100.0, "loss/chunk_size": size} for size in (2048, 2048, 64)]
    _, memory, *_ = panels_of(*rows)
    (path,) = stroked(panel_svg(memory, 3), memory.right.color)
    assert "L" not in path
    assert path.count("H") == path.count("V") == 2
    heights = [float(value) for value in re.findall(r"V([\d.]+)", path)]
    assert heights[1] > heights[0]
    assert "64 tokens" in panel_svg(memory, 3)


def test_the_right_axis_names_powers_of_two_inside_the_frame():
    rows = [{"memory/peak_mib": 100.0, "loss/chunk_size": size} for size in (2048, 64)]
    _, memory, *_ = panels_of(*rows)
    svg = parse(panel_svg(memory, 3))
    labels = [text for text in svg.iter("text") if text.get("fill") == memory.right.color]
    sizes = [float((text.text or "").replace(",", "")) for text in labels]
    heights = [float(text.get("y", "")) for text in labels]
    assert sizes == [64, 128, 256, 512, 1024, 2048]
    assert heights == sorted(heights, reverse=True)
    assert HEIGHT > heights[0] > heights[-1] > 0
    (stairs,) = stroked(panel_svg(memory, 3), memory.right.color)
    start, end = float(re.findall(r"M[\d.]+ ([\d.]+)", stairs)[0]), float(re.findall(r"V([\d.]+)", stairs)[-1])
    assert [heights[-1] - 4, heights[0] - 4] == pytest.approx([start, end], abs=0.11)


def test_the_legend_says_the_last_value_with_its_unit():
    texts = [text.text for text in parse(panel_svg(panel([0.25, 0.5, 1.5]), 3)).iter("text")]
    assert "duration 1.5 s" in texts


def test_names_are_escaped():
    drawn = Panel("a < b & c", " s", [Line("<script>", [1], [1.0], "red")])
    svg = panel_svg(drawn, 2)
    assert "<script>" not in svg
    assert parse(svg).get("aria-label", "").startswith("a < b & c")


def test_one_step_and_equal_values_draw():
    for values in ([0.0], [5.0, 5.0], [-1.0, -1.0]):
        parse(panel_svg(panel(values), 1))


def test_thinning_keeps_every_spike():
    values = [0.0] * 5000
    values[1234], values[4321] = 9.0, -7.0
    line = Line("noise", list(range(1, 5001)), values, "red", spread=[0.5] * 5000)
    shown = thinned(line, 300)
    assert len(shown.values) == len(shown.steps) == len(shown.spread) <= 600
    assert (1235, 9.0) in list(zip(shown.steps, shown.values, strict=True))
    assert (4322, -7.0) in list(zip(shown.steps, shown.values, strict=True))
    assert list(shown.steps) == sorted(shown.steps)


def test_a_long_run_stays_a_small_drawing():
    assert len(panel_svg(panel([float(n % 7) for n in range(5000)]), 5000)) < 30_000


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 100, [0, 50, 100]),
        (0, 3.9, [0, 1, 2, 3]),
        (140, 141, [140, 140.5, 141]),
        (1, 100, [50, 100]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
