"""Word problems made on the spot, in gsm8k's format: a story, a solution with calculator marks, and `#### answer`.

The numbers are small and the stories few, so that a model of two million parameters can learn to solve them; what
they train is the same as on gsm8k. A problem belongs to the test split by a checksum of its question, so no question
stands in both splits, whatever the seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "test")
DEFAULT_SIZE = 4096
_TEST_SHARE = 8

_NAMES = (
    "Ada Amir Ana Ben Bo Cara Chen Dana Dev Eli Emma Eva Farah Finn Gita Gus Hana Hugo Ida Ines Ivan Jada Jin Jonas "
    "Kai Kira Lara Leo Lina Luca Maya Mei Milo Nadia Nico Nora Omar Oscar Pia Priya Quinn Ravi Rosa Ruth Sami Sara "
    "Sven Tara Theo Tom Uma Vera Wes Yara Yuki Zoe"
).split()
_THINGS = (
    "apples balls beads books bottles buttons candles cards coins cookies cups eggs erasers flags flowers hats keys "
    "lemons marbles mugs nuts oranges pears pencils pens plums postcards rings rocks ropes shells shirts spoons "
    "stamps stickers tickets toys"
).split()
_CONTAINERS = "bags baskets boxes crates jars packs trays".split()
_PLACES = "bakery cinema farm garden library market museum park school station zoo".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


@dataclass(frozen=True)
class Step:
    """One line of a solution.

    Attributes:
        text: the sentence, with `{}` where the calculation stands.
        expression: what is calculated, such as `3+4`.
        result: its value.
    """

    text: str
    expression: str
    result: int

    def line(self, result: int | None = None) -> str:
        """The sentence with its calculator mark, for the true result or another one."""
        value = self.result if result is None else result
        return self.text.format(f"{self.expression}=<<{self.expression}={value}>>{value}")


@dataclass(frozen=True)
class Problem:
    """A question and its solution, step by step; the answer is the last step's result."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The gold number."""
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """The steps, a line each, and the answer in gsm8k's form."""
        return "\n".join([*(step.line() for step in self.steps), f"#### {self.answer}"])

    @property
    def split(self) -> str:
        """`"test"` for one question in eight, `"train"` for the others."""
        return "test" if zlib.crc32(self.question.encode()) % _TEST_SHARE == 0 else "train"


def _more(r: random.Random) -> Problem:
    name, things, x, y = r.choice(_NAMES), r.choice(_THINGS), r.randint(3, 60), r.randint(2, 39)
    verb = r.choice(("buys", "finds", "makes", "gets"))
    return Problem(
        f"{name} has {x} {things} and {verb} {y} more. How many {things} does {name} have now?",
        (Step(f"{name} has {{}} {things}.", f"{x}+{y}", x + y),),
    )


def _fewer(r: random.Random) -> Problem:
    (name, other), things = r.sample(_NAMES, 2), r.choice(_THINGS)
    x = r.randint(10, 90)
    y = r.randint(2, x - 2)
    verb = r.choice(("gives", "sells", "lends"))
    return Problem(
        f"{name} has {x} {things} and {verb} {y} of them to {other}. How many {things} are left?",
        (Step(f"There are {{}} {things} left.", f"{x}-{y}", x - y),),
    )


def _containers(r: random.Random) -> Problem:
    name, things, box = r.choice(_NAMES), r.choice(_THINGS), r.choice(_CONTAINERS)
    n, k = r.randint(2, 9), r.randint(3, 9)
    gone = r.randint(2, n * k - 1)
    return Problem(
        f"{name} fills {n} {box} with {k} {things} each and then uses {gone} {things}. How many {things} are left?",
        (
            Step(f"The {box} hold {{}} {things}.", f"{n}*{k}", n * k),
            Step(f"Then {{}} {things} are left.", f"{n * k}-{gone}", n * k - gone),
        ),
    )


def _change(r: random.Random) -> Problem:
    name, things = r.choice(_NAMES), r.choice(_THINGS)
    n, price = r.randint(2, 9), r.randint(2, 9)
    paid = r.choice([note for note in (20, 50, 100) if note > n * price])
    return Problem(
        f"At the {r.choice(_PLACES)} {things} cost ${price} each. {name} takes {n} and pays with ${paid}. "
        f"How many dollars of change does {name} get?",
        (
            Step(f"The {things} cost ${{}}.", f"{n}*{price}", n * price),
            Step("The change is ${}.", f"{paid}-{n * price}", paid - n * price),
        ),
    )


def _share(r: random.Random) -> Problem:
    (name, other), things = r.sample(_NAMES, 2), r.choice(_THINGS)
    k, each = r.randint(2, 9), r.randint(2, 9)
    x = r.randint(1, k * each - 1)
    return Problem(
        f"{name} has {x} {things} and {other} has {k * each - x}. They share them equally among {k} friends. "
        f"How many {things} does each friend get?",
        (
            Step(f"Together they have {{}} {things}.", f"{x}+{k * each - x}", k * each),
            Step(f"Each friend gets {{}} {things}.", f"{k * each}/{k}", each),
        ),
    )


def _times(r: random.Random) -> Problem:
    (name, other), things, x = r.sample(_NAMES, 2), r.choice(_THINGS), r.randint(2, 24)
    word, factor = r.choice((("twice", 2), ("three times", 3), ("four times", 4)))
    return Problem(
        f"{name} has {x} {things}. {other} has {word} as many. How many {things} do they have together?",
        (
            Step(f"{other} has {{}} {things}.", f"{factor}*{x}", factor * x),
            Step(f"Together they have {{}} {things}.", f"{x}+{factor * x}", x + factor * x),
        ),
    )


def _pages(r: random.Random) -> Problem:
    name, pages, days, rest = r.choice(_NAMES), r.randint(3, 9), r.randint(2, 9), r.randint(2, 30)
    return Problem(
        f"{name} reads {pages} pages a day for {days} days and {rest} pages on {r.choice(_DAYS)}. "
        f"How many pages does {name} read?",
        (
            Step("In those days it is {} pages.", f"{pages}*{days}", pages * days),
            Step("In all it is {} pages.", f"{pages * days}+{rest}", pages * days + rest),
        ),
    )


def _wages(r: random.Random) -> Problem:
    name, (first, second) = r.choice(_NAMES), r.sample(_DAYS, 2)
    wage, a, b = r.randint(4, 12), r.randint(1, 5), r.randint(1, 4)
    return Problem(
        f"{name} earns ${wage} an hour at the {r.choice(_PLACES)}, working {a} hours on {first} and {b} hours on "
        f"{second}. How many dollars does {name} earn?",
        (
            Step(f"{name} works {{}} hours.", f"{a}+{b}", a + b),
            Step(f"{name} earns ${{}}.", f"{wage}*{a + b}", wage * (a + b)),
        ),
    )


def _half(r: random.Random) -> Problem:
    name, things, half = r.choice(_NAMES), r.choice(_THINGS), r.randint(2, 40)
    return Problem(
        f"{name} collects {2 * half} {things} on {r.choice(_DAYS)} and half as many the day after. "
        f"How many {things} does {name} collect?",
        (
            Step(f"The day after it is {{}} {things}.", f"{2 * half}/2", half),
            Step(f"In all it is {{}} {things}.", f"{2 * half}+{half}", 3 * half),
        ),
    )


def _bus(r: random.Random) -> Problem:
    start = r.randint(12, 60)
    off = r.randint(2, start - 2)
    on = r.randint(2, 30)
    return Problem(
        f"A bus leaves the {r.choice(_PLACES)} with {start} people. Then {off} people get off and {on} get on. "
        "How many people are on the bus?",
        (
            Step("After that {} people are on it.", f"{start}-{off}", start - off),
            Step("In the end it is {} people.", f"{start - off}+{on}", start - off + on),
        ),
    )


def _baking(r: random.Random) -> Problem:
    name, box = r.choice(_NAMES), r.choice(_CONTAINERS)
    k, packs = r.randint(2, 6), r.randint(2, 8)
    n, per = r.randint(2, 9), r.randint(3, 9)
    while n * per <= k * packs:
        n, per = r.randint(2, 9), r.randint(3, 9)
    eaten = n * per - k * packs
    return Problem(
        f"{name} bakes {n} rows of {per} cookies, eats {eaten} and packs the others into {box} of {k}. "
        f"How many {box} does {name} fill?",
        (
            Step(f"{name} bakes {{}} cookies.", f"{n}*{per}", n * per),
            Step("Then {} cookies are left.", f"{n * per}-{eaten}", k * packs),
            Step(f"They fill {{}} {box}.", f"{k * packs}/{k}", packs),
        ),
    )


def _saving(r: random.Random) -> Problem:
    name, things = r.choice(_NAMES), r.choice(_THINGS)
    weekly, weeks, gift = r.randint(3, 9), r.randint(2, 8), r.randint(2, 20)
    spent = r.randint(2, weekly * weeks + gift - 1)
    return Problem(
        f"{name} saves ${weekly} a week for {weeks} weeks, gets ${gift} as a gift and spends ${spent} on {things}. "
        f"How many dollars does {name} have left?",
        (
            Step(f"{name} saves ${{}}.", f"{weekly}*{weeks}", weekly * weeks),
            Step("With the gift it is ${}.", f"{weekly * weeks}+{gift}", weekly * weeks + gift),
            Step("Then ${} are left.", f"{weekly * weeks + gift}-{spent}", weekly * weeks + gift - spent),
        ),
    )


_STORIES: tuple[Callable[[random.Random], Problem], ...] = (
    _more,
    _fewer,
    _containers,
    _change,
    _share,
    _times,
    _pages,
    _wages,
    _half,
    _bus,
    _baking,
    _saving,
)


def generate_problems(seed: int = 0, split: str = "train") -> Iterator[Problem]:
    """Problems of one split without end; the same seed gives the same ones.

    Args:
        seed: of the sequence.
        split: `"train"` or `"test"`.

    Returns:
        An endless iterator.

    Raises:
        ValueError: no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    return _generate(random.Random(f"{split}-{seed}"), split)


def _generate(r: random.Random, split: str) -> Iterator[Problem]:
    while True:
        problem = r.choice(_STORIES)(r)
        if problem.split == split:
            yield problem


def problems_dataset(split: str = "train", size: int | None = None, seed: int = 0) -> Dataset:
    """Generated problems in the columns of `load_gsm8k`.

    Args:
        split: `"train"` or `"test"`.
        size: rows; 4,096 where it is `None`.
        seed: of the sequence.

    Returns:
        Columns `prompt` (one user message), `question`, `answer` (the gold number as text) and `solution`.

    Raises:
        ValueError: no such split.
    """
    from datasets import Dataset

    problems = generate_problems(seed, split)
    rows = [next(problems) for _ in range(DEFAULT_SIZE if size is None else size)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "question": problem.question,
                "answer": str(problem.answer),
                "solution": problem.solution,
            }
            for problem in rows
        ]
    )
