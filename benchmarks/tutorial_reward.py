"""Does the tutorial's run learn: `python benchmarks/tutorial_reward.py --seeds 0 1 2`.

Runs the tutorial's settings once a seed and appends a row each to `results/tutorial_reward.csv`: mean reward of the
first and of the last ten steps, seconds, seconds a step.
"""

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from grpo_lab import Run, RunConfig

RESULTS = Path(__file__).parent / "results" / "tutorial_reward.csv"
COLUMNS = ("commit", "date", "device", "torch", "model", "seed", "steps", "first10", "last10", "seconds", "command")


def device_name() -> str:
    """The GPU, or how many CPU cores this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()})"


def main() -> None:
    """Run the seeds and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=RunConfig.steps)
    given = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(RunConfig(seed=seed, steps=given.steps, wandb_mode="disabled", output_dir=folder))
            run.start(background=False)
        summary = run.summary()
        row = (
            commit, f"{datetime.now(UTC):%Y-%m-%d}", device_name(), torch.__version__, run.config.model, seed,
            int(summary["steps"]), round(summary["reward_first"], 4), round(summary["reward_last"], 4),
            round(summary["seconds"], 1), f"python benchmarks/tutorial_reward.py --seeds {seed} --steps {given.steps}",
        )  # fmt: skip
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, row] if new else [row])
        sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
