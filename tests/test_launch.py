"""Copies of the notebooks, JupyterLab's arguments and settings, and parameters from the command line."""

import argparse
import json
import sys

import nbformat
import pytest

from grpo_lab import launch


@pytest.fixture
def notebooks(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("01_next.ipynb", "00_tutorial.ipynb"):
        (folder / name).write_text(f"original {name}", encoding="utf-8")
    return folder


def test_notebooks_are_copied_and_a_changed_copy_stays(notebooks, tmp_path):
    work = tmp_path / "work"
    copies = launch.copy_notebooks(notebooks, work)
    assert [copy.name for copy in copies] == ["00_tutorial.ipynb", "01_next.ipynb"]
    copies[0].write_text("mine", encoding="utf-8")
    copies[1].unlink()
    assert launch.copy_notebooks(notebooks, work) == copies
    assert copies[0].read_text(encoding="utf-8") == "mine"
    assert copies[1].read_text(encoding="utf-8") == "original 01_next.ipynb"


def test_an_installation_without_notebooks_is_told_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "NOTEBOOKS", tmp_path / "nothing")
    assert launch.main(["tutorial"]) == 1
    assert "clone the repository" in capsys.readouterr().err


def test_the_work_copy_is_not_tracked():
    ignored = (launch.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"/{launch.WORK.relative_to(launch.ROOT)}/" in ignored


def test_news_are_off_and_settings_of_the_user_stay(tmp_path):
    settings = tmp_path / "lab" / "settings"
    launch.turn_news_off(settings)
    written = json.loads((settings / "overrides.json").read_text(encoding="utf-8"))
    assert written["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    (settings / "overrides.json").write_text("{}", encoding="utf-8")
    launch.turn_news_off(settings)
    assert (settings / "overrides.json").read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize("browser", [True, False])
@pytest.mark.parametrize("as_root", [True, False])
def test_lab_is_told_of_a_missing_browser_and_of_root(tmp_path, browser, as_root):
    arguments = launch.lab_arguments(tmp_path / "work" / "a.ipynb", tmp_path, browser=browser, as_root=as_root)
    assert "--LabApp.default_url=/lab/tree/work/a.ipynb" in arguments
    assert ("--no-browser" in arguments) == (not browser)
    assert ("--allow-root" in arguments) == as_root


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems always have a display")
def test_no_display_is_no_browser(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not launch.has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(launch.webbrowser, "get", object)
    assert launch.has_browser()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=20", ("steps", 20)),
        ("learning_rate=1e-3", ("learning_rate", 0.001)),
        ("model=a/b", ("model", "a/b")),
        ("device=None", ("device", None)),
        ("answer=a=b", ("answer", "a=b")),
    ],
)
def test_a_parameter_is_a_literal_or_a_string(text, expected):
    assert launch.parameter(text) == expected


def test_a_parameter_without_a_value_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="name=value"):
        launch.parameter("steps")


def test_an_unknown_option_of_run_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["run", "--stpes"])
    assert "--stpes" in capsys.readouterr().err


def test_a_notebook_that_is_not_there_is_one_line(tmp_path, capsys):
    assert launch.main(["run", "--notebook", str(tmp_path / "no.ipynb"), "--output-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"grpo-lab: notebook: there is no file {tmp_path / 'no.ipynb'}.\n"


def test_results_that_cannot_be_written_are_one_line(notebooks, tmp_path, capsys):
    cells = [nbformat.v4.new_code_cell("background = True\noutput_dir = 0", metadata={"tags": ["parameters"]})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebooks / "00_tutorial.ipynb")
    (tmp_path / "file").touch()
    arguments = ["--notebook", str(notebooks / "00_tutorial.ipynb"), "--output-dir", str(tmp_path / "file")]
    assert launch.main(["run", *arguments]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
