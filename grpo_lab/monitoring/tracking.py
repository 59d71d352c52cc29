"""A mirror of the run in Weights & Biases, which never asks, never hangs and never ends the run.

The record of a run is its folder. W&B gets a copy: online where the machine is logged in, else in files that
`wandb sync` uploads later, and nothing where the package is not installed.
"""

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, Self, cast

Mode = Literal["online", "offline", "disabled"]

_MODES = ("online", "offline", "disabled")
_OLD_NAMES = {"run": "online", "dryrun": "offline"}  # WANDB_MODE of older days
_INIT_TIMEOUT_S = 20
_FINISH_TIMEOUT_S = 60
_MAX_TAG_CHARACTERS = 64

logger = logging.getLogger(__name__)


class Tracker:
    """One W&B run, which is this run's alone: `wandb.run` stays what it is.

    Rows are handed to a thread of the tracker, so that no step waits for wandb or for its server. As a
    context manager the tracker finishes at the end, as failed after an error.

    Args:
        run: of wandb; `None` makes every method do nothing.
        mode: what became of the mode asked for.
        description: one line for the reader.
    """

    def __init__(self, run: Any, mode: Mode, description: str) -> None:
        self._run = run
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb-sender")
        self._faults = 0
        self.mode = mode
        self.description = description

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics under `train/<name>`, with its `step` as `train/global_step`.

        Args:
            row: `step` and metrics by name; what is not a number stays in the run folder only.
        """
        metrics = {f"train/{name}": value for name, value in row.items() if isinstance(value, int | float)}
        metrics["train/global_step"] = metrics.pop("train/step")
        self._send(lambda run: run.log(metrics))

    def log_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log completions as the table `train/completions`.

        Args:
            step: optimizer step.
            rows: one a completion: prompt, completion, reward, advantage, reason.
        """
        records = [{"step": step, **row} for row in rows]

        def send_table(run: Any) -> None:
            import wandb

            columns = list(dict.fromkeys(name for record in records for name in record))
            data = [[record.get(name) for name in columns] for record in records]
            table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
            run.log({"train/global_step": step, "train/completions": table})

        self._send(send_table)

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left and close the run; a second call does nothing.

        Args:
            exit_code: 0, or 1 for a run that failed.
        """
        self._send(lambda run: run.finish(exit_code=exit_code))
        self._run = None
        self._sender.shutdown()

    def _send(self, action: Callable[[Any], None]) -> None:
        if self._run is not None:
            self._sender.submit(self._attempt, self._run, action)

    def _attempt(self, run: Any, action: Callable[[Any], None]) -> None:
        try:
            action(run)
        except Exception as error:  # noqa: BLE001 - no fault of the mirror may end the run
            if self._faults == 0:
                logger.warning("Weights & Biases missed something (%s); the run folder has it.", error)
            self._faults += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=0 if kind is None else 1)


def open_tracker(
    mode: Mode | None,
    *,
    project: str,
    name: str,
    config: dict[str, Any],
    folder: Path,
    tags: Iterable[str] = (),
    group: str | None = None,
) -> Tracker:
    """Begin a W&B run in `folder/wandb`.

    The mode is `mode`, else `WANDB_MODE`, else online if this machine is logged in, else offline. Online
    needs an API key that is there already and a server that answers; else the run is offline and says why.
    For an offline run `WANDB_ERROR_REPORTING` is set to false where it is not set, so that nothing is sent.

    Args:
        mode: `None` to decide as above.
        project: of W&B.
        name: shown for the run.
        config: settings, stored with the run.
        folder: the run's folder, which exists.
        tags: cut to the 64 characters that W&B takes.
        group: of W&B, for runs that belong together.

    Returns:
        The tracker. One that cannot record says so in its description, and does nothing.

    Raises:
        ValueError: `mode`, or `WANDB_MODE` in its place, is not a mode.
    """
    asked = asked_mode(mode)
    if asked == "disabled":
        return Tracker(None, "disabled", "Weights & Biases: off")
    try:
        import wandb
    except ImportError:
        return Tracker(None, "disabled", "Weights & Biases: not installed; to have it: pip install wandb")
    begin = partial(
        wandb.init,
        project=project,
        name=name,
        config=config,
        dir=str(folder),
        tags=[tag[:_MAX_TAG_CHARACTERS] for tag in tags if tag],
        group=group,
        job_type="train",
        reinit="create_new",
        settings=wandb.Settings(
            init_timeout=_INIT_TIMEOUT_S, finish_timeout=_FINISH_TIMEOUT_S, console="off", silent=True
        ),
    )
    reason = "as asked" if asked == "offline" else _login_problem(wandb)
    if reason is None:
        try:
            run = _with_step_axis(begin(mode="online"))
        except Exception as error:  # noqa: BLE001 - whatever keeps us from the server, there is offline
            reason = _first_line(error)
        else:
            return Tracker(run, "online", f"Weights & Biases: {run.url}")
    # wandb 0.31 sends its own timings at exit, from offline runs too, and waits for a network in vain.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        run = _with_step_axis(begin(mode="offline"))
    except Exception as error:  # noqa: BLE001 - no fault of the mirror may end the run
        return Tracker(None, "disabled", f"Weights & Biases: not recording ({_first_line(error)})")
    files = shlex.quote(str(Path(run.dir).parent))
    return Tracker(run, "offline", f"Weights & Biases: offline ({reason}); to upload: wandb sync {files}")


def asked_mode(mode: Mode | None) -> Mode | None:
    """The mode that is asked for: `mode`, else `WANDB_MODE`, else `None`.

    Args:
        mode: the caller's, or `None`.

    Returns:
        A mode or `None`.

    Raises:
        ValueError: it is no mode; the message says where it came from.
    """
    asked = mode or _mode_of_environment()
    if asked not in {None, *_MODES}:
        source = "mode" if mode else "WANDB_MODE"
        raise ValueError(f"{source} must be one of {', '.join(_MODES)}; got {asked!r}.")
    return asked


def _mode_of_environment() -> Mode | None:
    name = os.environ.get("WANDB_MODE") or None
    return cast("Mode | None", _OLD_NAMES.get(name, name) if name else None)


def _login_problem(wandb: ModuleType) -> str | None:
    """Why this machine cannot go online, found without asking the user; `None` where it can."""
    if wandb.run is not None:  # login() would refuse: the session is the other run's
        return "as another W&B run of this process" if wandb.run.offline else None
    mode_before = wandb.setup().settings.mode
    # In a session that WANDB_MODE has made offline, login() does not look for a key.
    wandb.setup(wandb.Settings(mode="online"))
    try:
        return None if wandb.login(prompt=False) else "no API key; to store one: wandb login"
    except (wandb.Error, OSError) as error:
        return _first_line(error)
    finally:
        wandb.setup(wandb.Settings(mode=mode_before))


def _with_step_axis(run: Any) -> Any:
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step")
    return run


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
