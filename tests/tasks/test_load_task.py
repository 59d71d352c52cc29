"""A task is asked for by name or path, with as many rows as wanted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.tasks import load_task


@pytest.fixture
def twenty_rows(tmp_path: Path) -> str:
    rows = [json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return str(tmp_path / "rows.jsonl")


def test_all_rows_come_in_order(twenty_rows: str) -> None:
    assert load_task(twenty_rows)["answer"] == [str(n) for n in range(20)]


def test_some_rows_are_chosen_by_the_seed(twenty_rows: str) -> None:
    chosen = load_task(twenty_rows, size=5)["answer"]
    assert len(set(chosen)) == 5
    assert load_task(twenty_rows, size=5)["answer"] == chosen
    assert load_task(twenty_rows, size=5, seed=1)["answer"] != chosen
    assert sorted(load_task(twenty_rows, size=20)["answer"]) == sorted(str(n) for n in range(20))


@pytest.mark.parametrize(
    ("size", "message"), [(0, r">= 1.*got 0"), (-1, "got -1"), (21, r"size is 21, .* has 20 rows")]
)
def test_a_size_that_cannot_be_is_refused(twenty_rows: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(twenty_rows, size=size)


def test_rewards_load_without_torch_or_datasets() -> None:
    code = "import sys, grpo_lab.tasks; print(sorted({'torch', 'datasets'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
