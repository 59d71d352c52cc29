"""One reader of numbers, for gold answers and for what a model wrote.

It matches text and does arithmetic on what it matched: nothing is evaluated, and time grows linearly with the
text. So it needs no time limit, and it reads alike in every thread.
"""

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

# A statement of one number is short; what is longer is something else.
_MAX_PHRASE_CHARACTERS = 200
_MAX_NUMBER_CHARACTERS = 64

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# Runs are maximal and never split again (possessive `*+`): 8.124,12.852 is one malformed run.
_NUMBER = re.compile(
    r"""
    (?: (?<![0-9A-Za-z)\-]) (?P<minus> -) (?: [$€£¥₹] \s? )? )?
    (?P<run>
        (?: (?<![\w.^]) \. )?                             # .5, but not the full stop of "is...5"
        (?<! [0-9A-Za-z_^√] ) (?<! [0-9][.,] )            # not the digit of m2, x_1 or 2^10
        (?<! [A-Za-z][({] )                               # nor the argument of sqrt(16)
        [0-9] [0-9.,]*+
    )
    (?: \s? / \s? (?P<denominator> [0-9] [0-9.,]*+ ) )?
    (?P<unfinished> \s? / \s? [0-9] | \^ | [eE] [+-]? [0-9] | [²³¼½¾] )?
    (?: \s? (?P<scale> hundred | thousand | million | billion | trillion ) \b )?
    """,
    re.VERBOSE,
)
_WELL_FORMED = re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+|[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
_BOXED = re.compile(r"\\boxed\s?\{([^{}]*)\}")


def plain(text: str) -> str:
    r"""`text` with the LaTeX around numbers undone, and a true minus sign made a hyphen.

    Args:
        text: may hold `\frac{a}{b}`, `\text{...}`, `\$`, `\%`, `{,}` and thin spaces.

    Returns:
        The same in plain characters; `\boxed{...}` stays.

    >>> plain(r"\boxed{\$70{,}000\text{ a year}}")
    '\\boxed{$70,000 a year}'
    """
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"\\([$%])", r"\1", text)
    text = re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\[,;:! ]", " ", text)


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` of `text` holds, in plain characters.

    Args:
        text: of any length.

    Returns:
        The content; `None` where there is no box.

    >>> boxed(r"so \boxed{3} or rather \boxed{\frac{3}{4}}")
    '3/4'
    """
    boxes = _BOXED.findall(plain(text))
    return boxes[-1] if boxes else None


def read_number(phrase: str) -> Fraction | None:
    r"""The one number that `phrase` states.

    Currency signs, units (`%` is one), bold marks, a closing period and `\boxed{}` are passed over. Commas
    count as thousands separators only in well-formed groups. `3/4` is a number; a quotient that comes out
    whole, such as `36/2`, is a division left undone and states none, and so is a power, root or exponent.

    Args:
        phrase: up to 200 characters, the text after `####`, say.

    Returns:
        The exact value; `None` where `phrase` states no number, several, or a malformed one.

    >>> [str(read_number(phrase)) for phrase in ("$70,000.", "**29.00 dollars**", "-3/4")]
    ['70000', '29', '-3/4']
    >>> [read_number(phrase) for phrase in ("8.124,12.852", "9 * 2", "36/2", "2^10", "sqrt(16)")]
    [None, None, None, None, None]
    """
    if len(phrase) > _MAX_PHRASE_CHARACTERS:
        return None
    numbers = list(_numbers(_BOXED.sub(r"\1", plain(phrase))))
    return numbers[0] if len(numbers) == 1 else None


def first_number(text: str) -> Fraction | None:
    """The first number in `text`.

    Args:
        text: of any length.

    Returns:
        The exact value; `None` where there is no number, or the first is malformed.

    >>> first_number("18, because 9 * 2 = 18")
    Fraction(18, 1)
    """
    return next(_numbers(plain(text)), None)


def last_number(text: str) -> Fraction | None:
    """The last number in `text`.

    Args:
        text: of any length.

    Returns:
        The exact value; `None` where there is no number, or the last is malformed.

    >>> last_number("9 eggs at $2 are <<9*2=18>>18 dollars a day.")
    Fraction(18, 1)
    """
    numbers = deque(_numbers(plain(text)), maxlen=1)
    return numbers[0] if numbers else None


def number_text(number: Fraction) -> str:
    """`number` as people write it.

    Args:
        number: any fraction.

    Returns:
        All digits of a whole number, six of another.

    >>> number_text(Fraction(70000)), number_text(Fraction(1, 4))
    ('70000', '0.25')
    """
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.6g}"


def _numbers(text: str) -> Iterator[Fraction | None]:
    for match in _NUMBER.finditer(text):
        yield _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    value = _decimal(match["run"])
    if value is None or match["unfinished"]:
        return None
    if match["denominator"]:
        denominator = _decimal(match["denominator"])
        if not denominator or value.denominator != 1 or denominator.denominator != 1:
            return None
        value /= denominator
        if value.denominator == 1:
            return None
    value *= _SCALES[match["scale"]] if match["scale"] else 1
    return -value if match["minus"] else value


def _decimal(run: str) -> Fraction | None:
    digits = run.rstrip(".,")
    if len(digits) > _MAX_NUMBER_CHARACTERS or not _WELL_FORMED.fullmatch(digits):
        return None
    return Fraction(digits.replace(",", ""))
