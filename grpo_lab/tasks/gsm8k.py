"""Grade School Math 8K and any data of its form: from the Hub, or from JSON Lines on disk.

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168; `openai/gsm8k`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.tasks.numbers import read_number
from grpo_lab.tasks.rewards import answer_lines

if TYPE_CHECKING:
    from datasets import Dataset

HUB_ID = "openai/gsm8k"

_COLUMNS = ("question", "answer")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SHOWN_CHARACTERS = 60


def load_gsm8k(path_or_id: str | Path = HUB_ID, split: str = "train") -> Dataset:
    """The questions, solutions and gold numbers of one split, ready for TRL.

    Args:
        path_or_id: a data set on the Hub (its config is `main`); a folder that holds `<split>.jsonl`; or one
            JSON Lines file, which is taken whole whatever the split. Each row has a `question` and an
            `answer`, a solution whose last line is `#### number`.
        split: `"train"` or `"test"`.

    Returns:
        Columns `prompt` (one user message with the question), `question`, `answer` (the gold number as text)
        and `solution` (the whole gold text).

    Raises:
        ValueError: there is no such file, or a row is broken; the message names file, line and what is wrong.
        RuntimeError: the Hub cannot be reached or has no such data set.
    """
    from datasets import Dataset

    path = Path(path_or_id)
    if path.suffix in {".jsonl", ".json"} or path.exists() or not _HUB_ID.fullmatch(str(path_or_id)):
        return Dataset.from_list(_read_jsonl(_split_file(path, split)))
    rows = []
    for number, row in enumerate(_read_hub(str(path_or_id), split), start=1):
        try:
            rows.append(_checked_row(row))
        except ValueError as error:
            raise ValueError(f"{path_or_id}, {split} split, row {number}: {error}") from None
    return Dataset.from_list(rows)


def task_row(question: str, solution: str) -> dict[str, Any]:
    """One row of a task from a question and its solution in gsm8k's form.

    Args:
        question: the user's message.
        solution: gold text whose last line is `#### number`, or the number alone.

    Returns:
        Values of `prompt`, `question`, `answer` and `solution`.

    Raises:
        ValueError: the solution gives no gold number that can be read.
    """
    lines = answer_lines(solution)
    gold = (lines[-1] if lines else solution).strip()
    if read_number(gold) is None:
        end = solution.strip()[-_SHOWN_CHARACTERS:]
        raise ValueError(f"the answer must end with a line '#### number'; it ends with {end!r}.")
    return {
        "prompt": [{"role": "user", "content": question}],
        "question": question,
        "answer": gold,
        "solution": solution,
    }


def _split_file(path: Path, split: str) -> Path:
    file = path / f"{split}.jsonl" if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        found = ", ".join(sorted(entry.name for entry in path.glob("*.jsonl"))) or "no .jsonl file"
        raise ValueError(f"the folder {path} has no {split}.jsonl (it holds {found}).")
    raise ValueError(
        f"no data at {path}. Give a .jsonl file, a folder with {split}.jsonl, "
        f"or a data set on the Hub such as {HUB_ID}."
    )


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    rows = []
    # Split on the line feed alone: JSON strings may hold other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(_read_row(line))
            except ValueError as error:
                start = line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."
                raise ValueError(f"{file}, line {number}: {error} The row begins: {start}") from None
    if not rows:
        raise ValueError(f"{file} is empty. Each line must be a JSON object with a question and an answer.")
    return rows


def _read_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1}).") from None
    return _checked_row(row)


def _checked_row(row: Any) -> dict[str, Any]:
    columns = list(row) if isinstance(row, dict) else []
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"no column {' and '.join(missing)}; it has {', '.join(columns) or 'none'}.")
    for name in _COLUMNS:
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name} must be a text that is not empty; got {row[name]!r:.60}.")
    return task_row(row["question"], row["answer"])


def _read_hub(name: str, split: str) -> Dataset:
    from datasets import load_dataset

    try:
        return load_dataset(name, "main", split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(
            f"cannot load {name!r} from the Hub: {reason.rstrip('.')}. "
            f"If the Hub is out of reach, give the path of a local copy: a folder with {split}.jsonl."
        ) from error
