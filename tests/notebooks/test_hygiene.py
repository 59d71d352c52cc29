"""Every notebook is committed as written: no outputs, no installs, thin cells, changeable parameters."""

import ast
import copy
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
CELL_LINES = 15
# A notebook neither changes the machine nor asks for an account; lab.py and the library do what is needed.
FORBIDDEN = re.compile(
    r"^\s*[!%]|\bpip install\b|\bapt-get\b|\bos\.system\b|\bsubprocess\b|\b(notebook_)?login\(", re.MULTILINE
)


def faults(notebook) -> list[str]:
    """What keeps `notebook` from being committed, one line each."""
    found = []
    if "widgets" in notebook.metadata:
        found.append("metadata.widgets")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("kernel other than python3")
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        found.append("first cell is not text")
    if sum("parameters" in cell.metadata.get("tags", ()) for cell in notebook.cells) != 1:
        found.append("not one cell tagged parameters")
    for number, cell in enumerate(notebook.cells, start=1):
        found += [f"cell {number}: {fault}" for fault in cell_faults(cell)]
    return found


def cell_faults(cell) -> list[str]:
    found = [f"metadata {name}" for name in cell.metadata if name != "tags"]
    if cell.cell_type != "code":
        return found
    if cell.outputs:
        found.append("outputs")
    if cell.execution_count is not None:
        found.append("execution count")
    if forbidden := FORBIDDEN.search(cell.source):
        return [*found, f"forbidden {forbidden[0].strip()}"]
    if len(cell.source.splitlines()) > CELL_LINES and "parameters" not in cell.metadata.get("tags", ()):
        found.append(f"more than {CELL_LINES} lines")
    ast.parse(cell.source)
    return found


@pytest.fixture
def clean():
    cells = [
        nbformat.v4.new_markdown_cell("# A question?"),
        nbformat.v4.new_code_cell("steps = 3", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("print(steps)"),
    ]
    return nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []


def test_a_clean_notebook_has_no_faults(clean):
    assert faults(clean) == []


def test_outputs_are_found(clean):
    clean.cells[2].outputs = [nbformat.v4.new_output("stream", text="3")]
    clean.cells[2].execution_count = 1
    assert faults(clean) == ["cell 3: outputs", "cell 3: execution count"]


def test_widget_state_is_found(clean):
    clean.metadata["widgets"] = {}
    assert faults(clean) == ["metadata.widgets"]


@pytest.mark.parametrize("tags", [[], ["parameter"]])
def test_missing_parameters_are_found(clean, tags):
    clean.cells[1].metadata["tags"] = tags
    assert faults(clean) == ["not one cell tagged parameters"]


def test_a_second_parameters_cell_is_found(clean):
    clean.cells.append(copy.deepcopy(clean.cells[1]))
    assert faults(clean) == ["not one cell tagged parameters"]


@pytest.mark.parametrize(
    "line",
    [
        "!ls",
        "%pip install six",
        "  %matplotlib inline",
        "import subprocess",
        "os.system('ls')",
        "wandb.login()",
    ],
)
def test_installs_logins_and_shell_are_found(clean, line):
    clean.cells[2].source = f"x = 1\n{line}"
    assert len(faults(clean)) == 1
    assert "forbidden" in faults(clean)[0]


def test_modulo_is_not_a_magic(clean):
    clean.cells[2].source = "x = 7 % 3"
    assert faults(clean) == []


def test_a_long_cell_is_found(clean):
    clean.cells[2].source = "\n".join(["x = 1"] * (CELL_LINES + 1))
    assert faults(clean) == [f"cell 3: more than {CELL_LINES} lines"]


@pytest.mark.parametrize("name", ["collapsed", "execution"])
def test_metadata_of_an_editor_is_found(clean, name):
    clean.cells[2].metadata[name] = {}
    assert faults(clean) == [f"cell 3: metadata {name}"]


def test_another_kernel_is_found(clean):
    clean.metadata.kernelspec.name = "my-venv"
    assert faults(clean) == ["kernel other than python3"]


def test_a_notebook_that_opens_with_code_is_found(clean):
    del clean.cells[0]
    assert faults(clean) == ["first cell is not text"]
