"""A run without a model: rows that look like a real one's, at a pace of one's choosing."""

import math
import random
import threading
from collections.abc import Callable
from pathlib import Path

from grpo_lab.monitoring import History

QUESTION = "Tom has 3 apples & buys <b>4</b> more, then gives 2 to Ann. How many apples does Tom have now, in all?"


class FakeRun:
    """The public surface of a run that the widgets use.

    Args:
        total_steps: rows until it is finished.
        gap_s: seconds between two rows.
        fails_at: the step that raises, if any.
        seed: of the numbers.
    """

    folder = Path("runs/20260101-120000-tiny-problems")
    memory_label = "CPU tensor allocations, peak"
    implementation = "torch"
    tracker_description = "Weights & Biases: offline; wandb sync runs/wandb/offline-run"
    chunk_size_limits = (1, 8192)

    def __init__(self, total_steps: int = 100, gap_s: float = 0.0, fails_at: int | None = None, seed: int = 0) -> None:
        self.status = "new"
        self.step = 0
        self.total_steps = total_steps
        self.chunk_size = 2048
        self.error: BaseException | None = None
        self.notices: list[str] = []
        self.history = History()
        self.calls: list[str] = []
        self.subscribers: list[Callable[[], None]] = []
        self._gap_s = gap_s
        self._fails_at = fails_at
        self._random = random.Random(seed)
        self._running = threading.Event()
        self._running.set()
        self._stop = threading.Event()
        self._done = threading.Event()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.subscribers.append(callback)
        return lambda: self.subscribers.remove(callback)

    def pause(self) -> None:
        self.calls.append("pause")
        self._running.clear()

    def resume(self) -> None:
        self.calls.append("resume")
        self._running.set()

    def stop(self) -> None:
        self.calls.append("stop")
        self._stop.set()
        self._running.set()

    def start(self, background: bool = True) -> None:
        self.status = "running"
        if background:
            threading.Thread(target=self._work, name="fake-run", daemon=True).start()
        else:
            self._work()

    def wait(self) -> str:
        if self.status != "new":
            assert self._done.wait(60), "the fake run did not end"
        if self.error is not None:
            raise RuntimeError(f"step {self.step + 1} failed: {self.error}") from self.error
        return self.status

    def _work(self) -> None:
        while self.step < self.total_steps and not self._stop.wait(self._gap_s):
            self._running.wait()
            if self.step + 1 == self._fails_at:
                self.error = ValueError("no <memory> left & none to come")
                break
            self.add_step()
        ended = "finished" if self.step == self.total_steps else "stopped"
        self.status = "failed" if self.error else ended
        self._notify()
        self._done.set()

    def add_step(self) -> None:
        """One row and its completions, and a word to the subscribers."""
        self.step += 1
        self.history.append(self._row())
        self.history.add_completions(self.step, [self._completion(n) for n in range(8)])
        self._notify()

    def _notify(self) -> None:
        for callback in tuple(self.subscribers):
            callback()

    def _row(self) -> dict[str, float]:
        learnt = 1 - math.exp(-3 * self.step / self.total_steps)
        reward = min(1.0, max(0.0, 0.4 + 0.45 * learnt + self._random.gauss(0, 0.05)))
        head = self.chunk_size * 2048 * 4 / 2**20
        return {
            "step": self.step,
            "time_s": 0.7 * self.step,
            "loss": self._random.gauss(0, 0.01),
            "reward": reward,
            "reward_std": math.sqrt(reward * (1 - reward)),
            "frac_reward_zero_std": min(1.0, learnt * 0.6 + 0.05 * self._random.random()),
            "loss/chunk_size": self.chunk_size,
            "memory/peak_mib": 140 + max(0.0, head - 10) + self._random.random(),
            "memory/head_extra_mib": head + 0.5,
            "time/step_s": 0.7 + 0.1 * self._random.random(),
            "time/loss_s": 0.25 + 0.05 * self._random.random(),
        }

    def _completion(self, number: int) -> dict[str, object]:
        right = number % 3 == 0
        return {
            "prompt": QUESTION,
            "completion": f"3 + 4 = <<3+4=7>>7\n7 - 2 = <<7-2=5>>5\n#### {5 if right else 6 + number}",
            "reward": float(right),
            "advantage": 1.2 if right else -0.7,
            "reason": "right" if right else f"{6 + number} instead of 5",
        }
