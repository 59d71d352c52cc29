"""The panels as data and as the picture that stays in a saved notebook."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.image import imread

from grpo_lab.monitoring import History
from grpo_lab.widgets import panels, picture
from grpo_lab.widgets.panels import Line, Panel, axis_end, run_panels, thinned
from grpo_lab.widgets.picture import panels_png
from tests.mutants.harness import assert_caught

EMPTY = Panel("empty", "")


def panels_of(*rows: dict[str, float]) -> list[Panel]:
    history = History()
    for step, row in enumerate(rows, start=1):
        history.append({"step": step, **row})
    return run_panels(history, "CPU tensors")


def pixels(png: bytes) -> np.ndarray:
    """(rows, columns, 3), from 0 to 1."""
    return imread(io.BytesIO(png))[..., :3]


def test_values_have_the_unit_and_the_name_of_their_panel():
    row = {"reward": 0.5, "memory/peak_mib": 90.0, "loss/chunk_size": 64, "time/step_s": 2.0, "time/loss_s": 1.0}
    reward, memory, seconds, flat = panels_of(row | {"memory/head_extra_mib": 8.0, "frac_reward_zero_std": 0.5})
    assert [panel.unit for panel in (reward, memory, seconds, flat)] == ["", " MiB", " s", " %"]
    assert "CPU tensors" in memory.title
    assert [(line.name, line.values) for line in memory.lines] == [
        ("whole loss pass", [90.0]),
        ("added by the LM head", [8.0]),
    ]
    assert [line.values for line in seconds.lines] == [[2.0], [1.0]]
    assert (memory.right.values, memory.right_unit) == ([64], " tokens")


def test_rewards_have_the_axis_from_0_to_1_only_where_all_fit():
    for rewards, limits in (((0.0, 1.0), (0.0, 1.0)), ((0.5, 1.5), None), ((0.5, -0.5), None)):
        assert panels_of(*({"reward": reward} for reward in rewards))[0].limits == limits


def test_a_spread_that_lacks_a_step_is_no_band():
    both = {"reward": 0.5, "reward_std": 0.25}
    assert list(panels_of(both, both)[0].lines[0].spread) == [0.25, 0.25]
    assert list(panels_of(both, {"reward": 0.5})[0].lines[0].spread) == []


@pytest.mark.parametrize(
    ("values", "spread", "ends"),
    [
        ([1.0, 2.0], [], (0, 2.16)),
        ([-0.6, -0.2], [], (-0.648, 0)),
        ([-0.5, 0.5], [], (-0.58, 0.58)),
        ([1.0], [0.5], (0, 1.62)),
        ([0.1], [0.3], (-0.248, 0.448)),
        ([0.0], [], (0, 1)),
        ([], [], (0, 1)),
    ],
)
def test_an_axis_holds_0_and_every_value_with_its_spread(values, spread, ends):
    line = Line("n", list(range(1, len(values) + 1)), values, "red", spread=spread)
    assert Panel("t", "", [line]).axis == pytest.approx(ends)


def test_the_picture_draws_negative_values_the_right_way_up():
    line = Line("rising", [1, 2], [-0.9, -0.1], "#ff0000")
    image = pixels(panels_png([Panel("t", "", [line]), EMPTY, EMPTY, EMPTY], 2, "h"))
    rows, columns = np.nonzero(np.abs(image - [1, 0, 0]).max(axis=-1) < 0.2)
    assert rows[columns.argmax()] < rows[columns.argmin()] - 100  # row 0 is the top


@pytest.mark.parametrize(
    ("step", "total", "end"),
    [(0, 1, 2), (0, 400, 20), (20, 400, 50), (99, 400, 100), (100, 400, 200), (400, 400, 400), (30, 20, 30)],
)
def test_the_step_axis_ends_ahead_of_the_run(step, total, end):
    assert axis_end(step, total) == end


@example([float(7 * n % 50) for n in range(50)], 5)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 30))
def test_a_thinned_line_holds_points_of_the_line_in_order_with_its_extremes(values, buckets):
    steps = list(range(3, 3 + len(values)))
    line = Line("noise", steps, values, "red", spread=[2 * step for step in steps], width=1.5, stepped=True)
    shown = thinned(line, buckets)
    assert len(shown.values) <= max(2 * buckets, 1)
    assert list(shown.steps) == sorted(set(shown.steps))
    for step, value, spread in zip(shown.steps, shown.values, shown.spread, strict=True):
        assert (value, spread) == (values[step - 3], 2 * step)
    assert (min(shown.values), max(shown.values)) == (min(values), max(values))
    assert (shown.name, shown.color, shown.width, shown.stepped) == ("noise", "red", 1.5, True)


def test_a_short_line_is_not_thinned():
    line = Line("short", list(range(1, 11)), [float(n % 3) for n in range(10)], "red")
    assert thinned(line, 5) is line


def test_the_picture_is_a_png_with_or_without_rows():
    for four in (panels_of(), panels_of({"reward": 0.5, "memory/peak_mib": 9.0, "loss/chunk_size": 64})):
        png = panels_png(four, 10, "running, step 1 of 10")
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert pixels(png).shape == (600, 1100, 3)


def test_the_picture_draws_later_steps_further_right_and_higher_values_higher():
    line = Line("rising", [1, 2], [0.0, 1.0], "#ff0000")
    image = pixels(panels_png([Panel("t", "", [line], limits=(0.0, 1.0)), EMPTY, EMPTY, EMPTY], 2, "h"))
    rows, columns = np.nonzero(np.abs(image - [1, 0, 0]).max(axis=-1) < 0.2)
    assert rows[columns.argmax()] < rows[columns.argmin()] - 100  # row 0 is the top


def test_the_picture_draws_the_chunk_size_as_stairs_where_there_is_one():
    def blue_rows(right: Line | None) -> set[int]:
        drawn = Panel("t", " MiB", [Line("memory", [1, 2], [1.0, 2.0], "#ff0000")], right=right, right_unit=" tokens")
        image = pixels(panels_png([drawn, EMPTY, EMPTY, EMPTY], 2, "h"))
        inside = image[:, 100:400]  # of the first panel, left of its right axis
        return set(np.nonzero(np.abs(inside - [0, 0, 1]).max(axis=-1) < 0.2)[0].tolist())

    assert blue_rows(None) == set()
    # The first size holds until the second step, so all of it is at one height.
    assert 1 <= len(blue_rows(Line("chunk size", [1, 2], [512, 64], "#0000ff", stepped=True))) <= 3


def test_pyplot_and_its_registry_of_figures_are_never_loaded():
    code = (
        "import sys; from grpo_lab.widgets.panels import Panel; from grpo_lab.widgets.picture import panels_png; "
        "[panels_png([Panel('t', '')] * 4, 2, 'h') for _ in range(3)]; print('matplotlib.pyplot' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# Mistakes that the checks above see

MUTANTS: list[tuple[ModuleType, str, str, Callable[[], object]]] = [
    (panels, "[line.spread[n] for n in kept]", "list(line.spread[:len(kept)])",
     test_a_thinned_line_holds_points_of_the_line_in_order_with_its_extremes),
    (panels, "max(part, key=line.values.__getitem__)})", "max(part, key=line.values.__getitem__)}, reverse=True)",
     test_a_thinned_line_holds_points_of_the_line_in_order_with_its_extremes),
    (panels, "if count <= 2 * buckets", "if count < buckets", test_a_short_line_is_not_thinned),
    (panels, "all(0 <= value <= 1", "any(0 <= value <= 1",
     test_rewards_have_the_axis_from_0_to_1_only_where_all_fit),
    (panels, "0 <= value <= 1", "value <= 1",
     test_rewards_have_the_axis_from_0_to_1_only_where_all_fit),
    (panels, "if reward and list(spread_steps) == list(reward[0].steps)", "if reward",
     test_a_spread_that_lacks_a_step_is_no_band),
    (panels, 'history, "memory/head_extra_mib"', 'history, "memory/peak_mib"',
     test_values_have_the_unit_and_the_name_of_their_panel),
    (panels, "factor * power > step", "factor * power >= step",
     lambda: test_the_step_axis_ends_ahead_of_the_run(20, 400, 50)),
    (panels, "ends += [value - around, value + around]", "ends += [value + around]",
     lambda: test_an_axis_holds_0_and_every_value_with_its_spread([0.1], [0.3], (-0.248, 0.448))),
    (panels, "ends = [0.0]", "ends = []",
     lambda: test_an_axis_holds_0_and_every_value_with_its_spread([1.0, 2.0], [], (0, 2.16))),
    (picture, "axes.set_ylim(*panel.axis)", "axes.set_ylim(bottom=0)",
     test_the_picture_draws_negative_values_the_right_way_up),
    (picture, "axes.plot(line.steps, line.values", "axes.plot(line.steps, line.values[::-1]",
     test_the_picture_draws_later_steps_further_right_and_higher_values_higher),
    (picture, "right.plot(line.steps, line.values", "right.plot([], []",
     test_the_picture_draws_the_chunk_size_as_stairs_where_there_is_one),
    (picture, ', drawstyle="steps-post"', "", test_the_picture_draws_the_chunk_size_as_stairs_where_there_is_one),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS, ids=range(len(MUTANTS)))
def test_each_mutant_is_caught(
    module: ModuleType, old: str, new: str, check: Callable[[], object], tmp_path: Path
) -> None:
    assert_caught(module, old, new, check, tmp_path)
