"""lab.py and .ci/run on machines that are made up: nothing is installed, and no network is asked."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = (ROOT / "lab.py").read_text(encoding="utf-8")

# Stands in for the Python of .venv: writes its arguments to a log, and fails where the test says so.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "{log}"
while read -r pattern; do
  case "$*" in *"$pattern"*) echo "no luck with $pattern"; exit 1 ;; esac
done < "{failing}"
case "$*" in
  *"-m venv"*) mkdir -p "{venv}/bin" && cp "$0" "{venv}/bin/python" ;;
esac
exit 0
"""

needs_sh = pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """lab.py with a .venv of its own and a made-up machine: Linux, no GPU, PyTorch's index answers, no uv."""
    spec = importlib.util.spec_from_file_location("lab", ROOT / "lab.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lab", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(module, "look_at_machine", lambda: module.Machine("Linux", False, True, None))
    return module


class Stand:
    """The stand-in for Python: what it was asked, and what it refuses."""

    def __init__(self, folder: Path) -> None:
        self.log, self.failing, self.path = folder / "log", folder / "failing", folder / "python"
        self.failing.touch()
        self.path.write_text(
            FAKE_PYTHON.format(log=self.log, venv=folder / ".venv", failing=self.failing), encoding="utf-8"
        )
        self.path.chmod(0o755)

    def refuse(self, *patterns: str) -> None:
        self.failing.write_text("".join(f"{pattern}\n" for pattern in patterns), encoding="utf-8")

    def asked(self) -> str:
        """Everything asked since the last call."""
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        self.log.unlink(missing_ok=True)
        return text


@pytest.fixture
def stand(lab, monkeypatch, tmp_path):
    made = Stand(tmp_path)
    made.refuse("import torch")  # until it is installed
    monkeypatch.setattr(sys, "executable", str(made.path))
    return made


# Which torch


@pytest.mark.parametrize("uv", [None, "uv"])
@pytest.mark.parametrize(
    ("system", "gpu", "cpu_index", "by_pip"),
    [
        ("Linux", True, False, ["torch>=2.11"]),
        ("Linux", False, True, ["torch==2.13.0", "--index-url", "https://download.pytorch.org/whl/cpu"]),
        ("Darwin", False, False, ["torch>=2.11"]),
        ("Windows", False, False, ["torch>=2.11"]),
    ],
)
def test_torch_build_fits_the_machine(lab, system, gpu, cpu_index, uv, by_pip):
    *first, last = lab.torch_commands(lab.Machine(system, gpu, cpu_index, uv))
    assert last == lab.pip_install(*by_pip)
    assert first == (
        [["uv", "pip", "install", "--python", str(lab.PYTHON), "--torch-backend=auto", "torch>=2.11"]] if uv else []
    )


@pytest.mark.parametrize("uv", [None, "uv"])
def test_without_gpu_and_cpu_index_pip_takes_the_tested_torch(lab, uv):
    assert lab.torch_commands(lab.Machine("Linux", False, False, uv)) == [lab.pip_install("torch==2.13.0")]


@pytest.mark.parametrize(
    ("gpu", "cpu_index", "said", "avoidable"),
    [(True, False, "3 GB", False), (False, True, "0.2 GB", False), (False, False, "3 GB", True)],
)
def test_the_size_of_torch_is_said_and_how_to_avoid_it(lab, gpu, cpu_index, said, avoidable):
    notice = lab.torch_notice(lab.Machine("Linux", gpu, cpu_index, None))
    assert said in notice
    assert ("Ctrl-C" in notice) == avoidable


def test_an_index_that_answers_is_told_from_one_that_does_not(lab, tmp_path):
    (tmp_path / "torch").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert lab.answers(address)
        assert not lab.answers(f"{address}/nothing")
        server.shutdown()
    assert not lab.answers(address)


# Set-up


@needs_sh
def test_set_up_happens_once(lab, stand):
    lab.set_up("dev", verbose=False)
    asked = stand.asked()
    order = [asked.index(text) for text in ("-m venv", "install --no-input", "torch==2.13.0", "[dev]")]
    assert order == sorted(order)
    assert "--constraint" in asked
    lab.set_up("dev", verbose=False)
    lab.set_up("lab,gguf", verbose=False)
    assert "install" not in stand.asked()


@needs_sh
def test_the_extras_of_the_tests_are_added_to_those_of_the_tutorial(lab, stand):
    lab.set_up("lab,gguf", verbose=False)
    assert "[lab,gguf]" in stand.asked()
    lab.set_up("dev", verbose=False)
    assert "[dev]" in stand.asked()


@needs_sh
def test_torch_that_can_be_imported_stays(lab, stand):
    stand.refuse()
    lab.set_up("dev", verbose=False)
    assert "torch==" not in stand.asked()


@needs_sh
@pytest.mark.parametrize("step", ["-m venv", "torch==2.13.0", "[dev]"])
def test_a_failed_step_is_shown_and_the_next_call_goes_on(lab, stand, capsys, step):
    stand.refuse("import torch", step)
    with pytest.raises(SystemExit, match=r"(?s)no luck with .*failed\. Call lab.py again"):
        lab.set_up("dev", verbose=False)
    assert not lab.is_ready("dev")
    stand.asked()
    stand.refuse("import torch")
    lab.set_up("dev", verbose=False)
    asked = stand.asked()
    assert lab.is_ready("dev")
    assert "[dev]" in asked
    assert ("-m venv" in asked) == (step == "-m venv")
    assert "no luck" not in capsys.readouterr().out


@needs_sh
def test_a_changed_requirement_is_installed(lab, stand, monkeypatch, tmp_path):
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    lab.set_up("dev", verbose=False)
    stand.asked()
    with (tmp_path / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("six==1.17.0\n")
    lab.set_up("dev", verbose=False)
    assert "[dev]" in stand.asked()


@needs_sh
def test_an_environment_that_lost_its_python_is_made_anew(lab, stand):
    lab.set_up("dev", verbose=False)
    lab.PYTHON.unlink()
    stand.asked()
    lab.set_up("dev", verbose=False)
    assert "-m venv --clear" in stand.asked()


@needs_sh
def test_an_environment_without_pip_gets_it(lab, stand):
    lab.set_up("lab,gguf", verbose=False)
    stand.asked()
    stand.refuse("import torch", "import pip")
    lab.set_up("dev", verbose=False)
    asked = stand.asked()
    assert "-m ensurepip" in asked
    assert "-m venv" not in asked


@needs_sh
def test_pip_takes_over_where_uv_fails(lab, stand, monkeypatch):
    monkeypatch.setattr(lab, "look_at_machine", lambda: lab.Machine("Linux", False, True, "false"))
    lab.set_up("dev", verbose=False)
    assert "-m pip install" in stand.asked()


@needs_sh
def test_ctrl_c_during_set_up_is_one_line(lab, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "set_up", interrupt)
    monkeypatch.setattr(sys, "argv", ["lab.py", "run"])
    with pytest.raises(SystemExit, match="stopped"):
        lab.main()


# The command line


@pytest.mark.parametrize(
    ("arguments", "extras", "started"),
    [
        ([], "lab,gguf", ["-m", "grpo_lab.launch", "tutorial"]),
        (
            ["--no-browser", "--port=9"],
            "lab,gguf",
            ["-m", "grpo_lab.launch", "tutorial", "--no-browser", "--port=9"],
        ),
        (["run", "steps=3"], "lab,gguf", ["-m", "grpo_lab.launch", "run", "steps=3"]),
    ],
)
def test_arguments_reach_the_package(lab, monkeypatch, arguments, extras, started):
    calls = []
    monkeypatch.setattr(lab, "set_up", lambda wanted, verbose: calls.append((wanted, verbose)))
    monkeypatch.setattr(lab, "in_foreground", lambda command: calls.append(command) or 5)
    monkeypatch.setattr(sys, "argv", ["lab.py", *arguments])
    assert lab.main() == 5
    assert calls == [(extras, False), [str(lab.PYTHON), *started]]


def test_here_uses_this_python_and_sets_nothing_up(lab, monkeypatch):
    monkeypatch.setattr(lab, "set_up", lambda *_args, **_options: pytest.fail("set up"))
    monkeypatch.setattr(lab, "in_foreground", lambda command: int(command[0] != sys.executable))
    monkeypatch.setattr(sys, "argv", ["lab.py", "--here", "run"])
    assert lab.main() == 0


@pytest.mark.parametrize("failing", [None, "ruff", "mypy", "importlinter", "pytest"])
def test_every_gate_runs_and_one_that_fails_is_named(lab, monkeypatch, capsys, failing):
    ran = []

    def gate(command):
        ran.append(" ".join(command))
        return int(failing is not None and failing in ran[-1])

    monkeypatch.setattr(lab, "in_foreground", gate)
    assert lab.test("python", ["-k", "one"]) == int(failing is not None)
    assert len(ran) == 5
    assert ran[-1] == "python -m pytest -n 2 --dist loadgroup -k one"
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert table.count("failed (1)") == sum(failing is not None and failing in command for command in ran)
    assert table.count(" ok ") == 5 - table.count("failed (1)")


def test_only_the_standard_library_is_imported():
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SOURCE))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
    assert len(SOURCE.splitlines()) < 250


def test_an_older_python_is_told_what_is_needed():
    ast.parse(SOURCE, feature_version=(3, 7))  # else it would be told of a syntax error
    code = f"import sys; sys.version_info = (3, 10, 0); exec(open({str(ROOT / 'lab.py')!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("lab.py needs Python 3.11 or newer")
    assert len(done.stderr.splitlines()) == 1


def test_help_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "lab.py", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "python3 lab.py test" in done.stdout
    assert not list(tmp_path.iterdir())


# CI


@pytest.fixture
def ci(tmp_path):
    """`.ci/run` on a machine that has only the programs put there: `ci(environment)` gives its exit code."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "id"):
        (programs / name).symlink_to(shutil.which(name))

    def program(name, script):
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{script}\n", encoding="utf-8")
        (programs / name).chmod(0o755)

    program("python3", f'echo "$*" > "{tmp_path}/called"; exit 7')

    def run(**environment):
        done = subprocess.run(
            [shutil.which("bash"), ROOT / ".ci/run"],
            env={"PATH": str(programs), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        called = tmp_path / "called"
        return done.returncode, called.read_text(encoding="utf-8").strip() if called.exists() else None

    run.program = program
    return run


@needs_sh
def test_ci_calls_the_test_command_and_hands_on_its_exit_code(ci):
    ci.program("chromium", "")
    assert ci(CI="true") == (7, "lab.py test")


@needs_sh
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root installs Chromium")
@pytest.mark.parametrize(("environment", "expected"), [({"CI": "true"}, (1, None)), ({}, (7, "lab.py test"))])
def test_a_chromium_that_cannot_be_installed_stops_ci_alone(ci, environment, expected):
    ci.program("apt-get", "exit 100")
    assert ci(**environment) == expected
