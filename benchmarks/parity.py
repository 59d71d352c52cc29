"""Largest differences of loss, gradients and metrics between TRL's trainers and ours, for every option, on a CPU.

    python benchmarks/parity.py --commit $(git rev-parse --short HEAD) --output benchmarks/results/parity.csv

The cases are those of tests/training/options.py, in fp32 unless the case says otherwise, on the tests' random model of
two layers. A row is one option's value and one implementation of the head; a difference is relative to the largest
value that TRL gives (for a gradient, of the same tensor). A table by objective is printed at the end.
"""

import argparse
import csv
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

# The script runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when a kernel's module is imported

import trl
from trl import GRPOTrainer, RLOOTrainer

from tests.training.options import GRPO_CASES, RLOO_CASES, TRITON_CASES, Case
from tests.training.parity import differences, ours, outcome

IMPLEMENTATIONS = (("torch", 5), ("reference", 1), ("triton", 16))


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    commit: str
    date: str
    torch: str
    trl: str
    trainer: str
    objective: str
    case: str
    implementation: str
    loss_difference: float
    gradient_difference: float
    metric_difference: float


def objective(cls: type, case: Case) -> str:
    """What a case belongs to in the table: RLOO, or a loss type and level of GRPO."""
    if cls is RLOOTrainer:
        return "rloo"
    loss_type = case.settings.get("loss_type", "dapo")
    return loss_type + (", sequence" if case.settings.get("importance_sampling_level") == "sequence" else "")


def cases_of(implementation: str) -> list[tuple[type, Case]]:
    """All cases; for Triton, whose interpreter is slow, one of each objective and the tests' own."""
    every = [(GRPOTrainer, case) for case in GRPO_CASES] + [(RLOOTrainer, case) for case in RLOO_CASES]
    if implementation != "triton":
        return every
    first = {objective(cls, case): (cls, case) for cls, case in reversed(every) if not case.run}
    return [*first.values(), *((GRPOTrainer, case) for case in TRITON_CASES)]


def measure(commit: str) -> list[Row]:
    """Every case through TRL once and through each implementation."""
    rows = []
    theirs = {}
    with tempfile.TemporaryDirectory() as folder:
        for implementation, chunk_size in IMPLEMENTATIONS:
            for number, (cls, case) in enumerate(cases_of(implementation)):
                place = Path(folder) / f"{implementation}-{number}"
                key = cls, case.name, case.run
                if key not in theirs:
                    theirs[key] = outcome(cls, case, place)
                found = outcome(ours(cls), case, place, implementation=implementation, chunk_size=chunk_size)
                apart = differences(found, theirs[key])
                rows.append(
                    Row(
                        commit=commit,
                        date=datetime.now(UTC).date().isoformat(),
                        torch=torch.__version__,
                        trl=trl.__version__,
                        trainer=cls.__name__,
                        objective=objective(cls, case),
                        case=case.name + (" (run)" if case.run else ""),
                        implementation=implementation,
                        loss_difference=float(f"{apart.loss:.2g}"),
                        gradient_difference=float(f"{apart.gradient:.2g}"),
                        metric_difference=float(f"{apart.metric:.2g}"),
                    )
                )
    return rows


def table(rows: list[Row]) -> str:
    """The largest differences of loss and gradient by objective and implementation, in Markdown; bf16 cases apart."""
    worst: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        name = "in bf16" if "bf16=True" in row.case or "fp32=True" in row.case else row.objective
        loss, gradient = worst[name].get(row.implementation, (0.0, 0.0))
        worst[name][row.implementation] = max(loss, row.loss_difference), max(gradient, row.gradient_difference)
    names = [name for name, _ in IMPLEMENTATIONS]
    lines = ["| objective | " + " | ".join(f"{name}: loss, gradient" for name in names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for objective_name, found in worst.items():
        cells = ("{:.0e}, {:.0e}".format(*found[name]) if name in found else "not tried" for name in names)
        lines.append(f"| {objective_name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the CSV anew and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="of the code that is measured")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/parity.csv"))
    arguments = parser.parse_args()
    # TRL and transformers say what is experimental or renamed; the guards say what the cases do on purpose.
    warnings.simplefilter("ignore")
    rows = measure(arguments.commit)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(table(rows))


if __name__ == "__main__":
    main()
