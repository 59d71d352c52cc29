"""Open the notebooks in JupyterLab, or run one without a browser, in the environment that is active.

`python3 lab.py` comes here after its set-up.
"""

import argparse
import ast
import json
import os
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
WORK = ROOT / "work"
TUTORIAL = "00_tutorial.ipynb"


def copy_notebooks(source: Path, target: Path) -> list[Path]:
    """Copies of the notebooks of `source` for the user to change; a copy that is there already is left alone.

    Args:
        source: folder of the project's notebooks.
        target: folder of the copies, made where it is missing.

    Returns:
        The copies, in the order of their names.

    Raises:
        RuntimeError: `source` is not there, as in an installation without the repository.
    """
    if not source.is_dir():
        raise RuntimeError(f"no notebooks at {source}: clone the repository and call lab.py in it.")
    target.mkdir(parents=True, exist_ok=True)
    copies = []
    for original in sorted(source.glob("*.ipynb")):
        copies.append(target / original.name)
        if not copies[-1].exists():
            shutil.copyfile(original, copies[-1])
    return copies


def turn_news_off(settings: Path) -> None:
    """Keep JupyterLab from opening with a question about news; settings that are there already stay.

    Args:
        settings: JupyterLab's folder of settings for this environment.
    """
    overrides = settings / "overrides.json"
    if not overrides.exists():
        settings.mkdir(parents=True, exist_ok=True)
        content = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}
        overrides.write_text(json.dumps(content), encoding="utf-8")


def has_browser() -> bool:
    """Whether a browser window can be opened from here."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def lab_arguments(notebook: Path, root: Path, *, browser: bool, as_root: bool) -> list[str]:
    """Arguments of `jupyter lab` that open `notebook`.

    Args:
        notebook: what to show, below `root`.
        root: the folder that JupyterLab's file browser shows.
        browser: open a window; otherwise JupyterLab prints its address.
        as_root: the user is root, which JupyterLab wants to be told.

    Returns:
        The arguments.
    """
    arguments = [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{notebook.relative_to(root).as_posix()}",
        "--log-level=ERROR",  # its address is printed all the same
    ]
    return arguments + ["--no-browser"] * (not browser) + ["--allow-root"] * as_root


def open_tutorial(arguments: Sequence[str]) -> int:
    """Copy the notebooks to `work/` and show the tutorial's copy in JupyterLab until it is stopped.

    Args:
        arguments: further arguments of `jupyter lab`, such as `--no-browser` or `--port=8899`.

    Returns:
        Exit code.

    Raises:
        RuntimeError: the notebooks are not there.
    """
    from jupyterlab.commands import get_app_dir
    from jupyterlab.labapp import LabApp

    tutorial = next(copy for copy in copy_notebooks(NOTEBOOKS, WORK) if copy.name == TUTORIAL)
    turn_news_off(Path(get_app_dir()) / "settings")
    print(f"Your copy: {tutorial} (delete it to get a new one). Stop JupyterLab with Ctrl-C.", flush=True)
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    LabApp.launch_instance([*lab_arguments(tutorial, ROOT, browser=has_browser(), as_root=as_root), *arguments])
    return 0


def parameter(text: str) -> tuple[str, object]:
    """A notebook parameter from the command line.

    Args:
        text: `name=value`; a value that is no Python literal is a string.

    Returns:
        Name and value.

    Raises:
        argparse.ArgumentTypeError: there is no `=`.

    Examples:
        >>> parameter("steps=20"), parameter("model=tiny")
        (('steps', 20), ('model', 'tiny'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value; got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m grpo_lab.launch tutorial | run`.

    Args:
        arguments: as in `sys.argv[1:]`, which is the default.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="lab.py", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tutorial", help="open the tutorial in JupyterLab; further arguments go to jupyter lab")
    run = commands.add_parser("run", help="execute a notebook without a browser")
    run.add_argument("parameters", nargs="*", type=parameter, help="name=value of notebook parameters")
    run.add_argument("--notebook", type=Path, default=NOTEBOOKS / TUTORIAL, help="the notebook (%(default)s)")
    run.add_argument("--output-dir", type=Path, default=WORK / "executed", help="for all results (%(default)s)")
    options, rest = parser.parse_known_args(arguments)
    try:
        if options.command == "tutorial":
            return open_tutorial(rest)
        if rest:
            run.error(f"unrecognized arguments: {' '.join(rest)}")
        from grpo_lab.notebook_run import run_notebook

        return run_notebook(options.notebook, dict(options.parameters), options.output_dir)
    except (OSError, RuntimeError) as error:
        print(f"grpo-lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
