"""Time, memory and error of the LM head's implementations on one CUDA GPU, one CSV row a case.

    python benchmarks/head.py

A row is the median of five passes over N tokens: `head` says whether the pass is the forward alone, or
forward and backward of a clipped GRPO loss with the head frozen or trainable. `extra_mib` is the peak above
the inputs (rows of commit f112c4b leave out one N x H buffer, but for `forward`); `floor_ms` is what the
matrix products that cannot be avoided take on this card, each timed alone in bf16. Errors are against fp64
on the first 256 tokens. `trl` is there where TRL can be imported.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# The script runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.commit import described_commit
from grpo_lab import kernels, objectives

TOKENS, REFERENCE_TOKENS, REPEATS = 16_384, 256, 5
SHAPES = ((1024, 151_936), (2048, 151_936), (4096, 128_256))
HEADS = ("forward", "frozen", "trainable")
VOCABULARY_TILES = (4096, 8192)
MIB = 2**20

Score = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the CSV; times are medians in ms, memory is in MiB, errors have no unit."""

    commit: str
    date: str
    device: str
    torch: str
    triton: str
    implementation: str
    head: str
    N: int
    H: int
    V: int
    dtype: str
    chunk_size: int
    zero_fraction: float
    time_ms: float
    extra_mib: float
    logp_mean_abs_error: float
    grad_rel_error: float | None
    floor_ms: float


def _chunked(
    implementation: str,
    chunk_size: int,
    vocabulary_tile: int | None,
    hidden_states: Tensor,
    weight: Tensor,
    ids: Tensor,
) -> Tensor:
    logps, _ = kernels.per_token_logps(
        hidden_states,
        weight,
        ids,
        temperature=1.0,
        chunk_size=chunk_size,
        implementation=implementation,
        vocabulary_tile=vocabulary_tile,
    )
    return logps


def _plain(hidden_states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return functional.linear(hidden_states, weight).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _trl(chunk_size: int, hidden_states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden_states, weight, None, ids, 1.0, chunk_size, None, 1.0, ("entropy",))[0]


def implementations(head: str) -> list[tuple[str, int, Score]]:
    """Name, chunk size (tokens; for `trl` columns of the vocabulary; 0 for none) and function of each."""
    found: list[tuple[str, int, Score]] = [
        (name, size, partial(_chunked, name, size, None))
        for name, size in (("triton", 512), ("triton", 1024), ("torch", 512))
    ]
    if head != "trainable":
        found += [
            (f"triton, tiles of {tile}", 2048, partial(_chunked, "triton", 2048, tile)) for tile in VOCABULARY_TILES
        ]
    found.append(("plain logits", 0, _plain))
    if find_spec("trl") is not None:
        found.append(("trl", 32_768, partial(_trl, 32_768)))
    return found


def grpo_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """Mean clipped surrogate at epsilon 0.2."""
    ratio = (logps - old_logps).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def median_ms(work: Callable[[], object]) -> float:
    """Median over `REPEATS` runs between CUDA events, after two warm-ups."""
    times = []
    for repeat in range(REPEATS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


@dataclass(frozen=True)
class Problem:
    """Inputs of one shape and head, with the fp64 answers on its first tokens."""

    hidden_states: Tensor
    weight: Tensor
    ids: Tensor
    old_logps: Tensor
    advantages: Tensor
    logps: Tensor
    grad: Tensor

    @classmethod
    def random(cls, hidden: int, vocabulary: int) -> "Problem":
        """Logits of standard deviation 2, old log-probs a little off, advantages of both signs."""
        torch.manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        hidden_states, weight = normal(TOKENS, hidden), normal(vocabulary, hidden) * (2 / hidden**0.5)
        ids = torch.randint(vocabulary, (TOKENS,), device="cuda")
        advantages = normal(TOKENS).float()
        with torch.no_grad():
            old_logps = _chunked("torch", 512, hidden_states, weight, ids) + 0.1 * normal(TOKENS).float()
        few = hidden_states[:REFERENCE_TOKENS].double().requires_grad_()
        logps, _ = objectives.per_token_logps(few, weight.double(), ids[:REFERENCE_TOKENS], temperature=1.0)
        loss = grpo_loss(logps, old_logps[:REFERENCE_TOKENS], advantages[:REFERENCE_TOKENS])
        (grad,) = torch.autograd.grad(loss * REFERENCE_TOKENS / TOKENS, few)
        return cls(hidden_states, weight, ids, old_logps, advantages, logps.detach(), grad)

    def run(self, score: Score, head: str) -> tuple[Tensor, Tensor | None]:
        """One pass: log-probs, and the hidden states' gradient unless it is the forward alone."""
        hidden_states = self.hidden_states.detach().requires_grad_(head != "forward")
        weight = self.weight.detach().requires_grad_(head == "trainable")
        logps = score(hidden_states, weight, self.ids)
        if head == "forward":
            return logps, None
        grpo_loss(logps, self.old_logps, self.advantages).backward()
        return logps.detach(), hidden_states.grad


def product_times_ms(problem: Problem) -> tuple[float, float, float]:
    """Times of H W^T, P W and P^T H in bf16."""
    h, w = problem.hidden_states, problem.weight
    p = torch.randn(TOKENS, w.size(0), device="cuda", dtype=torch.bfloat16)
    return median_ms(lambda: torch.mm(h, w.T, out=p)), median_ms(lambda: p @ w), median_ms(lambda: p.T @ h)


def measure(problem: Problem, score: Score, head: str) -> dict[str, float | None]:
    """Time, memory and errors of one case."""
    logps, grad = problem.run(score, head)
    error = (logps[:REFERENCE_TOKENS] - problem.logps).abs().mean().item()
    grad_error = None
    if grad is not None:
        grad_error = ((grad[:REFERENCE_TOKENS] - problem.grad).norm() / problem.grad.norm()).item()
    del logps, grad
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.run(score, head)
    extra = torch.cuda.max_memory_allocated() - before
    return {
        "time_ms": round(median_ms(lambda: problem.run(score, head)), 2),
        "extra_mib": round(extra / MIB, 1),
        "logp_mean_abs_error": float(f"{error:.3g}"),
        "grad_rel_error": None if grad_error is None else float(f"{grad_error:.3g}"),
    }


def main() -> None:
    """Measure every shape, head and implementation; append to the CSV and print each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=described_commit(), help="of the code, if not the checkout's")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/head.csv"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or find_spec("triton") is None:
        sys.exit("benchmarks/head.py needs a CUDA GPU and the package triton (pip install '.[triton]').")
    names = list(Row.__dataclass_fields__)
    is_new = not arguments.output.exists()
    with arguments.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, names)
        if is_new:
            writer.writeheader()
        for hidden, vocabulary in SHAPES:
            problem = Problem.random(hidden, vocabulary)
            products = product_times_ms(problem)
            for count, head in enumerate(HEADS, start=1):
                for name, chunk_size, score in implementations(head):
                    row = Row(
                        commit=arguments.commit,
                        date=datetime.now(UTC).date().isoformat(),
                        device=torch.cuda.get_device_name(),
                        torch=torch.__version__,
                        triton=version("triton"),
                        implementation=name,
                        head=head,
                        N=TOKENS,
                        H=hidden,
                        V=vocabulary,
                        dtype="bfloat16",
                        chunk_size=chunk_size,
                        zero_fraction=0.0,
                        floor_ms=round(sum(products[:count]), 2),
                        **measure(problem, score, head),
                    )
                    writer.writerow(asdict(row))
                    file.flush()
                    print(
                        f"{hidden:5} {head:9} {name:20} {chunk_size:5} {row.time_ms:8.2f} ms",
                        f"{row.extra_mib:9.1f} MiB, floor {row.floor_ms:6.2f} ms,",
                        f"errors {row.logp_mean_abs_error} and {row.grad_rel_error}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
