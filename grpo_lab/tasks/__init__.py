"""Tasks: where prompts and gold answers come from, and what a completion earns.

The rewards load without `datasets`; a task's data loads when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_lab.tasks.gsm8k import HUB_ID, load_gsm8k
from grpo_lab.tasks.rewards import (
    Score,
    correctness_reward,
    format_reward,
    lenient_correctness_reward,
    overlong_reward,
    score_correctness,
    score_format,
    score_tags,
    tags_reward,
)

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "Score",
    "correctness_reward",
    "format_reward",
    "lenient_correctness_reward",
    "load_gsm8k",
    "load_task",
    "overlong_reward",
    "score_correctness",
    "score_format",
    "score_tags",
    "tags_reward",
]


def load_task(task: str, *, split: str = "train", size: int | None = None, seed: int = 0) -> Dataset:
    """The rows of a task, ready for TRL.

    Args:
        task: `"problems"` (generated word problems), `"gsm8k"` (from the Hub), or what `load_gsm8k` takes.
        split: `"train"` or `"test"`.
        size: rows to return; all of a data set, and the generator's default, where it is `None`.
        seed: of the generator, or of the choice of `size` rows from a data set.

    Returns:
        Columns `prompt`, `question`, `answer` and `solution`, see `load_gsm8k`.

    Raises:
        ValueError: no such task, file or split, a broken row, or `size` < 1 or more than there is.
        RuntimeError: the Hub cannot be reached.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be a number of rows >= 1, or None for all; got {size}.")
    if task == "problems":
        from grpo_lab.tasks.problems import problems_dataset

        return problems_dataset(split=split, size=size, seed=seed)
    dataset = load_gsm8k(HUB_ID if task == "gsm8k" else task, split)
    if size is None:
        return dataset
    if size > len(dataset):
        raise ValueError(f"size is {size}, but the {split} split of {task} has {len(dataset)} rows.")
    return dataset.shuffle(seed=seed).select(range(size))
