"""pyproject.toml, constraints.txt and environment.yml agree; each check is seen to fail on a changed copy."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import grpo_lab

ROOT = Path(__file__).parents[1]
PYPROJECT, CONSTRAINTS, ENVIRONMENT = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt", "environment.yml")
)
BY_LAB = {"torch", "triton"}  # lab.py chooses their build, so no version is fixed here


def requirements(pyproject: str) -> list[Requirement]:
    project = tomllib.loads(pyproject)["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for texts in lists for text in texts if not text.startswith("grpo-lab[")]


def without_reason(pyproject: str) -> list[str]:
    """Requirements with a comment neither on their line nor on the line above."""
    start = pyproject.index("dependencies = [")
    lines = pyproject[start : pyproject.index("[project.scripts]")].splitlines()
    bare = []
    for above, line in zip(["", *lines], lines, strict=False):
        requirement = re.match(r'\s+"([^"]+)",?\s*(#.*\w)?', line)
        if requirement and not requirement[2] and not above.strip().startswith("#"):
            bare.append(requirement[1])
    return bare


def versions_of(constraints: str) -> dict[str, str]:
    """Version of each name; a line that is not `name==version` raises."""
    versions = {}
    for line in constraints.splitlines():
        if line.startswith("#"):
            continue
        name, version = re.fullmatch(r"([a-z0-9-]+)==([a-z0-9.+]+)", line).groups()
        versions[name] = version
    return versions


def not_admitted(pyproject: str, constraints: str) -> list[str]:
    """Requirements whose range excludes, or whose name lacks, a tested version."""
    versions = versions_of(constraints)
    return [
        requirement.name
        for requirement in requirements(pyproject)
        if canonicalize_name(requirement.name) not in BY_LAB
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0.dev0"))
    ]


def pip_lines(environment: str) -> list[str]:
    """What environment.yml gives to pip."""
    return [line.strip() for line in environment.split("- pip:\n")[1].splitlines()]


@cache
def installed_modules() -> Mapping[str, list[str]]:
    """Distributions that bring each importable module."""
    return packages_distributions()


def undeclared_imports(source: str, declared: set[str]) -> set[str]:
    """Third-party modules that `source` imports and no requirement brings."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    owners = installed_modules()
    return {
        module
        for module in modules - sys.stdlib_module_names - {"grpo_lab", "tests", "benchmarks"}
        if not {canonicalize_name(owner) for owner in owners.get(module, [])} & declared
    }


def declared_names() -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(PYPROJECT)}


def test_every_dependency_has_a_reason():
    assert without_reason(PYPROJECT) == []


def test_a_dependency_without_a_reason_is_found():
    changed = re.sub(r'("wandb[^"]*",).*', r"\1", PYPROJECT)
    assert without_reason(changed) == ["wandb>=0.31,<1"]


def test_every_range_admits_the_tested_version():
    assert not_admitted(PYPROJECT, CONSTRAINTS) == []


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(r"trl==[\d.]+", "trl==1.15.0"), (r"trl==[\d.]+\n", ""), ("trl==", "trl-x==")],
)
def test_a_constraint_outside_its_range_is_found(pattern, replacement):
    assert not_admitted(PYPROJECT, re.sub(pattern, replacement, CONSTRAINTS)) == ["trl"]


def test_constraints_name_versions_of_and_leave_torch_to_lab():
    versions = versions_of(CONSTRAINTS)
    assert all(Version(version) for version in versions.values())
    assert list(versions) == sorted(versions)
    assert not [name for name in versions if name in BY_LAB or name.startswith("nvidia")]


@pytest.mark.parametrize("line", ["six @ file:///six.whl", "six>=1", "-e .", "--extra-index-url https://x"])
def test_a_constraint_that_is_no_tested_version_is_found(line):
    with pytest.raises(AttributeError):
        versions_of(f"{CONSTRAINTS}{line}\n")


def test_environment_holds_python_pip_and_this_package_alone():
    assert pip_lines(ENVIRONMENT) == ["- -e .[dev]"]
    conda = ENVIRONMENT.split("dependencies:\n")[1].split("  - pip:\n")[0]
    assert conda.split() == ["-", "python=3.11", "-", "pip"]


def test_an_environment_with_a_version_of_its_own_is_found():
    assert pip_lines(ENVIRONMENT + "      - torch==2.0\n") != ["- -e .[dev]"]


def test_the_version_stands_in_one_place():
    project = tomllib.loads(PYPROJECT)["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert Version(grpo_lab.__version__)


def test_the_lowest_python_is_the_one_of_the_checks():
    configuration = tomllib.loads(PYPROJECT)
    assert configuration["project"]["requires-python"] == ">=3.11"
    assert configuration["tool"]["mypy"]["python_version"] == "3.11"
    assert configuration["tool"]["ruff"]["target-version"] == "py311"


@pytest.mark.parametrize("folder", ["grpo_lab", "tests", "benchmarks"])
def test_every_import_is_declared(folder):
    missing = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / folder).rglob("*.py")
        for module in undeclared_imports(path.read_text(encoding="utf-8"), declared_names())
    }
    assert not missing


def test_an_import_that_nobody_declared_is_found():
    assert undeclared_imports("import torch, yaml.nodes\nfrom os import path", declared_names()) == {"yaml"}


def test_importing_the_package_is_light():
    code = "import sys, grpo_lab; sys.exit('torch' in sys.modules or 'ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("pattern", "has_model"),
    [("", True), (r'"grpo_lab\.models" = .*', False)],
    ids=["as it is", "without data"],
)
def test_the_wheel_holds_the_shipped_model(tmp_path, pattern, has_model):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "grpo_lab", source / "grpo_lab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "pyproject.toml").write_text(re.sub(pattern, "", PYPROJECT) if pattern else PYPROJECT, "utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert ("grpo_lab/models/tiny/model.safetensors" in names) == has_model
    assert "grpo_lab/cli.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
