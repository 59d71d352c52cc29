"""Completions and answers as HTML tables; whatever a model wrote is escaped."""

from collections.abc import Sequence
from html import escape
from typing import Any

from grpo_lab.widgets.panels import GREEN

RED = "#ef4444"
_CELL = "padding:4px 10px 4px 0;vertical-align:top;text-align:left"
_TEXT = "white-space:pre-wrap;font-family:var(--jp-code-font-family,monospace);font-size:12px"
_SHOWN_CHARACTERS = 90


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; two prices in dollars in one are no formula."""
    head = "".join(f'<th style="{_CELL};border-bottom:1px solid currentColor">{escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return (
        '<table class="mathjax_ignore tex2jax_ignore" '
        'style="border-collapse:collapse;font:12px system-ui,sans-serif;color:inherit;width:100%">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _folded(text: str) -> str:
    """The text, whole where it is short, else behind its beginning."""
    if len(text) <= _SHOWN_CHARACTERS:
        return f'<span style="{_TEXT}">{escape(text)}</span>'
    return (
        f'<details><summary style="cursor:pointer">{escape(text[:_SHOWN_CHARACTERS])}…</summary>'
        f'<span style="{_TEXT}">{escape(text)}</span></details>'
    )


def _verdict(right: bool, text: str) -> str:
    return f'<span style="color:{GREEN if right else RED};font-weight:600">{escape(text)}</span>'


def completions_table(completions: Sequence[dict[str, Any]], *, order: str = "lowest", count: int = 6) -> str:
    """The latest completions with what each earned and why.

    Args:
        completions: rows with `step`, `prompt`, `completion`, `reward`, `advantage` and `reason`.
        order: `"lowest"` or `"highest"` reward first.
        count: rows shown at most.

    Returns:
        HTML, empty where there are no completions.
    """
    if not completions:
        return ""
    ranked = sorted(completions, key=lambda row: float(row["reward"] or 0), reverse=order == "highest")[:count]
    rows = [
        (
            _folded(row["prompt"]),
            f'<span style="{_TEXT}">{escape(row["completion"])}</span>',
            _verdict(float(row["reward"] or 0) > 0, f"{float(row['reward'] or 0):g}"),
            escape(str(row.get("reason", ""))),
            f"{float(row['advantage'] or 0):+.2f}",
        )
        for row in ranked
    ]
    step = completions[0]["step"]
    title = f"{len(ranked)} of {len(completions)} completions of step {step}, {order} reward first"
    return f"<b>{title}</b>" + _table(("question", "completion", "reward", "why", "advantage"), rows)


class AnswerComparison:
    """Answers before and after training, side by side; a table in a notebook, lines of text elsewhere.

    Args:
        questions: one a row.
        before: an answer each.
        after: an answer each.
        right_before: whether each is right.
        right_after: whether each is right.

    Raises:
        ValueError: the lengths differ.
    """

    def __init__(
        self,
        questions: Sequence[str],
        before: Sequence[str],
        after: Sequence[str],
        right_before: Sequence[bool],
        right_after: Sequence[bool],
    ) -> None:
        columns = {"before": before, "after": after, "right_before": right_before, "right_after": right_after}
        for name, column in columns.items():
            if len(column) != len(questions):
                raise ValueError(f"{name} must have one entry a question, {len(questions)}; got {len(column)}.")
        self._rows = list(zip(questions, before, after, map(bool, right_before), map(bool, right_after), strict=True))

    def _repr_html_(self) -> str:
        rows = [
            (escape(question), self._answer(before, was_right), self._answer(after, is_right))
            for question, before, after, was_right, is_right in self._rows
        ]
        return _table(("question", "before", "after"), rows)

    @staticmethod
    def _answer(text: str, right: bool) -> str:
        return f'{_verdict(right, "right" if right else "wrong")}<br><span style="{_TEXT}">{escape(text)}</span>'

    def __repr__(self) -> str:
        words = {True: "right", False: "wrong"}
        return "\n".join(f"{words[was]} -> {words[now]}: {question}" for question, _, _, was, now in self._rows)


def compare_answers(
    questions: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    right_before: Sequence[bool],
    right_after: Sequence[bool],
) -> AnswerComparison:
    """Answers before and after training, to show as the value of a cell; arguments as for `AnswerComparison`."""
    return AnswerComparison(questions, before, after, right_before, right_after)
