"""Execute a notebook from a fresh kernel without a browser: parameters in, lines of progress, HTML out."""

import ast
import asyncio
import copy
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from grpo_lab.monitoring import History

QUIET_S = 10.0  # between two lines of progress where they cannot be overwritten


class NotebookFailedError(RuntimeError):
    """A cell raised, or the kernel died; the message is one line and names the cell."""


def parameters_cell(notebook: Any) -> int:
    """Index of the cell tagged `parameters`.

    Args:
        notebook: as nbformat reads it.

    Returns:
        Index into `notebook.cells`.

    Raises:
        ValueError: there is not exactly one such cell.
    """
    tagged = [n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    if len(tagged) != 1:
        raise ValueError(f"notebook: expected one cell tagged 'parameters'; got {len(tagged)}.")
    return tagged[0]


def parameter_names(source: str) -> list[str]:
    r"""The names that a parameters cell assigns.

    Args:
        source: the cell's code.

    Returns:
        Names in the order of the cell.

    Examples:
        >>> parameter_names("steps = 150  # optimizer steps\nseed: int = 0")
        ['steps', 'seed']
    """
    targets: list[ast.expr] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return [target.id for target in targets if isinstance(target, ast.Name)]


def with_parameters(notebook: Any, parameters: Mapping[str, object]) -> Any:
    """A copy of `notebook` with assignments of `parameters` in a cell behind the one tagged `parameters`.

    Args:
        notebook: as nbformat reads it; it is not changed.
        parameters: new value of each name; the values must be Python literals.

    Returns:
        The notebook to execute.

    Raises:
        ValueError: no cell is tagged `parameters`, or it does not assign one of the names.
    """
    notebook = copy.deepcopy(notebook)
    position = parameters_cell(notebook)
    known = parameter_names(notebook.cells[position].source)
    if unknown := sorted(set(parameters) - set(known)):
        raise ValueError(f"parameters: the notebook has no {', '.join(unknown)}. It has: {', '.join(known)}.")
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    injected = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    notebook.cells.insert(position + 1, injected)
    return notebook


def execute(
    path: Path,
    parameters: Mapping[str, object],
    folder: Path,
    *,
    on_cell: Callable[[int, int], None] | None = None,
    cell_timeout_s: int | None = None,
) -> Path:
    """Execute the notebook at `path` with `parameters`; what it shows is kept, also when a cell fails.

    Args:
        path: the notebook, which is not changed.
        parameters: see `with_parameters`.
        folder: where the executed notebook is written, and the working directory of its kernel.
        on_cell: called with (number of the cell, number of cells) before each code cell runs.
        cell_timeout_s: seconds that one cell may take; `None`: any time.

    Returns:
        Path of the executed notebook.

    Raises:
        ValueError: there is no such notebook, or `parameters` does not fit it.
        NotebookFailedError: a cell raised an error or ran too long, or the kernel died.
    """
    if not path.is_file():
        raise ValueError(f"notebook: there is no file {path}.")
    notebook = with_parameters(nbformat.read(path, as_version=4), parameters)
    folder.mkdir(parents=True, exist_ok=True)
    executed = folder / path.name
    current = 0

    def count(cell: Any, cell_index: int) -> None:
        nonlocal current
        current = cell_index + 1
        _interrupt_cell_on_ctrl_c(client)
        if on_cell and cell.cell_type == "code":
            on_cell(current, len(notebook.cells))

    client = NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel warns of its local sockets at every start
        store_widget_state=False,  # an exported page cannot load a widget; without it, it shows the picture
        on_cell_start=count,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        first = str(error.evalue).strip().splitlines()
        raise NotebookFailedError(": ".join([f"{path.name}, cell {current}", error.ename, *first[:1]])) from None
    except DeadKernelError as error:
        raise NotebookFailedError(f"{path.name}, cell {current}: {error}") from None
    except CellTimeoutError:
        raise NotebookFailedError(f"{path.name}, cell {current}: took more than {cell_timeout_s} s") from None
    finally:
        nbformat.write(notebook, executed)
    return executed


def _interrupt_cell_on_ctrl_c(client: NotebookClient) -> None:
    """Let Ctrl-C interrupt the cell, as in a front end, where nbclient would kill the kernel."""
    with suppress(RuntimeError):  # not on Windows, and not outside the main thread
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGINT, lambda: asyncio.ensure_future(client.km.interrupt_kernel())
        )


def to_html(path: Path) -> Path:
    """The executed notebook as one HTML file beside it.

    Args:
        path: the executed notebook.

    Returns:
        Path of the HTML file.
    """
    from nbconvert import HTMLExporter  # takes a second, which a failing run need not wait for

    body, _ = HTMLExporter().from_filename(str(path))
    page = path.with_suffix(".html")
    page.write_text(body, encoding="utf-8")
    return page


def run_folders(output_dir: Path) -> list[Path]:
    """The run folders under `output_dir`, oldest first."""
    return sorted(record.parent for record in output_dir.glob("*/run.json"))


def summary_table(folders: list[Path]) -> str:
    """One line a run: steps, mean reward of the first and last (up to 10) steps, time, highest peak memory.

    Args:
        folders: run folders with `metrics.jsonl`.

    Returns:
        The table, aligned, with a heading.
    """
    lines = [f"{'run':36}{'steps':>6}{'first reward':>14}{'last reward':>13}{'time':>9}{'peak memory':>13}"]
    for folder in folders:
        summary = History.load(folder).summary()
        if "reward_first" not in summary:
            lines.append(f"{folder.name:36}{0:6}")
            continue
        peak = f"{summary['peak_mib']:.0f} MiB" if "peak_mib" in summary else "not measured"
        lines.append(
            f"{folder.name:36}{summary['steps']:6}{summary['reward_first']:14.3f}{summary['reward_last']:13.3f}"
            f"{summary['seconds']:7.0f} s{peak:>13}"
        )
    return "\n".join(lines)


def _last_row(metrics: Path) -> dict[str, Any] | None:
    """The last row that is written to its end; the whole History is too much to read twice a second."""
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return json.loads(whole[-1]) if whole else None


class Progress:
    """One line that says which cell runs and how far its training is; overwritten on a terminal.

    Args:
        output_dir: where the notebook's runs make their folders.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._cell = ""
        self._shown = ""
        self._shown_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if sys.stdout.isatty():
            print()

    def on_cell(self, number: int, total: int) -> None:
        """Say that cell `number` of `total` starts."""
        self._cell = f"cell {number}/{total}"
        self._show(self._cell)

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            if (step := self._training()) and (sys.stdout.isatty() or time.monotonic() > self._shown_s + QUIET_S):
                self._show(f"{self._cell}  {step}")

    def _training(self) -> str:
        folders = run_folders(self._output_dir)
        row = _last_row(folders[-1] / "metrics.jsonl") if folders else None
        if row is None:
            return ""
        total = json.loads((folders[-1] / "run.json").read_text(encoding="utf-8"))["config"]["steps"]
        reward = f"  reward {row['reward']:.3f}" if row.get("reward") is not None else ""
        return f"step {row['step']}/{total}{reward}  {row['time_s']:.0f} s"

    def _show(self, line: str) -> None:
        if line == self._shown:
            return
        self._shown, self._shown_s = line, time.monotonic()
        if sys.stdout.isatty():
            print(f"\r{line:78}", end="", flush=True)
        else:
            print(line, flush=True)


def run_notebook(path: Path, parameters: Mapping[str, object], output_dir: Path) -> int:
    """Execute a notebook for a person at a terminal: progress, the table of its runs, and where all of it is.

    Args:
        path: the notebook.
        parameters: values of the notebook's parameters that differ from its own.
        output_dir: a folder of its own is made here, named by the time.

    Returns:
        Exit code: 0, 1 where the notebook failed, 2 where it is not there or a parameter does not fit.
    """
    folder = (output_dir / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{path.stem}").resolve()
    runs = folder / "runs"
    try:
        with Progress(runs) as progress:
            executed = execute(
                path,
                {"background": False, "output_dir": str(runs), **parameters},
                folder,
                on_cell=progress.on_cell,
            )
    except ValueError as error:
        print(f"grpo-lab: {error}", file=sys.stderr)
        return 2
    except NotebookFailedError as error:
        print(f"grpo-lab: {error}\nnotebook so far: {folder / path.name}", file=sys.stderr)
        return 1
    folders = run_folders(runs)
    if folders:
        print(f"\n{summary_table(folders)}")
    print(f"\nnotebook    {to_html(executed)}\n            {executed}")
    for run in folders:
        print(f"run record  {run / 'run.json'}")
    return 0
