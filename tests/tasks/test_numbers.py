"""One reader for gold and completion: what states a number, what does not, and how long it may take."""

import inspect
import threading
import time
from fractions import Fraction
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.tasks import numbers
from grpo_lab.tasks.numbers import first_number, last_number, number_text, read_number

# Case R01 and its kind: every way to write a number that people and models use.
STATED = {
    "18": 18,
    " 18 ": 18,
    "18.": 18,
    "18.00": 18,
    "18,": 18,
    "$29.00.": 29,
    "the total cost is $29.00.": 29,
    "70,000": 70_000,
    "$70,000": 70_000,
    "70000.": 70_000,
    "**70,000 dollars**": 70_000,
    "1,234,567.50": Fraction("1234567.5"),
    "0.5": Fraction(1, 2),
    "0.50": Fraction(1, 2),
    ".5": Fraction(1, 2),
    "-5": -5,
    "−5": -5,
    "-$5": -5,
    "$-5": -5,
    "+5": 5,
    "x = 5": 5,
    "x=-5": -5,
    "€ 12 per night": 12,
    "18 m2": 18,
    "18 m^2": 18,
    "60 km/h": 60,
    "$18/hour": 18,
    "50%": 50,
    "3/4": Fraction(3, 4),
    "-3/4 cup": Fraction(-3, 4),
    "6 / 8": Fraction(3, 4),
    "5 million": 5_000_000,
    "1.5 thousand dollars": 1500,
    "18 (eighteen)": 18,
    r"\boxed{18}": 18,
    r"$\boxed{\$70{,}000\text{ a year}}$": 70_000,
    r"\(\frac{3}{4}\)": Fraction(3, 4),
    r"50\%": 50,
    "答案是18": 18,
    "007": 7,
}

NOT_STATED = [
    "",
    "none",
    "eighteen",
    "8.124,12.852",  # a list is not fused
    "12,34",
    "1,2,3",
    "1,000,00",
    "0,500",
    "1.000,00",
    "1.2.3",
    "70 000",
    "3 eggs and 4 hens",
    "9 * 2",
    "9 * 2 = 18",
    "36/2",  # a division left undone
    "18/1",
    "3/4/2020",
    "3/0",
    "1.5/2",
    "2^10",
    "2**10",
    "5²",
    "1½",
    "1e6",
    "1e-3",
    "sqrt(16)",
    r"\sqrt{16}",
    "√16",
    "18 #### 20",
    "3:30",
    "5-6",
    "m2",
]


def check_reader(module: ModuleType) -> None:
    """Everything above, and the two readers of free text."""
    for phrase, value in STATED.items():
        assert module.read_number(phrase) == value, phrase
    for phrase in NOT_STATED:
        assert module.read_number(phrase) is None, phrase
    assert module.read_number("9" * 64) == int("9" * 64)
    assert module.read_number("9" * 65) is None
    assert module.read_number("18" + " " * 199) is None
    assert module.first_number("is...5, and 7") == 5
    assert module.first_number("no 3,4 but 7") is None
    assert module.last_number("9 * 2 = <<9*2=18>>18 eggs") == 18
    assert module.last_number("from 18 to 8.124,12.852") is None
    assert module.last_number("10-5") == 5
    assert module.last_number("none") is None
    assert module.boxed(r"\boxed{3} then \boxed{\frac{3}{4}}") == "3/4"
    assert module.boxed("3") is None


def test_the_reader() -> None:
    check_reader(numbers)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return -value if", "return value if"),
        ('.replace(",", "")', '.replace(",", ".")'),
        ('.rstrip(".,")', '.rstrip(",")'),
        ("(,[0-9]{3})+", "(,[0-9]{2,3})+"),
        ("[1-9][0-9]{0,2}(,", "[0-9]+(,"),
        ("[0-9] [0-9.,]*+\n    )\n    (?: \\s? /", "[0-9]+ (?: [.,] [0-9]+ )?\n    )\n    (?: \\s? /"),
        ("len(numbers) == 1", "numbers"),
        ("numbers[0] if numbers else None\n\n\ndef number_text", "None\n\n\ndef number_text"),
        ("if value.denominator == 1:\n            return None", "if False:\n            return None"),
        ("not denominator or value", "value"),
        ("value.denominator != 1 or denominator.denominator != 1", "False"),
        ("value /= denominator", "value *= denominator"),
        ('or match["unfinished"]', ""),
        (r"| \^ |", "|"),
        ("[eE] [+-]? [0-9] |", ""),
        (r"| [²³¼½¾]", ""),
        (r"(?: \s? / \s? (?P<denominator> [0-9] [0-9.,]*+ ) )?", r"(?P<denominator> (?!) )?"),
        (r"(?<! [A-Za-z][({] )", ""),
        ("0-9A-Za-z_^√", "0-9A-Za-z_^"),
        ("0-9A-Za-z_^√", "0-9_^√"),
        (r"(?<![0-9A-Za-z)\-])", ""),
        ('"million": 10**6', '"million": 10**3'),
        ('.replace("\\N{MINUS SIGN}", "-")', ""),
        ('.replace("{,}", ",")', ""),
        ('r"\\1/\\2"', 'r"\\2/\\1"'),
        ("len(phrase) > _MAX_PHRASE_CHARACTERS", "False"),
        ("_MAX_NUMBER_CHARACTERS = 64", "_MAX_NUMBER_CHARACTERS = 65"),
        ("return boxes[-1]", "return boxes[0]"),
        ("maxlen=1", "maxlen=None"),
        (r"(?<![\w.^]) \.", r"\."),
    ],
)
def test_each_mutant_of_the_reader_is_caught(old: str, new: str) -> None:
    source = inspect.getsource(numbers)
    assert source.count(old) == 1, "the mutant no longer applies"
    mutant = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
        check_reader(mutant)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12), max_value=10**12))
def test_a_number_reads_the_same_however_it_is_written(value) -> None:
    exact = Fraction(value)
    for text in (f"{value}", f"{value:,}", f"{value:.4f}", f"${value:,}.", f"**{value} dollars**"):
        assert read_number(text) == exact, text
        assert last_number(f"It was 3, then {text}") == exact


@given(st.text(alphabet="0123456789.,-+*/^$%(){}\\ eE#=", max_size=300))
def test_no_text_raises(text: str) -> None:
    read_number(text)
    first_number(text)
    last_number(text)


HOSTILE = {
    "malformed expression": "((1+2)*3-4/5.6,7)" * 600,
    "power tower": "9**" * 5000 + "9",
    "power tower, caret": "9^" * 5000 + "9",
    "digits": "9" * 100_000,
    "groups": "1," * 50_000,
    "slashes": "1/" * 50_000,
    "signs": "-" * 100_000,
    "currency": "$ " * 50_000,
    "spaces": " " * 100_000 + "x",
    "boxes": r"\boxed{" * 10_000,
    "fractions": r"\frac{1}" * 10_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_returns_at_once(text: str) -> None:
    started = time.process_time()
    assert read_number(text) is None
    first_number(text)
    last_number(text)
    assert time.process_time() - started < 1.0


def test_a_thread_reads_as_the_main_thread_does() -> None:
    phrases = [*STATED, *NOT_STATED]
    found: list[Fraction | None] = []
    worker = threading.Thread(target=lambda: found.extend(map(read_number, phrases)))
    worker.start()
    worker.join(10)
    assert found == list(map(read_number, phrases))


def test_numbers_are_shown_as_people_write_them() -> None:
    shown = [number_text(Fraction(text)) for text in ("18", "-5", "1234567", "0.25", "1/3", "1234567.5")]
    assert shown == ["18", "-5", "1234567", "0.25", "0.333333", "1.23457e+06"]
