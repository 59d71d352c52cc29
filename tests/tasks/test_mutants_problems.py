"""Mistakes in the generator that the second reading of its questions, or the rules of its splits, see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from grpo_lab.tasks import problems
from tests.mutants.harness import assert_caught
from tests.tasks import test_problems as checks

answer = checks.test_the_answer_is_that_of_the_question
lines = checks.test_every_line_of_a_solution_holds_one_true_calculation
one_split = checks.test_a_question_belongs_to_one_split_whatever_the_seed
stories = partial(checks.test_all_stories_and_lengths_are_there, "train")

MUTANTS: list[tuple[str, str, Callable[[], object]]] = [
    ('f"{x}-{y}", x - y', 'f"{x}+{y}", x + y', answer),
    ("{off} people get off and {on} get on", "{on} people get off and {off} get on", answer),
    ("and half as many the day after", "and twice as many the day after", answer),
    ("gets ${gift} as a gift and spends ${spent}", "gets ${spent} as a gift and spends ${gift}", answer),
    ('f"{wage}*{a + b}"', 'f"{wage}*{a}"', lines),
    ('f"{k * packs}/{k}", packs', 'f"{k * packs}/{k}", k * packs', lines),
    ("<<{self.expression}={value}>>{value}", "<<{self.expression}={self.result}>>{value}",
     checks.test_a_wrong_result_can_be_put_into_a_line),
    ("y = r.randint(2, x - 2)", "y = r.randint(2, x)", checks.test_numbers_are_small_and_whole),
    ("if problem.split == split:", "if True:", one_split),
    ("zlib.crc32(self.question.encode())", "zlib.crc32(repr(self).encode())", one_split),
    ('random.Random(f"{split}-{seed}")', 'random.Random(f"{split}")',
     checks.test_the_same_seed_gives_the_same_problems_and_another_gives_others),
    ('random.Random(f"{split}-{seed}")', "random.Random()",
     checks.test_the_same_seed_gives_the_same_problems_and_another_gives_others),
    ("    _baking,\n", "", stories),
    ('"answer": str(problem.answer)', '"answer": str(problem.steps[0].result)',
     checks.test_rows_are_the_problems_of_split_and_seed),
    ("range(DEFAULT_SIZE if size is None else size)", "range(size or 7)",
     checks.test_without_a_size_the_data_set_has_its_default),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS, ids=range(len(MUTANTS)))
def test_each_mutant_is_caught(old: str, new: str, check: Callable[[], object], tmp_path: Path):
    assert_caught(problems, old, new, check, tmp_path)
