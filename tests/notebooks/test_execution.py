"""Every notebook runs from a fresh kernel, small, and what it shows can be read without one."""

from pathlib import Path

import nbformat
import pytest

from grpo_lab.notebook_run import execute, parameter_names, parameters_cell, run_folders, to_html

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
STEPS = 4


def small(path: Path, output_dir: Path) -> dict[str, object]:
    """The parameters that make the notebook at `path` a matter of seconds, as far as it has them."""
    notebook = nbformat.read(path, as_version=4)
    known = parameter_names(notebook.cells[parameters_cell(notebook)].source)
    values = {"steps": STEPS, "background": False, "wandb_mode": "offline", "output_dir": str(output_dir)}
    return {name: value for name, value in values.items() if name in known}


def shown(path: Path, mime: str) -> list[str]:
    """What the executed notebook at `path` shows in format `mime`."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return [output.data[mime] for output in outputs if mime in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    runs = tmp_path / "runs"
    executed = execute(path, small(path, runs), tmp_path, cell_timeout_s=240)
    page = to_html(executed).read_text(encoding="utf-8")
    for picture in shown(executed, "image/png"):
        assert picture.strip()[:100] in page
    assert "application/vnd.jupyter.widget-state+json" not in page
    for folder in run_folders(runs):
        assert len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == STEPS


def test_the_tutorial_leaves_a_picture_of_its_run(tmp_path):
    path = next(path for path in NOTEBOOKS if path.name.startswith("00_"))
    executed = execute(path, small(path, tmp_path / "runs"), tmp_path, cell_timeout_s=240)
    assert shown(executed, "image/png")
    assert run_folders(tmp_path / "runs")
