"""The doctor says what is there, names what is missing, and is honest about what will run."""

import sys
from types import SimpleNamespace

import pytest

from grpo_lab import doctor
from grpo_lab.doctor import Finding

GIB = 2**30


@pytest.fixture
def findings():
    return {finding.topic: finding for finding in doctor.doctor()}


def test_nothing_is_missing_here(findings):
    assert [finding for finding in findings.values() if finding.level == "missing"] == []
    assert {"python", "torch", "gpu", "kernels", "trl", "model", "notebooks", "wandb", "disk"} <= set(findings)


def test_the_kernels_named_are_those_that_auto_takes(findings):
    import torch

    from grpo_lab.kernels import resolve_implementation

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert repr(resolve_implementation("auto", torch.device(device))) in findings["kernels"].text


def test_a_torch_that_cannot_be_imported_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [finding.level for finding in doctor._torch()] == ["missing"]


def test_a_torch_that_lacks_a_library_is_missing(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = doctor._torch()
    assert finding.level == "missing"
    assert "libcudart.so.12" in finding.text


def test_a_package_that_is_absent_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "trl" else "1.0")
    assert [finding.topic for finding in doctor._packages() if finding.level == "missing"] == ["trl"]


def test_notebooks_are_no_must(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "ipywidgets" else "1.0")
    assert doctor._jupyter().level == "note"
    assert "ipywidgets not installed" in doctor._jupyter().text


def test_a_model_that_was_not_shipped_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "files", lambda _package: tmp_path)
    assert doctor._model().level == "missing"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no API key"),
        ({"WANDB_API_KEY": "x" * 40}, "an API key is stored"),
        ({"NETRC": "netrc"}, "an API key is stored"),
        ({"NETRC": "other"}, "no API key"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "x" * 40}, "WANDB_MODE is 'disabled'"),
    ],
)
def test_wandb_mode_is_said(monkeypatch, tmp_path, environment, said):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x", encoding="utf-8")
    (tmp_path / "other").write_text("machine example.org login user password x", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert said in doctor._wandb().text


def test_wandb_is_no_must(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda _name: None)
    assert doctor._wandb().level == "note"


@pytest.mark.parametrize(("free", "level"), [(0.5 * GIB, "note"), (20 * GIB, "ok")])
def test_a_full_disk_is_noted(monkeypatch, tmp_path, free, level):
    usage = SimpleNamespace(total=100 * GIB, used=0, free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _folder: usage)
    assert doctor._disk(tmp_path).level == level


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("note", 0), ("missing", 1)])
def test_exit_code_says_whether_a_run_can_start(monkeypatch, capsys, level, code):
    monkeypatch.setattr(doctor, "doctor", lambda: [Finding("disk", level, "text")])
    assert doctor.main() == code
    assert capsys.readouterr().out.startswith("disk")
