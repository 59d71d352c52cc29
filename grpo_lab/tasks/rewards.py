"""Rewards for answers that end in a number: is it right, is it well formed, and why not.

A reward function has TRL's form: it takes completions, as text or as message lists, and the columns of the
data set, and returns one float a completion. It may log through TRL's `log_extra` (a column beside the
completions) and `log_metric` (a number a step).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lab.tasks.numbers import boxed, first_number, last_number, number_text, read_number

# Text, or messages with a role and a content that is text or a list of parts.
Completion = str | Sequence[dict[str, Any]]

_ANSWER_LINE = re.compile(r"[ \t*_>`]*####(?!#)(.*)")
_ANSWER_IS = re.compile(r"\banswer(?: is|:| =)", re.IGNORECASE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGGED = re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)
_END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
_QUOTED_CHARACTERS = 40


@dataclass(frozen=True)
class Score:
    """What a completion is worth, and why.

    Attributes:
        value: 0 or 1.
        reason: one short sentence for a reader.
    """

    value: float
    reason: str


def completion_text(completion: Completion) -> str:
    """The text of a completion without the tokens that end a turn.

    Args:
        completion: text, or messages, whose contents are joined by line breaks.

    Returns:
        The text, stripped.

    >>> completion_text([{"role": "assistant", "content": "#### 4<|im_end|>"}])
    '#### 4'
    """
    if isinstance(completion, str):
        text = completion.strip()
    else:
        text = "\n".join(_content_text(message.get("content")) for message in completion).strip()
    while text.endswith(_END_OF_TURN):
        text = text[: text.rindex("<")].rstrip()
    return text


def _content_text(content: str | Iterable[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def answer_lines(text: str) -> list[str]:
    r"""What follows `####` on each line that begins with it, bold or quotation marks aside.

    Args:
        text: of a completion or a solution.

    Returns:
        One text a line, in order.

    >>> answer_lines("9 * 2 = 18\n**#### 18**")
    [' 18**']
    """
    return [match[1] for line in text.splitlines() if (match := _ANSWER_LINE.match(line))]


def read_answer(text: str, strict: bool = True) -> Fraction | None:
    r"""The number that `text` answers with.

    Args:
        text: of a completion.
        strict: the number on the last `####` line, nothing else. Lenient takes, where that gives none, the
            last `\boxed{}`, then the number after the last "answer is", then the last number in the text.

    Returns:
        The exact value; `None` where there is no number that can be read.

    >>> read_answer("So the answer is 18."), read_answer("So the answer is 18.", strict=False)
    (None, Fraction(18, 1))
    """
    lines = answer_lines(text)
    number = read_number(lines[-1]) if lines else None
    if strict or number is not None:
        return number
    box = boxed(text)
    if box is not None and (number := read_number(box)) is not None:
        return number
    stated = None
    for stated in _ANSWER_IS.finditer(text):  # noqa: B007 - the last one is what is asked for
        pass
    if stated and (number := first_number(text[stated.end() :].partition("\n")[0])) is not None:
        return number
    return last_number(text)


def score_correctness(completion: Completion, answer: str | float, strict: bool = True) -> Score:
    r"""1 if the number that `completion` answers with equals the gold answer, else 0.

    Args:
        completion: text or messages.
        answer: the gold number, or a gsm8k solution that ends in `#### number`.
        strict: how the completion is read, see `read_answer`.

    Returns:
        The score. Its reason tells a wrong number from one that could not be read.

    >>> score_correctness("9 * 2 = 18\n#### $18.00", "18")
    Score(value=1.0, reason='right: 18')
    >>> [score_correctness("so it is 18", "18", strict=strict).reason for strict in (True, False)]
    ["no '####' line", 'right: 18']
    """
    gold_lines = answer_lines(str(answer))
    gold = read_number(gold_lines[-1] if gold_lines else str(answer))
    if gold is None:
        return Score(0.0, f"gold answer unreadable: {_quoted(str(answer))}")
    text = completion_text(completion)
    number = read_answer(text, strict)
    if number is None:
        return Score(0.0, _unread(answer_lines(text)[-1:], strict))
    if number != gold:
        return Score(0.0, f"answer {number_text(number)}, expected {number_text(gold)}")
    return Score(1.0, f"right: {number_text(number)}")


def _unread(last_line: list[str], strict: bool) -> str:
    if last_line:
        return f"no single number after '####': {_quoted(last_line[0])}"
    return "no '####' line" if strict else "no number at the end"


def _quoted(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")


def score_format(completion: Completion) -> Score:
    r"""1 if `completion` ends with its only `####` line and one number stands on it, else 0.

    Args:
        completion: text or messages.

    Returns:
        The score.

    >>> score_format("9 * 2 = 18\n#### 18").value, score_format("#### 18\nI hope this helps").reason
    (1.0, "text after the '####' line")
    """
    text = completion_text(completion)
    lines = answer_lines(text)
    if not lines:
        return Score(0.0, "no '####' line")
    if len(lines) > 1:
        return Score(0.0, f"{len(lines)} '####' lines")
    if not _ANSWER_LINE.match(text.splitlines()[-1]):
        return Score(0.0, "text after the '####' line")
    if read_number(lines[0]) is None:
        return Score(0.0, _unread(lines, strict=True))
    return Score(1.0, "ends with one '####' line")


def score_tags(completion: Completion) -> Score:
    r"""1 if `completion` is one `<think>...</think>` and then one `<answer>...</answer>`, else 0.

    White space and line breaks are free inside, between and around the blocks.

    Args:
        completion: text or messages.

    Returns:
        The score.

    >>> score_tags("<think>9 * 2\n= 18</think> <answer>18</answer>").value
    1.0
    """
    text = completion_text(completion)
    for tag in _TAGS:
        if (count := text.count(tag)) != 1:
            return Score(0.0, f"{tag} {count} times" if count else f"no {tag}")
    if not _TAGGED.fullmatch(text):
        return Score(0.0, "text outside the blocks, or blocks out of order")
    return Score(1.0, "one <think> and one <answer> block")


def correctness_reward(
    completions: list[Completion],
    answer: list[Any],
    log_extra: Callable[[str, list[str]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float]:
    """Strict correctness: the number on the last `####` line equals the gold answer.

    Args:
        completions: one a row, text or messages.
        answer: gold answers, one a completion.
        log_extra: gets the column `reason`.
        log_metric: gets, as shares of the completions, `accuracy/lenient` (right under the lenient reading),
            `format/share` (well formed) and `answer/unread_share` (no number there for strict to read).
        **_: TRL's further arguments and columns.

    Returns:
        0 or 1 for each completion.
    """
    scores = [score_correctness(*pair) for pair in zip(completions, answer, strict=True)]
    if log_extra is not None:
        log_extra("reason", [score.reason for score in scores])
    if log_metric is not None and scores:
        lenient = lenient_correctness_reward(completions, answer)
        unread = [read_answer(completion_text(completion)) is None for completion in completions]
        log_metric("accuracy/lenient", sum(lenient) / len(scores))
        log_metric("format/share", sum(format_reward(completions)) / len(scores))
        log_metric("answer/unread_share", sum(unread) / len(scores))
    return [score.value for score in scores]


def lenient_correctness_reward(
    completions: list[Completion],
    answer: list[Any],
    log_extra: Callable[[str, list[str]], None] | None = None,
    **_: Any,
) -> list[float]:
    """Lenient correctness: the number a completion answers with, wherever it stands, equals the gold answer.

    Args:
        completions: one a row, text or messages.
        answer: gold answers, one a completion.
        log_extra: gets the column `lenient_reason`.
        **_: TRL's further arguments and columns.

    Returns:
        0 or 1 for each completion.
    """
    scores = [score_correctness(*pair, strict=False) for pair in zip(completions, answer, strict=True)]
    if log_extra is not None:
        log_extra("lenient_reason", [score.reason for score in scores])
    return [score.value for score in scores]


def format_reward(completions: list[Completion], **_: Any) -> list[float]:
    """Form: the completion ends with its only `####` line, and one number stands on it; 0 or 1 for each."""
    return [score_format(completion).value for completion in completions]


def tags_reward(completions: list[Completion], **_: Any) -> list[float]:
    """Form: one `<think>` block, then one `<answer>` block, nothing else; 0 or 1 for each completion."""
    return [score_tags(completion).value for completion in completions]


def overlong_reward(
    completion_ids: list[list[int]], *, max_completion_length: int, overlong_tokens: int, **_: Any
) -> list[float]:
    """Soft overlong penalty: 0 while a completion leaves `overlong_tokens` free, then linearly down to -1 at the limit.

    Args:
        completion_ids: tokens of each completion, the end-of-turn token among them.
        max_completion_length: tokens, the limit.
        overlong_tokens: tokens before the limit over which the penalty grows; from 1 to `max_completion_length`.
        **_: TRL's further arguments and columns.

    Returns:
        From -1 to 0 for each completion.

    Source: DAPO (arXiv 2503.14476), equation 13.

    >>> overlong_reward([[7] * length for length in (16, 18, 20, 30)], max_completion_length=20, overlong_tokens=4)
    [0.0, -0.5, -1.0, -1.0]
    """
    free = max_completion_length - overlong_tokens
    return [max(-1.0, min(0.0, (free - len(ids)) / overlong_tokens)) for ids in completion_ids]
