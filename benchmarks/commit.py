"""Which code a row of a CSV measured."""

import subprocess
from pathlib import Path


def described_commit() -> str:
    """The checkout's commit, with `-dirty` where a tracked file differs from it."""
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
