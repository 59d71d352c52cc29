"""One GRPO run: its thread, its folder, its controls."""

import contextvars
import gc
import logging
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from transformers import set_seed

from grpo_lab.monitoring import History, MemoryMeter, Tracker, asked_mode, open_tracker
from grpo_lab.training.answers import generate_answers
from grpo_lab.training.build import build_trainer, torch_device, without_renaming_warnings
from grpo_lab.training.config import RunConfig
from grpo_lab.training.errors import RunConfigError, RunFailedError
from grpo_lab.training.guards import cautions
from grpo_lab.training.head_arguments import check_chunk_size
from grpo_lab.training.record import RunRecord, latest_checkpoint, new_folder, package_versions, unwritable
from grpo_lab.training.steering import Steering, SteeringCallback

logger = logging.getLogger(__name__)

FINAL_STATUSES = ("finished", "stopped", "failed")
_FLAT_REWARD_STEPS = 10


class Run:
    """A GRPO run from its settings to its record.

    Making a run loads model and data and makes its folder, so whatever is wrong with the settings shows here. `start`
    trains in a thread of its own or in the caller's; `pause`, `resume`, `stop` and `chunk_size` act at the next step
    boundary and may be called from any thread. Everything learnt is in `folder`: `run.json`, `metrics.jsonl`,
    `completions.jsonl`, `checkpoints/`, and at the end `adapter/`.

    Args:
        config: the settings.
        rewards: where given, reward functions in TRL's form, used in place of `config.rewards`, each with weight 1.

    Attributes:
        config: the settings, frozen.
        folder: where the run is written.
        history: rows and completions so far.
        status: `"new"`, `"running"`, `"paused"`, `"finished"`, `"stopped"` or `"failed"`.
        step: optimizer steps done.
        error: what stopped a failed run, else `None`.
        notices: warnings raised by what was seen, one sentence each.
        implementation: the head's implementation in use.
        memory_label: what the memory figures measure.
        tracker_description: one line on the Weights & Biases run.

    Raises:
        RunConfigError: settings, model, data or folder cannot be used; the message says what to do.
    """

    _active: ClassVar["Run | None"] = None
    _active_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: RunConfig, *, rewards: list[Callable[..., list[float]]] | None = None) -> None:
        self._set_up(config, rewards, folder=None)

    def _set_up(self, config: RunConfig, rewards: list[Callable[..., list[float]]] | None, folder: Path | None) -> None:
        self.config = config
        self.status = "new"
        self.step = 0
        self.error: BaseException | None = None
        self.notices: list[str] = list(cautions(config, config.gradient_accumulation_steps))
        self.tracker_description = "Weights & Biases: opened when the run starts"
        self._tracker: Tracker | None = None
        self._subscribers: list[Callable[[], None]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._rollouts_recorded = 0
        self._steering = Steering(config.chunk_size)
        try:
            asked_mode(config.wandb_mode)
        except ValueError as error:
            raise RunConfigError(str(error)) from None
        meter = MemoryMeter(torch_device(config))
        self.memory_label = meter.label
        # The model and data come first: a run that cannot begin leaves no folder behind.
        try:
            self._trainer, self.tokenizer = build_trainer(config, meter, rewards)
        except OSError as error:
            # TRL's trainer makes the folder too.
            if error.filename is None or Path(error.filename).resolve() != Path(config.output_dir).resolve():
                raise
            raise RunConfigError(unwritable(Path(config.output_dir), error)) from None
        self.implementation = self._trainer.implementation
        resumed = folder is not None
        self.folder = folder or new_folder(config.output_dir, config.label)
        self._trainer.args.output_dir = str(self.folder / "checkpoints")
        self._record = RunRecord.load(self.folder) if resumed else RunRecord(self.folder)
        self.history = History.load(self.folder) if resumed else History(self.folder)
        self._checkpoint: Path | None = None
        if resumed:
            self._go_back_to_checkpoint()
        self._write_record(status="new")

    def _go_back_to_checkpoint(self) -> None:
        step, self._checkpoint = latest_checkpoint(self.folder) or (0, None)
        self.history.truncate_after(step)
        self.step = step
        if self.history.rows:
            self._steering.chunk_size = int(self.history.rows[-1]["loss/chunk_size"])

    @classmethod
    def continue_from(
        cls,
        folder: str | Path,
        *,
        steps: int | None = None,
        rewards: list[Callable[..., list[float]]] | None = None,
    ) -> "Run":
        """A run that goes on from the last whole checkpoint in `folder`, with the settings found there.

        Rows after that checkpoint are moved to `metrics.superseded.jsonl` and measured again.

        Args:
            folder: a run's folder.
            steps: total optimizer steps, where more (or fewer) than before are wanted.
            rewards: as for `Run`; needed again where they were given.

        Returns:
            The run, not started.

        Raises:
            RunConfigError: `folder` is not a run's folder, the run has taken all its steps, or its settings cannot be
                used any more.
        """
        folder = Path(folder).resolve()
        settings = RunRecord.load(folder).fields.get("config", {})
        config = RunConfig.from_dict(settings | ({} if steps is None else {"steps": steps}))
        done, _ = latest_checkpoint(folder) or (0, None)
        if done >= config.steps:
            raise RunConfigError(
                f"the run in {folder} has taken {done} of {config.steps} steps; to go on, set steps above {done}."
            )
        run = cls.__new__(cls)
        run._set_up(config, rewards, folder)
        return run

    # What a live view reads

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.steps

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits exist at one time; an assigned value holds from the next optimizer step."""
        return self._steering.chunk_size

    @chunk_size.setter
    def chunk_size(self, value: int) -> None:
        try:
            self._steering.chunk_size = check_chunk_size(value)
        except ValueError as error:
            raise RunConfigError(str(error)) from None

    @property
    def chunk_size_limits(self) -> tuple[int, int]:
        """Smallest chunk size, and the tokens of a micro-batch, above which a larger one changes nothing."""
        tokens = self.config.completions_per_step * self.config.max_completion_length
        return 1, max(1, tokens // self.config.gradient_accumulation_steps)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` on the training thread after each step and change of status.

        Returns:
            A function that ends the subscription.
        """
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def _notify(self) -> None:
        for callback in tuple(self._subscribers):
            try:
                callback()
            except Exception:
                logger.exception("A subscriber of the run raised and is dropped; training goes on.")
                self._subscribers.remove(callback)

    # Controls

    def start(self, background: bool = True) -> "Run":
        """Train until the last step, a stop, or an error.

        Args:
            background: in a thread of its own, returning at once; else in the caller's thread, returning at the end.
                There an interrupt stops at the next step boundary, and a second one at once.

        Returns:
            The run.

        Raises:
            RuntimeError: this run was started before, or another one is going on.
            RunFailedError: in the caller's thread, training failed.
        """
        self._claim()
        try:
            self._open_tracker()
        except BaseException:
            self.status = "new"
            self._release()
            raise
        if background:
            # Copying the context keeps what the worker shows in the cell that started it.
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._work,), name="grpo-run", daemon=True)
            self._thread.start()
            return self
        with self._interrupt_stops():
            self._work()
        self._raise_failure()
        return self

    def pause(self) -> None:
        """Wait at the next step boundary until `resume` or `stop`."""
        self._steering.running.clear()

    def resume(self) -> None:
        """End a pause."""
        self._steering.running.set()

    def stop(self) -> None:
        """End at the next step boundary, with a checkpoint to go on from."""
        self._steering.stop.set()

    def wait(self) -> str:
        """Block until the run has ended; an interrupt stops it cleanly instead of raising.

        Returns:
            The final status.

        Raises:
            RunFailedError: training failed.
        """
        if self.status == "new":
            return self.status
        ended = False
        while not ended:
            try:
                # A join would mark the thread as dead when it is interrupted on Python 3.11 and 3.12.
                while not ended:
                    ended = self._done.wait(0.1)
            except KeyboardInterrupt:
                self.stop()
        self._raise_failure()
        return self.status

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise RunFailedError(
                f"step {self.step + 1} failed: {type(self.error).__name__}: {self.error}\n"
                f"The whole traceback is in {self.folder / 'error.txt'}."
            ) from self.error

    @contextmanager
    def _interrupt_stops(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def stop_first(_signal: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, previous)
            self.stop()

        signal.signal(signal.SIGINT, stop_first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # The training thread

    def _claim(self) -> None:
        with Run._active_lock:
            if Run._active is not None and Run._active is not self:
                raise RuntimeError(
                    f"A run is going on in {Run._active.folder}. Call stop() and wait() on it, then start this one."
                )
            if self.status != "new":
                raise RuntimeError(
                    f"This run is {self.status}. Make a new Run, or go on with Run.continue_from(run.folder)."
                )
            Run._active = self
            self.status = "running"

    def _release(self) -> None:
        with Run._active_lock:
            if Run._active is self:
                Run._active = None

    def _open_tracker(self) -> None:
        self._tracker = open_tracker(
            self.config.wandb_mode,
            project=self.config.wandb_project,
            name=self.folder.name,
            config=self.config.to_dict() | {"versions": package_versions(), "head": self.implementation},
            folder=self.folder,
            tags=(self.config.model, self.config.task),
        )
        self.tracker_description = self._tracker.description

    def _work(self) -> None:
        try:
            if torch_device(self.config).type == "cuda":
                torch.cuda.set_device(torch_device(self.config))
            self._write_record(status="running")
            self._notify()
            self._train()
            self.status = "finished" if self.step >= self.config.steps else "stopped"
        except KeyboardInterrupt:
            self.status = "stopped"
            self.notices.append(f"interrupted inside step {self.step + 1}; its work is lost, earlier steps are kept")
        except Exception as error:  # noqa: BLE001 - any failure ends in the record and is raised by wait()
            self.status, self.error = "failed", error
            self._write_error(error)
        finally:
            self._wind_up()

    def _train(self) -> None:
        trainer = self._trainer
        if self._checkpoint is None:
            set_seed(self.config.seed)
        seconds_before = self.history.rows[-1]["time_s"] if self.history.rows else 0.0
        callback = SteeringCallback(
            self._steering, trainer, self._on_row, self._on_pause, time.monotonic() - seconds_before
        )
        trainer.add_callback(callback)
        before = _fingerprint(trainer.model)
        try:
            with without_renaming_warnings():
                trainer.train(resume_from_checkpoint=str(self._checkpoint) if self._checkpoint else None)
        finally:
            trainer.remove_callback(callback)
        if self.step and _fingerprint(trainer.model) == before:
            self._notice(f"no trainable tensor changed in {self.step} steps: every group may have had equal rewards")
        trainer.save_model(str(self.folder / "adapter"))

    def _on_row(self, row: dict[str, Any]) -> None:
        self.step = row["step"]
        self.history.append(row)
        if self._trainer.rollouts > self._rollouts_recorded:
            self._rollouts_recorded = self._trainer.rollouts
            self.history.add_completions(self.step, self._completions())
        if self._tracker is not None:
            self._tracker.log(row)
            if self.step % self.config.save_every == 0 or self.step in (1, self.config.steps):
                self._tracker.log_completions(self.step, self.history.latest_completions)
        self._look_for_trouble(row)
        self._notify()

    def _on_pause(self, begins: bool) -> None:
        self.status = "paused" if begins else "running"
        self._notify()

    def _completions(self) -> list[dict[str, Any]]:
        weights = dict(zip(self._trainer.reward_func_names, self._trainer.reward_weights.tolist(), strict=True))
        rows = []
        for scored in self._trainer.scored_completions():
            values = {name: scored[name] for name in weights if scored.get(name) is not None}
            rows.append(
                {
                    "prompt": _text(scored["prompt"]),
                    "completion": _text(scored["completion"]),
                    "reward": sum(weights[name] * value for name, value in values.items() if not math.isnan(value)),
                    "advantage": scored["advantage"],
                    "reason": scored.get("reason") or scored.get("lenient_reason", ""),
                }
            )
        return rows

    def _look_for_trouble(self, row: dict[str, Any]) -> None:
        if row.get("completions/clipped_ratio") == 1.0:
            self._notice(
                f"step {self.step}: every completion reached max_completion_length "
                f"({self.config.max_completion_length}) without ending its turn; raise it, or check the chat template"
            )
        if self.step == _FLAT_REWARD_STEPS:
            rows = self.history.rows
            for name in self._trainer.reward_func_names:
                values = {row.get(f"rewards/{name}/mean") for row in rows} - {None}
                if len(values) == 1:
                    self._notice(
                        f"{name} was {values.pop():g} on each of the first {self.step} steps: it teaches nothing"
                    )

    def _notice(self, text: str) -> None:
        kind = text.split(":", 1)[-1]
        if all(kind != known.split(":", 1)[-1] for known in self.notices):
            self.notices.append(text)
            logger.warning(text)

    # The end

    def _write_error(self, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        logger.debug(text)
        # The frames hold tensors of the failed step; their memory goes back now.
        traceback.clear_frames(error.__traceback__)
        try:
            (self.folder / "error.txt").write_text(text, encoding="utf-8")
        except OSError as disk_error:
            self.notices.append(unwritable(self.folder, disk_error))

    def _wind_up(self) -> None:
        for last_duty in (self._end_tracker, self._end_record, self._free_memory):
            try:
                last_duty()
            except Exception as error:  # noqa: BLE001 - each last duty gets its turn
                self.notices.append(f"at the end: {type(error).__name__}: {error}")
                self.error = self.error or error
                self.status = "failed"
        self._release()
        self._notify()
        self._done.set()

    def _end_tracker(self) -> None:
        if self._tracker is not None:
            self._tracker.finish(exit_code=1 if self.status == "failed" else 0)

    def _end_record(self) -> None:
        self._write_record(status=self.status)

    def _free_memory(self) -> None:
        self._trainer.optimizer = None
        self._trainer.lr_scheduler = None
        self._trainer.accelerator.free_memory()
        self._trainer.model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write_record(self, *, status: str) -> None:
        self._record.update(
            config=self.config.to_dict(),
            versions=package_versions(),
            device=_device_name(torch_device(self.config)),
            implementation=self.implementation,
            memory_label=self.memory_label,
            status=status,
            step=self.step,
            summary=self.summary(),
            notices=self.notices,
            error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )

    def summary(self) -> dict[str, float]:
        """Steps, first and last reward (means of up to 10 steps), seconds and highest peak memory so far.

        Returns:
            What was measured, by name; what was not is absent.
        """
        return self.history.summary()

    # The model's answers

    def generate(self, questions: list[str], *, adapter: bool = True, greedy: bool = True, seed: int = 0) -> list[str]:
        """Answers of the model to `questions`, before or after training.

        Args:
            questions: one user message each.
            adapter: with the LoRA adapter on; off gives the model that the run began with.
            greedy: the likeliest token each time, else sampled at the run's temperature.
            seed: of the sampling; the run's own random state is left as it is.

        Returns:
            One answer a question, without special tokens.

        Raises:
            RuntimeError: the run is going on.
        """
        if self.status in ("running", "paused"):
            raise RuntimeError("generate() waits for the training thread to end: call wait() or stop() first.")
        return generate_answers(
            self._trainer.accelerator.unwrap_model(self._trainer.model),
            self.tokenizer,
            questions,
            adapter=adapter,
            max_new_tokens=self.config.max_completion_length,
            temperature=None if greedy else self.config.temperature,
            seed=seed,
        )


def _text(message: str | list[dict[str, Any]]) -> str:
    return message if isinstance(message, str) else "\n".join(str(part["content"]) for part in message)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _fingerprint(model: torch.nn.Module) -> list[float]:
    return [float(p.detach().double().abs().sum()) for p in model.parameters() if p.requires_grad]
