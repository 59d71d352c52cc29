"""The folder of one run: what was asked, what it ran on, how it ended, and where to go on from."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_lab.training.errors import RunConfigError

RECORD_NAME = "run.json"
CHECKPOINTS_NAME = "checkpoints"
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "wandb")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can move a result; what is not installed is absent."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def new_folder(output_dir: str, label: str) -> Path:
    """Make `output_dir/<UTC time>-<label>`, numbered where it exists already.

    Args:
        output_dir: made where it does not exist.
        label: end of the folder's name.

    Returns:
        The new folder, absolute.

    Raises:
        RunConfigError: the folder cannot be made or written to.
    """
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{label}"
    candidates = (Path(output_dir) / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    try:
        for folder in candidates:
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder.resolve()
    except OSError as error:
        raise RunConfigError(unwritable(Path(output_dir), error)) from None
    raise RunConfigError(f"output_dir: {output_dir} holds 999 runs named {stem}. Choose another output_dir.")


def unwritable(path: Path, error: OSError) -> str:
    """One line for a folder that cannot be written to."""
    reason = error.strerror or str(error)
    return f"output_dir: cannot write to {path} ({reason}). Free space there or choose another output_dir."


class RunRecord:
    """`run.json`: written whole at each change, by way of a second file, so that a crash never leaves half of it.

    Args:
        folder: the run's folder, which exists.

    Raises:
        RunConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD_NAME
        self.fields: dict[str, Any] = {}

    def update(self, **fields: Any) -> None:
        """Set `fields` and write the record."""
        self.fields.update(fields)
        draft = self.path.with_suffix(".json.draft")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(self.fields, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as error:
            raise RunConfigError(unwritable(self.path.parent, error)) from None

    @classmethod
    def load(cls, folder: Path) -> "RunRecord":
        """Read the record of a run.

        Args:
            folder: the run's folder.

        Returns:
            The record, ready to be updated.

        Raises:
            RunConfigError: there is none, or it is not readable.
        """
        record = cls(folder)
        try:
            record.fields = json.loads(record.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunConfigError(f"folder: {folder} is not a run folder, it has no {RECORD_NAME}.") from None
        except (OSError, json.JSONDecodeError) as error:
            raise RunConfigError(f"folder: {record.path} cannot be read ({error}).") from None
        return record


def latest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """The last whole checkpoint of a run as (optimizer step, path), or `None`.

    The trainer writes `trainer_state.json` last, so a checkpoint that a crash cut short has none, or a broken one.

    Args:
        folder: the run's folder.

    Returns:
        Its optimizer step and its folder.
    """
    found = []
    for path in (folder / CHECKPOINTS_NAME).glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        found.append((int(state["global_step"]), path))
    return max(found, default=None)
