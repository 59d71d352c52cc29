"""How far GRPO teaches the shipped model at the tutorial's settings: one CSV row a seed.

    python benchmarks/tutorial_reward.py

A row holds the mean strict reward of the first and of the last ten steps, and the seconds of the whole training.
The settings are the defaults of `RunConfig`; the tutorial's differ in the chunk size alone, which changes no reward.
The last line says whether each seed rose by 0.20 or more within 300 s; the exit code says the same.
"""

import argparse
import csv
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

# The script runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.commit import described_commit
from grpo_lab import Run, RunConfig

LEAST_RISE = 0.20
MOST_SECONDS = 300


@dataclass(frozen=True)
class Row:
    """One line of the CSV; rewards are means over ten steps, from 0 to 1.

    Where `cpu_seconds` is well below `seconds` times the threads, other programs had the cores, and `seconds` says
    little.
    """

    commit: str
    date: str
    device: str
    model: str
    seed: int
    steps: int
    first10: float
    last10: float
    seconds: float
    cpu_seconds: float
    command: str

    @property
    def holds(self) -> bool:
        """Whether the reward rose as far, and as soon, as the tutorial promises."""
        return self.last10 - self.first10 >= LEAST_RISE and self.seconds <= MOST_SECONDS


def device_name() -> str:
    """The GPU, or the number of threads on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def measure(seed: int, commit: str) -> Row:
    """Train once, in a folder that does not stay."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(RunConfig(seed=seed, output_dir=folder, wandb_mode="disabled"))
        started = time.process_time()
        run.start(background=False)
        cpu_seconds = time.process_time() - started
        summary = run.summary()
    return Row(
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        device=device_name(),
        model=run.config.model,
        seed=seed,
        steps=int(summary["steps"]),
        first10=round(summary["reward_first"], 4),
        last10=round(summary["reward_last"], 4),
        seconds=round(summary["seconds"], 1),
        cpu_seconds=round(cpu_seconds, 1),
        command=f"python benchmarks/tutorial_reward.py --seeds {seed}",
    )


def main() -> int:
    """Train once for each seed; append to the CSV and print each row.

    Returns:
        0 if every seed rose far enough in time, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of the code that is measured, if not the checkout's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tutorial_reward.csv"))
    arguments = parser.parse_args()
    commit = arguments.commit or described_commit()
    is_new = not arguments.output.exists()
    rows = []
    with arguments.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        if is_new:
            writer.writeheader()
        for seed in arguments.seeds:
            rows.append(measure(seed, commit))
            writer.writerow(asdict(rows[-1]))
            file.flush()
            print(
                f"seed {seed}: {rows[-1].first10:.3f} -> {rows[-1].last10:.3f} in {rows[-1].steps} steps, "
                f"{rows[-1].seconds:.0f} s",
                flush=True,
            )
    passed = all(row.holds for row in rows)
    print(f"rise >= {LEAST_RISE} within {MOST_SECONDS} s for each seed: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
