"""The W&B mirror: no prompt, no hang, all rows there, and no fault of it that reaches the run."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import wandb

from grpo_lab.monitoring import tracking
from grpo_lab.monitoring.tracking import Tracker, open_tracker

ROWS = [
    {"step": step, "time_s": step * 0.5, "reward": step / 10, "rewards/f/mean": 0.5, "loss/chunk_size": 64}
    for step in (1, 2, 3)
]
COMPLETIONS = [
    {"prompt": "2 + 2?", "completion": "#### 4", "reward": 1.0, "advantage": 0.5, "reason": "right: 4"},
    {"prompt": "2 + 2?", "completion": "5", "reward": 0, "advantage": -0.5, "reason": "no '####' line"},
]
KEY = "0" * 40

# One run, as an unattended notebook makes it, in a folder, with the mode asked for; rows come from a thread.
RUN = f"""
import json, sys, threading, time
from pathlib import Path
started = time.monotonic()
from grpo_lab.monitoring.tracking import open_tracker
folder, mode = Path(sys.argv[1]), json.loads(sys.argv[2])
tracker = open_tracker(mode, project="lab", name="first", config={{"chunk_size": 64}}, folder=folder)
opened = time.monotonic()
def work():
    for row in {ROWS!r}:
        tracker.log(row)
    tracker.log_completions(3, {COMPLETIONS!r})
thread = threading.Thread(target=work)
thread.start()
thread.join()
logged = time.monotonic()
tracker.finish()
finished = time.monotonic()
print(json.dumps({{"mode": tracker.mode, "description": tracker.description, "open_s": opened - started,
                  "log_s": logged - opened, "finish_s": finished - logged}}))
"""


def environment(home: Path, **variables: str) -> dict[str, str]:
    """No WANDB_* but these, and a home folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return kept | {"HOME": str(home), "WANDB_X_DISABLE_STATS": "true"} | variables


def run_alone(folder: Path, mode: str | None = None, **variables: str) -> dict[str, Any]:
    """`RUN` in a process of its own, with no input to ask."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), json.dumps(mode)],
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def offline_folders(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def inspect(run_folder: Path) -> list[dict[str, Any]]:
    """The records of an offline run, read by wandb's own tool."""
    found = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", run_folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def train_rows(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics, without W&B's own fields."""
    rows = [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]
    return [row for row in rows if not any("completions" in name for name in row)]


def expected_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"train/global_step": row["step"]} | {f"train/{name}": row[name] for name in row if name != "step"}
        for row in rows
    ]


def table_of(content: bytes) -> list[dict[str, Any]]:
    table = json.loads(content)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.fixture
def open_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")

    def make(mode: Any = "offline", **changes: Any) -> Tracker:
        settings = {"project": "lab", "name": "first", "config": {"chunk_size": 64}, "folder": tmp_path}
        return open_tracker(mode, **settings | changes)

    return make


def test_an_offline_run_has_everything(open_offline, tmp_path: Path) -> None:
    before = wandb.run
    config = {"beta": 0.04, "task": {"name": "p"}}
    tracker = open_offline(tags=("tiny", "x" * 100, ""), group="lesson", config=config)
    for row in ROWS:
        tracker.log(row | {"note": "text", "kl": None})
    tracker.log_completions(3, COMPLETIONS)
    tracker.finish()
    tracker.finish()
    assert wandb.run is before
    (folder,) = offline_folders(tmp_path)
    assert tracker.mode == "offline"
    assert tracker.description == f"Weights & Biases: offline (as asked); to upload: wandb sync {folder}"
    records = inspect(folder)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["project"], run["display_name"], run["run_group"]) == ("lab", "first", "lesson")
    assert run["tags"] == ["tiny", "x" * 64]
    assert {name: run["config"]["update"][name] for name in config} == config
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert train_rows(history) == expected_rows(ROWS)
    steps = [record["metric"].get("step_metric") for record in records if record["type"] == "metric"]
    assert steps == [None, "train/global_step"]
    (table,) = (folder / "files" / "media" / "table" / "train").glob("completions*.table.json")
    assert table_of(table.read_bytes()) == [{"step": 3} | row for row in COMPLETIONS]
    assert records[-1]["exit"]["exit_code"] == 0


def test_running_the_cell_again_gives_a_second_run(open_offline, tmp_path: Path) -> None:
    for _ in range(2):
        with open_offline() as tracker:
            tracker.log(ROWS[0])
    assert len(offline_folders(tmp_path)) == 2


def test_a_resumed_run_logs_under_its_true_steps(open_offline, tmp_path: Path) -> None:
    for steps in ((1, 2, 3, 4, 5), (3, 4)):  # crashed after 5, resumed from 2
        with open_offline(group="crashed") as tracker:
            for step in steps:
                tracker.log({"step": step, "reward": step / 10})
                tracker.log({"step": step, "memory/peak_mib": 7.0})
    rows = []
    for folder in offline_folders(tmp_path):
        items = [record["history"]["item"] for record in inspect(folder) if record["type"] == "history"]
        rows.append([(row["train/global_step"], row.get("train/reward")) for row in train_rows(items)])
    assert sorted(rows, key=len) == [
        [(step, reward) for step in steps for reward in (step / 10, None)] for steps in ((3, 4), (1, 2, 3, 4, 5))
    ]


def test_an_error_ends_the_run_as_failed(open_offline, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_offline() as tracker:
        tracker.log({"step": 1, "reward": 1 / 0})
    assert inspect(offline_folders(tmp_path)[0])[-1]["exit"]["exit_code"] == 1


def test_no_network_no_key_and_no_input_is_no_hang(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as network:
        seen = run_alone(tmp_path, HTTPS_PROXY=f"http://127.0.0.1:{network.getsockname()[1]}")
        network.setblocking(False)
        with pytest.raises(BlockingIOError):
            network.accept()
    assert seen["mode"] == "offline"
    assert "(no API key; to store one: wandb login)" in seen["description"]
    assert seen["open_s"] < 30
    assert seen["log_s"] < 0.5
    assert seen["finish_s"] < 10
    (folder,) = offline_folders(tmp_path)
    items = [record["history"]["item"] for record in inspect(folder) if record["type"] == "history"]
    assert train_rows(items) == expected_rows(ROWS)


def test_an_online_run_arrives_whole(tmp_path: Path, wandb_server) -> None:
    seen = run_alone(tmp_path, "online", WANDB_MODE="offline", WANDB_API_KEY=KEY, WANDB_BASE_URL=wandb_server.url)
    assert seen["mode"] == "online"
    assert seen["description"].startswith(f"Weights & Biases: {wandb_server.url}/me/lab/runs/")
    check_arrival(wandb_server)


def test_an_offline_run_is_synced_whole(open_offline, tmp_path: Path, wandb_server) -> None:
    with open_offline() as tracker:
        for row in ROWS:
            tracker.log(row)
        tracker.log_completions(3, COMPLETIONS)
    subprocess.run(
        [Path(sys.executable).with_name("wandb"), "sync", "--yes", offline_folders(tmp_path)[0]],
        env=environment(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=wandb_server.url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=60,
    )
    check_arrival(wandb_server)


def check_arrival(server: Any) -> None:
    assert (server.runs[0]["project"], server.runs[0]["displayName"]) == ("lab", "first")
    assert json.loads(server.runs[-1]["config"])["chunk_size"] == {"value": 64}
    assert train_rows(server.history) == expected_rows(ROWS)
    (table,) = [content for name, content in server.files.items() if name.endswith(".table.json")]
    assert table_of(table) == [{"step": 3} | row for row in COMPLETIONS]
    assert server.exit_codes == [0]


def test_a_server_that_refuses_leaves_the_run_offline(tmp_path: Path) -> None:
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_HTTP_TIMEOUT": "1"}
    seen = run_alone(tmp_path, WANDB_API_KEY=KEY, **address)
    assert seen["mode"] == "offline"
    assert "offline (Failed to authenticate with http://127.0.0.1:9" in seen["description"]
    assert seen["open_s"] < 40
    assert len(offline_folders(tmp_path)) == 1


def test_the_mode_is_argument_then_variable_then_login(
    open_offline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(wandb, "init", lambda mode, **_: asked.append(mode) or FakeRun(tmp_path))
    for logged_in in (False, True):
        monkeypatch.setattr(tracking, "_login_problem", lambda _, found=logged_in: None if found else "no key")
        for argument, variable, expected in (
            ("online", "offline", "online" if logged_in else "offline"),
            ("offline", "online", "offline"),
            ("disabled", "online", None),
            (None, "offline", "offline"),
            (None, "dryrun", "offline"),
            (None, "online", "online" if logged_in else "offline"),
            (None, "disabled", None),
            (None, "", "online" if logged_in else "offline"),
        ):
            monkeypatch.setenv("WANDB_MODE", variable)
            asked.clear()
            assert open_offline(argument).mode == (expected or "disabled")
            assert asked == ([expected] if expected else []), (argument, variable, logged_in)


class FakeRun:
    """What the tracker asks of wandb's run."""

    url = "http://nowhere"

    def __init__(self, folder: Path, fault: Exception | None = None) -> None:
        self.dir = str(folder / "run" / "files")
        self.fault = fault
        self.calls: list[Any] = []

    def define_metric(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def log(self, metrics: dict[str, Any]) -> None:
        self.calls.append(metrics)
        if self.fault:
            raise self.fault

    def finish(self, exit_code: int) -> None:
        self.calls.append(exit_code)


def test_online_that_fails_falls_back_and_says_why(
    open_offline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init(mode: str, **_: Any) -> FakeRun:
        if mode == "online":
            raise wandb.errors.CommError("Run initialization has timed out\nand more")
        return FakeRun(tmp_path)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(tracking, "_login_problem", lambda _: None)
    tracker = open_offline("online")
    assert tracker.mode == "offline"
    assert "offline (Run initialization has timed out); to upload: wandb sync" in tracker.description


def test_what_cannot_record_says_so_and_does_nothing(open_offline, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("Invalid project name")

    monkeypatch.setattr(wandb, "init", init)
    broken = open_offline(project="a/b")
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    missing = open_offline()
    off = open_offline("disabled")
    assert "not recording (Invalid project name)" in broken.description
    assert missing.description == "Weights & Biases: not installed; to have it: pip install wandb"
    assert off.description == "Weights & Biases: off"
    for tracker in (broken, missing, off):
        assert tracker.mode == "disabled"
        with tracker:
            tracker.log(ROWS[0])
            tracker.log_completions(1, COMPLETIONS)


def test_a_fault_of_the_mirror_is_told_once_and_ends_nothing(tmp_path: Path, caplog) -> None:
    run = FakeRun(tmp_path, fault=ConnectionResetError("Connection lost"))
    tracker = Tracker(run, "online", "somewhere")
    for row in ROWS:
        tracker.log(row)
    tracker.finish(exit_code=1)
    assert len(run.calls) == 4
    assert run.calls[-1] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Weights & Biases missed something (Connection lost); the run folder has it."
    ]


def test_a_step_does_not_wait_for_wandb(tmp_path: Path) -> None:
    release = threading.Event()

    class SlowRun(FakeRun):
        def log(self, metrics: dict[str, Any]) -> None:
            release.wait(30)
            super().log(metrics)

    run = SlowRun(tmp_path)
    tracker = Tracker(run, "online", "somewhere")
    started = time.monotonic()
    for row in ROWS:
        tracker.log(row)
    assert time.monotonic() - started < 1
    assert run.calls == []
    release.set()
    tracker.finish()
    assert [call["train/global_step"] for call in run.calls[:-1]] == [1, 2, 3]


@pytest.mark.parametrize(("argument", "variable", "source"), [("on", "", "mode"), (None, "shared", "WANDB_MODE")])
def test_a_mode_that_is_none_is_refused(open_offline, monkeypatch, argument, variable: str, source: str) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    message = f"{source} must be one of online, offline, disabled; got '{argument or variable}'"
    with pytest.raises(ValueError, match=message):
        open_offline(argument)
