"""Mistakes in the recipe of the shipped model that its tests in miniature see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from grpo_lab.models import load_model, make_tiny
from tests.models import test_make_tiny as checks
from tests.mutants.harness import assert_caught

corpus = checks.test_the_corpus_is_the_one_that_the_shipped_model_was_trained_on
habits = checks.test_each_habit_writes_what_its_name_says


def with_tokenizer(check: Callable[..., object]) -> None:
    check(checks.train_tokenizer(checks.Small()))


def scored(*, greedy: bool) -> None:
    """Right answers are counted as such, and as sampled only where they are."""
    model, tokenizer = load_model("tiny", device="cpu")
    right = checks.accuracy(model, tokenizer, count=32, greedy=greedy, batch_size=20)
    assert right == 1 if greedy else 0.1 < right < 0.8


digits = partial(with_tokenizer, checks.test_digits_stand_alone_in_every_tokenizer_it_makes)
taught = partial(with_tokenizer, checks.test_a_batch_teaches_completions_after_prompts_as_the_chat_template_writes_them)
learns = partial(with_tokenizer, checks.test_training_lowers_the_loss_on_conversations_it_has_not_seen)

MUTANTS: list[tuple[str, str, Callable[[], object]]] = [
    ("_careful: 0.38", "_careful: 0.42", corpus),
    ("_careful: 0.38", "_careful: 0.55", checks.test_habits_come_in_their_shares),
    ("_no_marker: 0.15", "_no_marker: 0.25", checks.test_habits_come_in_their_shares),
    ("in generate_problems(seed, split):\n        habit", 'in generate_problems(seed, "test"):\n        habit', corpus),
    ("return _guess(problem, r)", "return _careful(problem, r)", habits),
    ("#### {done[-1].result}", "#### {problem.answer}", habits),
    ("last.line(wrong)", "last.line()", habits),
    ("The answer is {problem.answer}.", "#### {problem.answer}", habits),
    ("return _guess(problem, r)", "return _careful(problem, r)",
     checks.test_the_habit_cannot_be_told_from_the_question),
    (r'Split(Regex(r"\d"), "isolated")', r'Split(Regex(r"\d+"), "isolated")', digits),
    ("vocab_size=recipe.vocabulary", "vocab_size=4096", digits),
    ('f"{a}{END}" for', "a for", taught),
    ('f"{USER}{q}{END}{ASSISTANT}" for', 'f"{q}{ASSISTANT}" for', taught),
    ("labels[row, start:stop] =", "labels[row, :stop] = ids[row, :stop]; labels[row, start:stop] =", taught),
    ("lr=recipe.learning_rate", "lr=1e-9", learns),
    ("max_new_tokens=96", "max_new_tokens=9", partial(scored, greedy=True)),
    ("do_sample=not greedy", "do_sample=True", partial(scored, greedy=True)),
    ("do_sample=not greedy", "do_sample=False", partial(scored, greedy=False)),
    ("return right / count", "return right / batch_size", partial(scored, greedy=True)),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS, ids=range(len(MUTANTS)))
def test_each_mutant_is_caught(old: str, new: str, check: Callable[[], object], tmp_path: Path):
    assert_caught(make_tiny, old, new, check, tmp_path)
