"""The `grpo-lab` command: train without a notebook, resume, and look at the machine."""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from grpo_lab.training.config import RunConfig
from grpo_lab.training.errors import RunConfigError, RunFailedError


def _reward_weights(text: str) -> dict[str, float]:
    try:
        return {name: float(weight) for name, weight in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected name=weight,name=weight; got {text!r}") from None


def _argument_type(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return _reward_weights if typing.get_origin(annotation) is dict else annotation


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each setting of `RunConfig`; what is not given keeps its default."""
    for entry in dataclasses.fields(RunConfig):
        kind = _argument_type(entry.type)
        default = entry.default if entry.default is not dataclasses.MISSING else "correctness=1"
        parser.add_argument(
            f"--{entry.name.replace('_', '-')}",
            dest=entry.name,
            default=argparse.SUPPRESS,
            help=f"{entry.metadata['help']} (default: {default})",
            **({"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}),
        )


def build_parser() -> argparse.ArgumentParser:
    """The command line of `grpo-lab`."""
    parser = argparse.ArgumentParser(
        prog="grpo-lab", description="Memory-efficient RL fine-tuning, seen at every step."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train from the command line and write a run folder")
    _add_settings(train)
    resume = commands.add_parser("resume", help="go on from the last checkpoint of a run folder")
    resume.add_argument("folder", help="the run folder")
    resume.add_argument("--steps", type=int, default=None, help="total optimizer steps, if not as before")
    commands.add_parser("tutorial", help="open the tutorial in JupyterLab (from a checkout)", add_help=False)
    commands.add_parser("run", help="execute the tutorial without a browser (from a checkout)", add_help=False)
    commands.add_parser("doctor", help="say what this machine has and which implementation will run")
    return parser


def _progress_line(run: Any) -> str:
    row = run.history.rows[-1]
    parts = [f"step {run.step}/{run.total_steps}"]
    for label, name, unit in (
        ("reward", "reward", ""),
        ("step", "time/step_s", " s"),
        ("peak", "memory/peak_mib", " MiB"),
        ("chunk", "loss/chunk_size", " tokens"),
    ):
        if name in row:
            parts.append(
                f"{label} {row[name]:.3g}{unit}" if name != "loss/chunk_size" else f"{label} {row[name]}{unit}"
            )
    return "  ".join(parts)


def _train(run: Any) -> int:
    shown = run.step

    def report() -> None:
        nonlocal shown
        if run.step > shown:
            shown = run.step
            print(_progress_line(run), flush=True)

    print(f"run folder: {run.folder}\nhead: {run.implementation}; memory: {run.memory_label}")
    run.subscribe(report)
    run.start(background=False)
    print(f"\n{run.status} after {run.step} of {run.total_steps} steps")
    for name, value in run.summary().items():
        print(f"  {name:14} {value:.4g}")
    for notice in run.notices:
        print(f"  note: {notice}")
    print(f"  {run.tracker_description}\n  record: {run.folder / 'run.json'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: as in `sys.argv[1:]`, which is the default.

    Returns:
        0; 1 after a run that failed; 2 after settings that cannot be used.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("tutorial", "run"):
        from grpo_lab.launch import main as launch

        return launch(arguments)
    given = vars(build_parser().parse_args(arguments))
    command = given.pop("command")
    if command == "doctor":
        from grpo_lab.doctor import main as doctor

        return doctor()
    try:
        # A wrong setting is told before the seconds that importing torch takes.
        config = RunConfig(**given) if command == "train" else None
        from grpo_lab.training.run import Run

        return _train(Run(config) if config else Run.continue_from(**given))
    except RunConfigError as error:
        print(f"grpo-lab: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"grpo-lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
