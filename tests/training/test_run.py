"""A run from settings to record: steps written down, controls obeyed, nothing lost on the way out."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lab.training import Run, RunConfig, RunConfigError, RunFailedError
from grpo_lab.training.guards import ObjectiveWarning

SMALL: dict[str, Any] = {
    "model": "tiny",
    "task": "problems",
    "steps": 4,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 24,
    "save_every": 2,
    "device": "cpu",
    "wandb_mode": "disabled",
}


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(reward_functions: Any = None, **changes: Any) -> Run:
        settings = SMALL | {"output_dir": str(tmp_path / "runs")} | changes
        run = Run(RunConfig(**settings), rewards=reward_functions)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.stop()
        if run.status in ("running", "paused"):
            run._done.wait(60)


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    """A reward that spreads in every group, so that every step moves the weights."""
    return [len(completion[0]["content"]) / 100 for completion in completions]


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_run_in_the_background_writes_everything_down(make_run: Callable[..., Run]) -> None:
    run = make_run()
    seen: list[int] = []
    run.subscribe(lambda: seen.append(run.step))
    assert run.start() is run
    assert run.wait() == "finished"
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]
    rows = metric_rows(run.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm", "completions/mean_length"):
        assert name in rows[0], name
    assert all(row["loss/chunk_size"] == 512 for row in rows)
    assert all(row["memory/peak_mib"] > row["memory/head_extra_mib"] > 0 for row in rows)
    assert all(row["time/step_s"] > row["time/loss_s"] > row["time/head_ms"] / 1e3 > 0 for row in rows)
    record = json.loads((run.folder / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["implementation"] == "torch"
    assert record["config"] == run.config.to_dict()
    assert record["versions"]["torch"] == torch.__version__
    assert record["summary"]["steps"] == 4
    completions = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    assert len(completions) == 4 * 8
    assert {"step", "prompt", "completion", "reward", "advantage", "reason"} <= completions[0].keys()
    assert all(row["reason"] for row in completions)
    assert final_weights(run.folder)


def test_the_chunk_size_changes_at_the_next_step_and_results_do_not(make_run: Callable[..., Run]) -> None:
    plain = make_run()
    plain.start(background=False)
    moved = make_run()

    def move() -> None:
        if moved.step == 2:
            moved.chunk_size = 7

    moved.subscribe(move)
    moved.start(background=False)
    rows, expected = metric_rows(moved.folder), metric_rows(plain.folder)
    assert [row["loss/chunk_size"] for row in rows] == [512, 512, 7, 7]
    for row, other in zip(rows, expected, strict=True):
        assert row["reward"] == other["reward"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("implementation", "chunk_size"), [("torch", 16), ("torch", 100), ("torch", 4096), ("triton", 128)]
)
def test_every_implementation_takes_the_same_steps(
    make_run: Callable[..., Run], implementation: str, chunk_size: int
) -> None:
    histories = []
    for settings in ({"implementation": "reference"}, {"implementation": implementation, "chunk_size": chunk_size}):
        run = make_run(reward_functions=[length_reward], **settings)
        run.start(background=False)
        assert run.implementation == settings["implementation"]
        histories.append(metric_rows(run.folder))
    for ours, reference in zip(*reversed(histories), strict=True):
        assert ours["reward"] == pytest.approx(reference["reward"], abs=1e-5)
        assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)


def test_pause_holds_and_resume_goes_on(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=6)
    unsubscribe = run.subscribe(lambda: run.pause() if run.step == 2 else None)
    run.start()
    _until(lambda: run.status == "paused")
    unsubscribe()
    step = run.step
    time.sleep(0.3)
    assert run.step == step < 6
    run.resume()
    assert run.wait() == "finished"


@pytest.mark.parametrize("paused", [False, True])
def test_stop_ends_at_the_next_step_boundary_and_can_be_continued(make_run: Callable[..., Run], paused: bool) -> None:
    run = make_run(steps=500)
    run.start()
    _until(lambda: run.step >= 1)
    if paused:
        run.pause()
        _until(lambda: run.status == "paused")
    last_step = run.step
    run.stop()
    assert run.wait() == "stopped"
    assert run.step <= last_step + (0 if paused else 1)
    step = run.step
    again = Run.continue_from(run.folder, steps=step + 1)
    assert again.step == step
    again.start(background=False)
    assert again.status == "finished"
    assert [row["step"] for row in metric_rows(run.folder)] == list(range(1, step + 2))


def test_an_interrupt_of_wait_stops_cleanly(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=500)
    run.start()
    _until(lambda: run.step >= 1)
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    assert run.wait() == "stopped"


def test_an_interrupt_of_a_run_in_the_cell_stops_cleanly(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=500)
    run.subscribe(lambda: signal.raise_signal(signal.SIGINT) if run.step == 1 and run.status == "running" else None)
    before = signal.getsignal(signal.SIGINT)
    run.start(background=False)
    assert run.status == "stopped"
    assert signal.getsignal(signal.SIGINT) is before


def test_one_run_at_a_time(make_run: Callable[..., Run]) -> None:
    first, second = make_run(steps=500), make_run()
    first.start()
    with pytest.raises(RuntimeError, match="A run is going on in"):
        second.start()
    with pytest.raises(RuntimeError, match="generate"):
        first.generate(["1 + 1?"])
    first.stop()
    first.wait()
    second.start(background=False)
    assert second.status == "finished"
    with pytest.raises(RuntimeError, match="This run is finished"):
        second.start()


def test_a_failing_reward_ends_the_run_with_its_reason(make_run: Callable[..., Run]) -> None:
    calls = 0

    def breaks(completions: list[Any], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("no such number")
        return length_reward(completions)

    run = make_run(reward_functions=[breaks])
    run.start()
    with pytest.raises(RunFailedError, match="step 3 failed: ZeroDivisionError: no such number") as caught:
        run.wait()
    assert run.status == "failed"
    assert caught.value._render_traceback_() == [f"RunFailedError: {caught.value}"]
    assert "ZeroDivisionError" in (run.folder / "error.txt").read_text()
    assert json.loads((run.folder / "run.json").read_text())["status"] == "failed"
    assert [row["step"] for row in metric_rows(run.folder)] == [1, 2]
    after = make_run(steps=1)
    after.start(background=False)
    assert after.status == "finished"


def test_a_broken_subscriber_does_not_end_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=2)

    def breaks() -> None:
        raise KeyError("view")

    run.subscribe(breaks)
    run.start(background=False)
    assert run.status == "finished"


def test_kill_and_resume_ends_in_the_same_weights(tmp_path: Path) -> None:
    settings = SMALL | {"steps": 6, "save_every": 2}
    unbroken = subprocess.run(
        [sys.executable, __file__, json.dumps(settings | {"output_dir": str(tmp_path / "unbroken")}), "0"],
        check=True,
        capture_output=True,
        text=True,
    )
    killed = subprocess.run(
        [sys.executable, __file__, json.dumps(settings | {"output_dir": str(tmp_path / "killed")}), "5"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = next((tmp_path / "killed").iterdir())
    assert [row["step"] for row in metric_rows(folder)] == [1, 2, 3, 4, 5]
    lost = metric_rows(folder)[4]
    run = Run.continue_from(folder, rewards=[length_reward])
    assert run.step == 4
    run.start(background=False)
    rows = metric_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["reward"] == lost["reward"]
    superseded = (folder / "metrics.superseded.jsonl").read_text().splitlines()
    assert json.loads(superseded[0])["reward"] == lost["reward"]
    expected = final_weights(Path(unbroken.stdout.strip().splitlines()[-1]))
    for name, weight in final_weights(folder).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be an int >= 1; got 0"),
        ({"temperature": 0.0}, "temperature must be > 0; got 0.0"),
        ({"num_generations": 1}, "num_generations must be an int >= 2"),
        ({"gradient_accumulation_steps": 3}, "Valid here: 1, 2, 4, 8"),
        ({"num_iterations": 3, "save_every": 2}, "save_every must be a multiple of num_iterations"),
        (
            {"loss_type": "ppo"},
            "loss_type must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo; got 'ppo'",
        ),
        ({"rewards": {"beauty": 1.0}}, "rewards must give a weight to some of correctness"),
        ({"implementation": "magic"}, "implementation must be one of auto"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
        ({"model": "no/such/folder/at-all"}, "no/such/folder/at-all"),
        ({"task": "no_such_file.jsonl"}, "no_such_file.jsonl"),
        ({"lora_target_modules": "no_such_module"}, "no_such_module"),
        ({"lora_target_modules": "no_such_layer"}, "no_such_layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_bad_settings_are_one_clear_message(
    make_run: Callable[..., Run], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(RunConfigError) as caught:
        make_run(**changes)
    assert message in str(caught.value)
    assert caught.value._render_traceback_() == [f"RunConfigError: {caught.value}"]
    assert not (tmp_path / "runs").exists()


def test_a_broken_row_of_data_names_its_line(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?", "answ\n')
    with pytest.raises(RunConfigError, match=r"train\.jsonl.*2"):
        make_run(task=str(data))
    data.write_text('{"question": "1 + 1?", "solution": "#### 2"}\n')
    with pytest.raises(RunConfigError, match="answer"):
        make_run(task=str(data))


def test_a_full_disk_ends_the_run_with_a_message(make_run: Callable[..., Run], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run = make_run(output_dir=str(small), save_every=2)
        run.start()
        with pytest.raises(RunFailedError, match=r"(?i)no space left|free space"):
            run.wait()
        assert run.status == "failed"
        (small / "fill").write_bytes(b"")
        os.system(f"head -c 200k /dev/zero > {small}/fill 2>/dev/null")
        with pytest.raises(RunConfigError, match=r"output_dir: cannot write to .* Free space"):
            make_run(output_dir=str(small))
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_answers_with_the_adapter_off_are_those_of_before(make_run: Callable[..., Run]) -> None:
    questions = ["Tom has 3 pens and buys 4 more. How many pens does Tom have?", "What is 2 + 2?"]
    run = make_run(reward_functions=[length_reward], learning_rate=0.02)
    before = run.generate(questions)
    assert run.generate(questions, adapter=False) == before
    run.start(background=False)
    assert run.generate(questions, adapter=False) == before
    assert run.generate(questions) != before
    assert run.generate(questions, greedy=False, seed=1) == run.generate(questions, greedy=False, seed=1)


def test_what_may_not_be_meant_is_among_the_notices(make_run: Callable[..., Run]) -> None:
    with pytest.warns(ObjectiveWarning, match="weights each sequence by its length") as caught:
        run = make_run(importance_sampling_level="sequence", steps=1)
    assert len(caught.list) == 1, "said once, by the settings"
    run.start(background=False)
    assert "weights each sequence by its length" in json.loads((run.folder / "run.json").read_text())["notices"][0]


def test_length_penalty_and_redrawn_groups_are_in_the_rows(make_run: Callable[..., Run]) -> None:
    run = make_run(
        rewards={"correctness": 1.0, "overlong": 0.5}, dynamic_sampling_rounds=1, steps=2, max_completion_length=24
    )
    run.start(background=False)
    rows = metric_rows(run.folder)
    for name in ("rewards/overlong_reward/mean", "sampling/redraw_rounds", "sampling/redrawn_groups"):
        assert name in rows[0], name
    assert all(-1 <= row["rewards/overlong_reward/mean"] <= 0 for row in rows)


def test_memory_goes_back_after_a_failed_run(make_run: Callable[..., Run]) -> None:
    def breaks(completions: list[Any], **_: Any) -> list[float]:
        raise ValueError("first batch")

    run = make_run(reward_functions=[breaks])
    run.start()
    with pytest.raises(RunFailedError):
        run.wait()
    assert run._trainer.optimizer is None
    assert all(parameter.grad is None for parameter in run._trainer.model.parameters())


def _until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.02)


def _run_and_die(settings: dict[str, Any], last_step: int) -> None:
    """Train in this process and kill it, unasked, once `last_step` is written down (0: live on)."""
    run = Run(RunConfig(**settings), rewards=[length_reward])
    if last_step:
        run.subscribe(lambda: os.kill(os.getpid(), signal.SIGKILL) if run.step == last_step else None)
    run.start(background=False)
    sys.stdout.write(f"{run.folder}\n")


if __name__ == "__main__":
    _run_and_die(json.loads(sys.argv[1]), int(sys.argv[2]))
