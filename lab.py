"""Set up grpo_lab in .venv, then open the tutorial, run it without a browser, or test the project.

    python3 lab.py          opens the tutorial in JupyterLab; further arguments go to `jupyter lab`
    python3 lab.py run      executes the tutorial here; `steps=20` and the like change its parameters
    python3 lab.py test     lint, types, import rules, tests, notebooks; further arguments go to pytest

Only the standard library is used. A set-up that was interrupted goes on with the next call; a finished one is
recognised by a stamp in .venv and costs nothing.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an older Python gets to see
    sys.exit(f"lab.py needs Python 3.11 or newer, this is {sys.version.split()[0]}. Try: python3.11 lab.py")

import argparse
import hashlib
import http.client
import os
import platform
import shutil
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
EXTRAS = {"tutorial": "lab,gguf", "run": "lab,gguf", "test": "dev"}  # dev holds the others
TESTED_TORCH = "torch==2.13.0"
TORCH_RANGE = "torch>=2.11"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # CPU builds for Linux; PyPI has those with CUDA

Command = list[str]


@dataclass(frozen=True)
class Machine:
    """What decides which torch build is installed, and with what.

    Args:
        system: as `platform.system()` says it.
        gpu: `nvidia-smi` lists one.
        cpu_index: PyTorch's index of CPU builds answers.
        uv: path of the `uv` program, if there is one.
    """

    system: str
    gpu: bool
    cpu_index: bool
    uv: str | None


def look_at_machine() -> Machine:
    """This machine; asks PyTorch's index for a few seconds at most, and only where the answer matters."""
    gpu = shutil.which("nvidia-smi") is not None and succeeds(["nvidia-smi", "-L"])
    system = platform.system()
    return Machine(system, gpu, not gpu and system == "Linux" and answers(CPU_INDEX), shutil.which("uv"))


def answers(index: str, timeout_s: float = 5) -> bool:
    """Whether a package index can be reached from here."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=timeout_s):  # noqa: S310 - a constant https address
            return True
    except (OSError, http.client.HTTPException):
        return False


def succeeds(command: Command) -> bool:
    """Whether `command` can be started and ends with exit code 0; its output is dropped."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def environment_commands() -> list[Command]:
    """Commands, tried in turn, that leave a Python >= 3.11 with pip in .venv; none where it is there."""
    if not succeeds([str(PYTHON), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]):
        return [[sys.executable, "-m", "venv", "--clear", str(VENV)]]
    if not succeeds([str(PYTHON), "-c", "import pip"]):
        return [[str(PYTHON), "-m", "ensurepip", "--upgrade"]]
    return []


def torch_commands(machine: Machine) -> list[Command]:
    """Commands, tried in turn, that install the torch build for this machine."""
    if machine.gpu or machine.system != "Linux":
        by_pip = [TORCH_RANGE]  # PyPI: CUDA for Linux, CPU or Metal for the others
    elif machine.cpu_index:
        by_pip = [TESTED_TORCH, "--index-url", CPU_INDEX]
    else:
        return [pip_install(TESTED_TORCH)]
    by_uv = [uv_install(machine.uv, "--torch-backend=auto", TORCH_RANGE)] if machine.uv else []
    return [*by_uv, pip_install(*by_pip)]


def torch_notice(machine: Machine) -> str:
    """What to know before the torch step: its size, and how to avoid it where it may be large for nothing."""
    if machine.gpu:
        return "GPU found: torch with CUDA, a download of about 3 GB"
    if machine.system != "Linux" or machine.cpu_index:
        return "no NVIDIA GPU found: torch without CUDA, a download of about 0.2 GB"
    return (
        "no NVIDIA GPU found, and PyTorch's index of CPU builds does not answer:\n"
        f"      taking {TESTED_TORCH} from your package index. If that has the CUDA build only, about 3 GB\n"
        "      are downloaded. To avoid it: Ctrl-C, install a CPU wheel of torch yourself with\n"
        f"      {PYTHON} -m pip install <wheel>, and call lab.py again"
    )


def package_commands(machine: Machine, extras: str) -> list[Command]:
    """Commands, tried in turn, that install grpo_lab and what it needs in the tested versions."""
    wanted = ["--editable", f"{ROOT}[{extras}]", "--constraint", str(ROOT / "constraints.txt")]
    return [*([uv_install(machine.uv, *wanted)] if machine.uv else []), pip_install(*wanted)]


def pip_install(*arguments: str) -> Command:
    """The `pip install` command for .venv."""
    return [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]


def uv_install(uv: str, *arguments: str) -> Command:
    """The `uv pip install` command for .venv."""
    return [uv, "pip", "install", "--python", str(PYTHON), *arguments]


def fingerprint() -> str:
    """What an installation depends on, as a hash: requirements, tested versions, Python, and this folder."""
    parts = [ROOT / "pyproject.toml", ROOT / "constraints.txt", VENV / "pyvenv.cfg"]
    content = b"\0".join(path.read_bytes() if path.exists() else b"" for path in parts)
    return hashlib.sha256(content + str(ROOT).encode()).hexdigest()


def is_ready(extras: str) -> bool:
    """Whether .venv already holds the package with `extras`, as this checkout describes it."""
    stamps = [VENV / f".ready-{done}" for done in (extras, "dev")]
    done = any(stamp.exists() and stamp.read_text() == fingerprint() for stamp in stamps)
    return done and succeeds([str(PYTHON), "-c", ""])


def set_up(extras: str, *, verbose: bool) -> None:
    """Make .venv hold torch and grpo_lab with `extras`; nothing is done twice."""
    if is_ready(extras):
        return
    say(f"setting up {VENV}")
    attempt("python", environment_commands(), verbose=verbose)
    machine = look_at_machine()
    if not succeeds([str(PYTHON), "-c", "import torch; torch.ones(1)"]):
        say(torch_notice(machine))
        attempt("torch", torch_commands(machine), verbose=verbose)
    attempt(f"grpo_lab[{extras}]", package_commands(machine, extras), verbose=verbose)
    (VENV / f".ready-{extras}").write_text(fingerprint())


def attempt(step: str, commands: list[Command], *, verbose: bool) -> None:
    """Run `commands` until one succeeds; leave the program with the end of their output when none does."""
    start_s, output = time.monotonic(), ""
    stdout = None if verbose else subprocess.PIPE
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=stdout, stderr=subprocess.STDOUT)
        if done.returncode == 0:
            say(f"{step}: done in {time.monotonic() - start_s:.0f} s")
            return
        output += f"$ {' '.join(command)}\n{done.stdout or ''}\n"
    if commands:
        tail = "\n".join(output.rstrip().splitlines()[-20:])
        sys.exit(f"{tail}\n[lab] {step} failed. Call lab.py again to go on; if it stays so, delete {VENV}.")


def say(text: str) -> None:
    """One line of progress."""
    print(f"[lab] {text}", flush=True)


def in_foreground(command: Command) -> int:
    """Run `command` with this terminal; Ctrl-C is its business.

    Returns:
        Its exit code.
    """
    with subprocess.Popen(command, cwd=ROOT) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def test(python: str, pytest_arguments: list[str]) -> int:
    """Run every gate, also after one that fails, and print a table of them.

    Returns:
        0 when all passed, else 1.
    """
    gates = {
        "ruff check": ["-m", "ruff", "check", "--output-format=concise"],
        "ruff format": ["-m", "ruff", "format", "--check"],
        "mypy": ["-m", "mypy"],
        "import rules": ["-c", "from importlinter.cli import lint_imports_command as run; run()"],
        "pytest": ["-m", "pytest", "-n", "2", "--dist", "loadgroup", *pytest_arguments],
    }
    table, failed = [], False
    for name, arguments in gates.items():
        say(name)
        start_s = time.monotonic()
        code = in_foreground([python, *arguments])
        failed = failed or code != 0
        verdict = f"failed ({code})" if code else "ok"
        table.append(f"{name:14}{verdict:14}{time.monotonic() - start_s:6.0f} s")
    print("\n" + "\n".join(table), flush=True)
    return int(failed)


def main() -> int:
    """Set up, then do what the command line asks for.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", nargs="?", choices=EXTRAS, default="tutorial")
    parser.add_argument("--here", action="store_true", help="no .venv: take this Python as it is (conda)")
    parser.add_argument("--verbose", action="store_true", help="show what pip and uv print")
    options, rest = parser.parse_known_args()
    try:
        if not options.here:
            set_up(EXTRAS[options.command], verbose=options.verbose)
    except KeyboardInterrupt:
        sys.exit("\n[lab] stopped. The same call goes on from here.")
    python = sys.executable if options.here else str(PYTHON)
    if options.command == "test":
        return test(python, rest)
    return in_foreground([python, "-m", "grpo_lab.launch", options.command, *rest])


if __name__ == "__main__":
    sys.exit(main())
