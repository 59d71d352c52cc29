"""The history: in memory and on disk alike, from several threads, through a resume."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lab.monitoring import History


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_each_row_is_one_line_and_a_metric_not_computed_is_absent(tmp_path: Path) -> None:
    history = History(tmp_path)
    rows = [{"step": 1, "time_s": 0.5, "loss": 0.25}, {"step": 2, "time_s": 1.0, "loss": 0.5, "kl": 0.125}]
    for number, row in enumerate(rows, start=1):
        history.append(row)
        assert lines(tmp_path, "metrics.jsonl") == rows[:number]
    assert history.rows == History.load(tmp_path).rows == rows
    assert history.names == ["time_s", "loss", "kl"]
    assert history.series("loss") == ([1, 2], [0.25, 0.5])
    assert history.series("kl") == ([2], [0.125])
    assert history.series("nothing") == ([], [])


def test_values_of_other_kinds_become_plain_and_nan_becomes_null(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.append(
        {
            "step": 1,
            "tensor": torch.tensor(0.5),
            "array": np.float32(0.25),
            "count": np.int64(3),
            "nan": math.nan,
            "inf": -math.inf,
            "text": "né",
            "flag": True,
        }
    )
    plain = {"tensor": 0.5, "array": 0.25, "count": 3, "nan": None, "inf": None, "text": "né", "flag": True}
    assert history.rows == lines(tmp_path, "metrics.jsonl") == [{"step": 1} | plain]
    assert history.series("nan") == ([], [])


def test_a_summary_leaves_out_what_was_not_measured() -> None:
    history = History()
    history.append({"step": 1, "reward": 0.5})
    assert history.summary() == {"steps": 1, "reward_first": 0.5, "reward_last": 0.5}
    history.append({"step": 2, "reward": 1.0, "time_s": 3.0})
    history.append({"step": 2, "eval_reward": 1.0})
    assert history.summary() == {"steps": 2, "reward_first": 0.5, "reward_last": 1.0, "seconds": 3.0}


def test_a_row_is_what_it_was_when_it_was_added() -> None:
    history = History()
    row = {"step": 1, "loss": 0.5}
    history.append(row)
    row["loss"] = 0.0
    history.rows.clear()
    assert history.rows == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("step", [0, -1, 1.0, True, "1", None])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    history = History()
    with pytest.raises(ValueError, match=r"row: step must be an int >= 1; got"):
        history.append({"step": step})
    assert history.rows == []


def test_steps_never_go_back_unsaid_and_one_step_may_have_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.append({"step": 2, "loss": 0.5})
    history.append({"step": 2, "eval/reward": 0.25})
    with pytest.raises(ValueError, match=r"step 1 comes after step 2\. Call truncate_after\(0\)"):
        history.append({"step": 1})
    assert len(lines(tmp_path, "metrics.jsonl")) == 2


def test_the_latest_completions_are_at_hand_and_all_are_on_disk(tmp_path: Path) -> None:
    history = History(tmp_path)
    for step in (1, 2):
        history.add_completions(step, [{"prompt": "é", "reward": torch.tensor(1.0)}, {"prompt": "?", "reward": 0}])
    latest = [{"step": 2, "prompt": "é", "reward": 1.0}, {"step": 2, "prompt": "?", "reward": 0}]
    assert history.latest_completions == History.load(tmp_path).latest_completions == latest
    assert [line["step"] for line in lines(tmp_path, "completions.jsonl")] == [1, 1, 2, 2]


def test_a_resume_supersedes_later_rows_and_loses_none(tmp_path: Path) -> None:
    history = History(tmp_path)
    for step in range(1, 6):
        history.append({"step": step, "loss": float(step)})
        history.add_completions(step, [{"prompt": str(step)}])
    resumed = History.load(tmp_path)
    resumed.truncate_after(2)
    assert [row["step"] for row in resumed.rows] == [1, 2]
    assert resumed.latest_completions == [{"step": 2, "prompt": "2"}]
    for step in (3, 4):
        resumed.append({"step": step, "loss": -float(step)})
    assert History.load(tmp_path).series("loss") == ([1, 2, 3, 4], [1.0, 2.0, -3.0, -4.0])
    assert [row["loss"] for row in lines(tmp_path, "metrics.superseded.jsonl")] == [3.0, 4.0, 5.0]
    assert [row["step"] for row in lines(tmp_path, "completions.superseded.jsonl")] == [3, 4, 5]
    resumed.truncate_after(0)
    assert resumed.rows == History.load(tmp_path).rows == []
    assert resumed.latest_completions == []


def test_without_a_folder_a_resume_forgets() -> None:
    history = History()
    for step in (1, 2, 3):
        history.append({"step": step})
        history.add_completions(step, [{"prompt": "?"}])
    history.truncate_after(1)
    assert history.rows == [{"step": 1}]
    assert history.latest_completions == []


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    History(tmp_path).append({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    history = History.load(tmp_path)
    assert history.rows == [{"step": 1}]
    history.append({"step": 2})
    assert lines(tmp_path, "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_full_disk_keeps_the_row_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    history = History(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(RuntimeError, match=r"metrics\.jsonl in .*No space left on device.* Free space there"):
            history.append({"step": 1})
    assert history.rows == [{"step": 1}]
    history.append({"step": 2})
    assert lines(tmp_path, "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_record_is_not_begun_twice_nor_loaded_from_nowhere(tmp_path: Path) -> None:
    History(tmp_path).append({"step": 1})
    with pytest.raises(ValueError, match=r"holds a metrics\.jsonl already\. Go on from it with History\.load"):
        History(tmp_path)
    with pytest.raises(ValueError, match=r"is not a folder\. Make it first"):
        History(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a folder"):
        History.load(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert History.load(tmp_path / "empty").rows == []


def test_readers_see_whole_rows_while_another_thread_writes(tmp_path: Path) -> None:
    history = History(tmp_path)
    counts: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            steps, values = history.series("a")
            assert len(steps) == len(values) == len({*steps})
            assert all({"step", "a", "b"} <= row.keys() for row in history.rows)
            counts.append(len(history.names))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(1, 201):
        history.append({"step": step, "a": step, "b": step})
    done.set()
    for reader in readers:
        reader.join(10)
    assert counts
    assert [row["step"] for row in lines(tmp_path, "metrics.jsonl")] == list(range(1, 201))


def test_writers_in_several_threads_lose_no_row(tmp_path: Path) -> None:
    history = History(tmp_path)
    threads = [
        threading.Thread(target=lambda: [history.append({"step": 1, "a": number}) for number in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(history.rows) == len(lines(tmp_path, "metrics.jsonl")) == 200


def test_the_history_loads_without_torch_or_wandb() -> None:
    code = "import sys, grpo_lab.monitoring; print(sorted({'torch', 'wandb'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
