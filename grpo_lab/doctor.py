"""What this machine has, what will run on it, and what is missing: no network, nothing is changed."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Literal

from grpo_lab import __version__

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        topic: what was looked at.
        level: `missing` where a run cannot start, `note` where something is worth knowing.
        text: what was found, and what to do about it.
    """

    topic: str
    level: Literal["ok", "note", "missing"]
    text: str


def installed(name: str) -> str | None:
    """Version of an installed package, or `None`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def doctor(folder: Path | None = None) -> list[Finding]:
    """Look at Python, torch, GPU, kernels, JupyterLab, W&B, disk and the shipped model.

    Args:
        folder: where runs will be written; `None`: the working directory.

    Returns:
        The findings, in the order in which they matter.
    """
    python = Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, grpo_lab {__version__}")
    return [python, *_torch(), *_packages(), _model(), _jupyter(), _wandb(), _disk(folder or Path.cwd())]


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # an OSError where a library that torch loads is missing
        yield Finding("torch", "missing", f"cannot be imported ({error}). Run python3 lab.py again.")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding("gpu", "ok", f"{index}: {device.name}, {device.total_memory / GIB:.0f} GiB")
    elif shutil.which("nvidia-smi"):
        yield Finding("gpu", "note", "nvidia-smi is there, but this torch sees no GPU. Install a CUDA build of torch.")
    else:
        yield Finding("gpu", "note", "none that torch can use; runs take the CPU")
    yield _kernels("cuda" if torch.cuda.is_available() else "cpu")


def _kernels(device: str) -> Finding:
    import torch

    from grpo_lab.kernels import resolve_implementation

    chosen = resolve_implementation("auto", torch.device(device))
    triton = installed("triton")
    return Finding(
        "kernels",
        "ok",
        f"implementation 'auto' is {chosen!r} on {device}; triton {triton or 'not installed'}",
    )


def _packages() -> Iterator[Finding]:
    for name in ("transformers", "trl", "peft", "accelerate", "datasets"):
        found = installed(name)
        text = found or "not installed. Run python3 lab.py again."
        yield Finding(name, "ok" if found else "missing", text)


def _model() -> Finding:
    weights = files("grpo_lab") / "models" / "tiny" / "model.safetensors"
    if not weights.is_file():
        return Finding("model", "missing", "the shipped model 'tiny' is not in this installation. Install it again.")
    return Finding("model", "ok", "'tiny' is shipped with the package; no download")


def _jupyter() -> Finding:
    absent = [name for name in ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib") if not installed(name)]
    if absent:
        return Finding("notebooks", "note", f"{', '.join(absent)} not installed: pip install 'grpo-lab[lab]'")
    return Finding("notebooks", "ok", f"jupyterlab {installed('jupyterlab')}, ipykernel {installed('ipykernel')}")


def _wandb() -> Finding:
    found = installed("wandb")
    if not found:
        return Finding("wandb", "note", "not installed: runs are recorded in their folders alone")
    if mode := os.environ.get("WANDB_MODE"):
        return Finding("wandb", "ok", f"{found}, WANDB_MODE is {mode!r}")
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb" in netrc.read_text("utf-8", "replace")):
        return Finding("wandb", "ok", f"{found}, an API key is stored: runs go online where the server answers")
    return Finding("wandb", "ok", f"{found}, no API key: runs are offline; to store one: wandb login")


def _disk(folder: Path) -> Finding:
    free_gib = shutil.disk_usage(folder).free / GIB
    text = f"{free_gib:.1f} GiB free for runs in {folder}"
    if free_gib >= 1:
        return Finding("disk", "ok", text)
    return Finding("disk", "note", f"{text}. Free space, or give runs another --output-dir.")


def main() -> int:
    """Print the findings as a table.

    Returns:
        0; 1 where something is missing that a run needs.
    """
    findings = doctor()
    for finding in findings:
        mark = "" if finding.level == "ok" else f"{finding.level}: "
        print(f"{finding.topic:13} {mark}{finding.text}")
    return int(any(finding.level == "missing" for finding in findings))
