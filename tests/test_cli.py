"""The command line: every setting is an option, and what goes wrong is one line and an exit code."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import build_parser, main
from grpo_lab.training.config import RunConfig

SMALL = [
    "--prompts-per-step=2", "--num-generations=4", "--max-completion-length=24", "--device=cpu",
    "--wandb-mode=disabled", "--save-every=1",
]  # fmt: skip


def given(*arguments: str) -> dict[str, Any]:
    options = vars(build_parser().parse_args(["train", *arguments]))
    assert options.pop("command") == "train"
    return options


def test_every_setting_is_an_option_and_what_is_not_given_keeps_its_default() -> None:
    assert given() == {}
    for entry in dataclasses.fields(RunConfig):
        option = f"--{entry.name.replace('_', '-')}"
        value = {bool: [], int: ["3"], float: ["0.5"], str: ["x"]}.get(entry.type, ["1"])
        arguments = ["correctness=1"] if entry.name == "rewards" else value
        assert entry.name in given(option, *arguments), option


def test_values_have_the_type_of_their_setting() -> None:
    assert given("--rewards", "correctness=1,format=0.5") == {"rewards": {"correctness": 1.0, "format": 0.5}}
    assert given("--no-gradient-checkpointing") == {"gradient_checkpointing": False}
    assert given("--epsilon-high", "0.28", "--task-size", "7") == {"epsilon_high": 0.28, "task_size": 7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "steps must be an int >= 1; got 0"),
        (["--temperature=0"], "temperature must be > 0"),
        (["--model=no/such/model/anywhere"], "no/such/model/anywhere"),
        (["--task=no_such_file.jsonl"], "no_such_file.jsonl"),
        (["--output-dir=pyproject.toml"], "output_dir"),
        (["--device=gpu"], "device must be cpu, cuda or cuda:NUMBER; got 'gpu'"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, f"--output-dir={tmp_path / 'runs'}", "--steps=1", *arguments]) == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("grpo-lab: ")]
    assert message in line
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_a_wandb_mode_that_is_none_ends_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "shared")
    monkeypatch.setattr("grpo_lab.training.run.build_trainer", None)
    assert main(["train", *[option for option in SMALL if "wandb" not in option], f"--output-dir={tmp_path}"]) == 2
    assert "WANDB_MODE must be one of online, offline, disabled; got 'shared'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--steps=many", "argument --steps: invalid int value: 'many'"),
        ("--temperature=warm", "argument --temperature: invalid float value: 'warm'"),
        ("--rewards=correctness", "argument --rewards: expected name=weight,name=weight; got 'correctness'"),
        ("--no-such-setting=1", "unrecognized arguments: --no-such-setting=1"),
    ],
)
def test_arguments_that_cannot_be_read_are_told(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", argument])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_run_is_trained_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--steps=2", f"--output-dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "step 2/2" in said
    assert "finished after 2 of 2 steps" in said
    folder = next(tmp_path.iterdir())
    assert str(folder) in said
    assert json.loads((folder / "run.json").read_text())["config"]["steps"] == 2
    assert main(["resume", str(folder), "--steps", "3"]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    said = capsys.readouterr().out
    assert "step 2/" not in said
    before = (folder / "run.json").read_bytes()
    for steps in ([], ["--steps", "2"]):
        assert main(["resume", str(folder), *steps]) == 2
        assert "has taken 3 of" in capsys.readouterr().err
    assert (folder / "run.json").read_bytes() == before


def test_a_folder_that_holds_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_doctor_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
