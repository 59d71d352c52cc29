"""A notebook is executed with other parameters; what goes wrong in it is one line and an exit code."""

import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from grpo_lab import notebook_run
from grpo_lab.notebook_run import (
    NotebookFailedError,
    Progress,
    execute,
    parameter_names,
    run_notebook,
    summary_table,
    with_parameters,
)

PARAMETERS = 'steps = 9\nbackground = True\noutput_dir = "runs"'
RUN = """
import json, pathlib
folder = pathlib.Path(output_dir) / "one"
folder.mkdir(parents=True)
(folder / "run.json").write_text(json.dumps({"config": {"steps": steps}}))
rows = [{"step": n, "time_s": n, "reward": n / 10, "memory/peak_mib": 5 * n} for n in range(1, steps + 1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
print("background", background)
"""

EXECUTE = """
import sys, pathlib
from grpo_lab.notebook_run import execute
execute(pathlib.Path(sys.argv[1]), {}, pathlib.Path(sys.argv[2]))
"""


@pytest.fixture
def make(tmp_path):
    """`make(*sources)`: path of a notebook with the parameters cell and these code cells."""

    def write(*sources):
        cells = [
            nbformat.v4.new_markdown_cell("# A question?"),
            nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
            *map(nbformat.v4.new_code_cell, sources),
        ]
        path = tmp_path / "small.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


def test_parameter_names_are_those_assigned():
    assert parameter_names("a = 1\nb: int = 2\nprint(c)\nd.e = 3\nf = g = 4") == ["a", "b", "f", "g"]


def test_parameters_are_set_behind_their_cell_and_the_notebook_is_left_alone(make):
    notebook = nbformat.read(make("print(steps)"), as_version=4)
    changed = with_parameters(notebook, {"steps": 3, "output_dir": "x'y"})
    assert changed.cells[2].source == 'steps = 3\noutput_dir = "x\'y"'
    assert len(notebook.cells) == 3


def test_an_unknown_parameter_is_named_with_the_known_ones(make):
    with pytest.raises(ValueError, match=r"no stpes\. It has: steps, background, output_dir"):
        with_parameters(nbformat.read(make(), as_version=4), {"stpes": 3})


def test_a_notebook_without_parameters_is_refused():
    with pytest.raises(ValueError, match="tagged 'parameters'; got 0"):
        with_parameters(nbformat.v4.new_notebook(), {})


def test_what_a_notebook_shows_is_kept_and_the_original_is_not_changed(make, tmp_path):
    path = make("print(steps)")
    before = path.read_bytes()
    seen = []
    executed = execute(path, {"steps": 3}, tmp_path / "out", on_cell=lambda *cell: seen.append(cell))
    assert nbformat.read(executed, as_version=4).cells[-1].outputs[0].text == "3\n"
    assert path.read_bytes() == before
    assert seen == [(2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('so far'); raise KeyError('x')", r"small\.ipynb, cell 4: KeyError: 'x'$"),
        ("import os; print('so far', flush=True); os._exit(3)", r"small\.ipynb, cell 4: .*[Kk]ernel died"),
        (
            "import time; print('so far', flush=True); time.sleep(60)",
            r"small\.ipynb, cell 4: took more than 3 s$",
        ),
    ],
    ids=["error", "dead kernel", "timeout"],
)
def test_a_failing_cell_is_named_and_what_was_shown_is_kept(make, tmp_path, source, message):
    with pytest.raises(NotebookFailedError, match=message) as caught:
        execute(make(source), {"steps": 3}, tmp_path / "out", cell_timeout_s=3)
    assert "\n" not in str(caught.value)
    kept = nbformat.read(tmp_path / "out" / "small.ipynb", as_version=4)
    assert kept.cells[1].execution_count == 1


@pytest.mark.skipif(os.name == "nt", reason="signals of the event loop")
def test_ctrl_c_interrupts_the_cell_and_the_notebook_goes_on(make, tmp_path):
    waiting = (
        "import time\nfrom pathlib import Path\ntry:\n    Path('waiting').touch()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('stopped')"
    )
    notebook, folder = make(waiting, "print('after')"), tmp_path / "out"
    # In a process of its own: an interrupt that came too late would end the test run.
    child = subprocess.Popen([sys.executable, "-c", EXECUTE, str(notebook), str(folder)])
    deadline = time.monotonic() + 120
    while not (folder / "waiting").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 0
    cells = nbformat.read(folder / notebook.name, as_version=4).cells
    assert [cell.outputs[0].text for cell in cells[-2:]] == ["stopped\n", "after\n"]


def test_a_run_ends_with_a_table_and_the_paths(make, tmp_path, capsys):
    assert run_notebook(make(RUN), {"steps": 20}, tmp_path / "out") == 0
    folder = next((tmp_path / "out").iterdir())
    said = capsys.readouterr().out
    assert (folder / "small.html").is_file()
    assert str(folder / "small.html") in said
    assert str(folder / "runs" / "one" / "run.json") in said
    line = next(line for line in said.splitlines() if line.startswith("one "))
    assert line.split() == ["one", "20", "0.550", "1.550", "20", "s", "100", "MiB"]
    assert "background False" in (folder / "small.html").read_text(encoding="utf-8")


def test_a_failed_run_is_one_line_and_not_zero(make, tmp_path, capsys):
    assert run_notebook(make("1 / 0"), {}, tmp_path / "out") == 1
    assert "cell 4: ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_a_parameter_that_does_not_fit_is_told_before_anything_runs(make, tmp_path, capsys):
    assert run_notebook(make(), {"stpes": 1}, tmp_path / "out") == 2
    assert "stpes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_step_has_no_rewards_in_the_table(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert summary_table([tmp_path]).splitlines()[1].split() == [tmp_path.name, "0"]


def test_progress_says_the_cell_and_the_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notebook_run, "QUIET_S", 0.0)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text(json.dumps({"config": {"steps": 40}}), encoding="utf-8")
    row = {"step": 7, "time_s": 3.2, "reward": 0.25}
    with Progress(tmp_path) as progress:
        progress.on_cell(5, 12)
        time.sleep(0.7)
        (tmp_path / "one" / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{{torn", encoding="utf-8")
        time.sleep(0.7)
    assert capsys.readouterr().out.splitlines() == ["cell 5/12", "cell 5/12  step 7/40  reward 0.250  3 s"]
