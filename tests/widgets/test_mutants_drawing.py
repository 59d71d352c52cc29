"""Mistakes in the drawing that the checks of its numbers see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from grpo_lab.widgets import panels, svg, tables
from tests.mutants.harness import assert_caught
from tests.widgets import test_svg as drawing
from tests.widgets import test_tables as table_checks

MUTANTS: list[tuple[ModuleType, str, str, Callable[[], object]]] = [
    (svg, "(step - 1) / (self.last_step - 1)", "(self.last_step - step) / self.last_step",
     drawing.test_higher_values_are_drawn_higher_and_later_steps_further_right),
    (svg, "part = (min(max(value, self.low), self.high)", "part = (self.high - min(max(value, self.low), self.high)",
     drawing.test_higher_values_are_drawn_higher_and_later_steps_further_right),
    (svg, "frame.y(value - spread)", "frame.y(value)", drawing.test_the_spread_is_a_band_around_the_reward),
    (svg, "(math.log2(value) - self.right_low)", "(self.right_high - math.log2(value))",
     drawing.test_the_chunk_size_is_stairs_on_the_memory_panel),
    (svg, "if line.stepped else", "if not line.stepped else",
     drawing.test_the_chunk_size_is_stairs_on_the_memory_panel),
    (svg, "said[step].append(_reading(line, index, unit))", "said[step].append(_reading(line, -1, unit))",
     drawing.test_hover_says_step_and_value),
    (svg, "math.ceil(low / gap - 1e-9)", "math.floor(low / gap - 1e-9)",
     partial(drawing.test_ticks_are_round, 1, 100, [50, 100])),
    (panels, "[100 * value for value", "[value for value", drawing.test_shares_are_percent),
    (panels, "min(part, key=line.values.__getitem__), max", "max(part, key=line.values.__getitem__), max",
     drawing.test_thinning_keeps_every_spike),
    (panels, "] if values else []", "]", drawing.test_a_metric_that_was_not_computed_draws_nothing),
    (tables, 'reverse=order == "highest"', 'reverse=order == "lowest"',
     partial(table_checks.test_order, "lowest", "why 0")),
    (tables, 'escape(str(row.get("reason", "")))', 'str(row.get("reason", ""))',
     table_checks.test_completions_are_escaped),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS, ids=[mutant[2][:30] for mutant in MUTANTS])
def test_caught(module: ModuleType, old: str, new: str, check: Callable[[], object], tmp_path: Path) -> None:
    assert_caught(module, old, new, check, tmp_path)
