"""What happens at each step boundary: the step is written down, then pause, stop and a new chunk size are obeyed."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_lab.training.trainer import ChunkedGRPOTrainer

MIB = 2**20
_BOOKKEEPING = ("epoch", "total_flos", "train_runtime", "train_loss")


class Steering:
    """Requests from any thread, read by the training thread at step boundaries.

    Args:
        chunk_size: tokens; the value of the first step.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.stop = threading.Event()
        self.running = threading.Event()
        self.running.set()


def step_row(
    logs: dict[str, Any], step: int, seconds: float, step_s: float, trainer: ChunkedGRPOTrainer
) -> dict[str, Any]:
    """One row of `metrics.jsonl`: TRL's metrics under TRL's names, and what was measured around the step.

    Args:
        logs: what the trainer logs for the step.
        step: optimizer step, from 1.
        seconds: since the run began.
        step_s: seconds of this step, sampling included.
        trainer: its readings since the last step are taken.

    Returns:
        The row; a metric that was not computed is absent.
    """
    readings = trainer.take_readings()
    row: dict[str, Any] = {"step": step, "time_s": round(seconds, 4)}
    row |= {name: value for name, value in logs.items() if name not in _BOOKKEEPING and _is_number(value)}
    row["loss/chunk_size"] = trainer.chunk_size
    row["time/step_s"] = step_s
    row["time/loss_s"] = readings.loss_s
    row["time/generation_s"] = readings.generation_s
    row["time/head_ms"] = readings.head_s * 1e3
    if readings.peak_bytes is not None:
        row["memory/peak_mib"] = readings.peak_bytes / MIB
    if readings.head_extra_bytes is not None:
        row["memory/head_extra_mib"] = readings.head_extra_bytes / MIB
    return row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class SteeringCallback(TrainerCallback):
    """Writes each optimizer step down and obeys the steering.

    Args:
        steering: pause, stop and chunk size.
        trainer: whose readings and chunk size it handles.
        on_row: called with each row, on the training thread, before a pause takes hold.
        on_pause: called with `True` when a pause begins and `False` when it ends.
        started: `time.monotonic()` of the run's beginning.
    """

    def __init__(
        self,
        steering: Steering,
        trainer: ChunkedGRPOTrainer,
        on_row: Callable[[dict[str, Any]], None],
        on_pause: Callable[[bool], None],
        started: float,
    ) -> None:
        self.steering, self.trainer, self.started = steering, trainer, started
        self.on_row, self.on_pause = on_row, on_pause
        self.step_started = started

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Take over the chunk size asked for, and start the step's clock."""
        self.trainer.chunk_size = self.steering.chunk_size
        self.step_started = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        """Write the step's row, then wait while paused, then stop if asked to.

        Returns:
            The trainer's control, told to stop where that was asked for.

        Raises:
            FloatingPointError: the step's gradients were not finite, so neither are the weights any more.
        """
        if logs is None or "loss" not in logs:
            return control
        now = time.monotonic()
        grad_norm = logs.get("grad_norm", 0.0)
        self.on_row(step_row(logs, state.global_step, now - self.started, now - self.step_started, self.trainer))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradients of step {state.global_step} were not finite (grad_norm {grad_norm}), so the weights "
                "are lost. Go on from the last checkpoint with Run.continue_from(folder), or begin again with "
                "dtype='float32' or a smaller learning_rate."
            )
        if not self.steering.running.is_set() and not self.steering.stop.is_set():
            self.on_pause(True)
            while not self.steering.running.wait(0.05) and not self.steering.stop.is_set():
                pass
            self.on_pause(False)
        if self.steering.stop.is_set():
            control.should_training_stop = control.should_save = True
        return control
