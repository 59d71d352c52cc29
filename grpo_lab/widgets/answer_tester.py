"""What an answer earns and why: a table of cases, and a field to type into whose verdict follows every key.

The scorers come from the caller, so that any reward can be looked at; the widgets know no task.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

import ipywidgets as widgets

from grpo_lab.widgets.tables import _TEXT, _table, _verdict


class Verdict(Protocol):
    """What a scorer returns: what the completion is worth, and one short sentence that says why."""

    @property
    def value(self) -> float: ...  # noqa: D102 - said above

    @property
    def reason(self) -> str: ...  # noqa: D102


Scorer = Callable[[str, str], Verdict]


def _checked(scorers: Mapping[str, Scorer]) -> dict[str, Scorer]:
    if not scorers:
        raise ValueError("scorers must name at least one function of a completion and its gold answer; got none.")
    return dict(scorers)


def _html(verdict: Verdict) -> str:
    return f"{_verdict(verdict.value > 0, f'{verdict.value:g}')} {escape(verdict.reason)}"


def _line(name: str, verdict: Verdict) -> str:
    return f"  {name:10} {verdict.value:g}  {verdict.reason}"


class ScoredCases:
    """Completions with what each scorer gives them and why; a table in a notebook, lines of text elsewhere.

    Args:
        cases: what a case shows, the completion, and the gold answer.
        scorers: by name, functions of a completion and a gold answer.

    Raises:
        ValueError: there are no scorers.
    """

    def __init__(self, cases: Sequence[tuple[str, str, str]], scorers: Mapping[str, Scorer]) -> None:
        self._scorers = _checked(scorers)
        self._rows = [
            (what, completion, gold, [score(completion, gold) for score in self._scorers.values()])
            for what, completion, gold in cases
        ]

    @property
    def values(self) -> list[tuple[float, ...]]:
        """What each case earned, in the order of the scorers."""
        return [tuple(verdict.value for verdict in verdicts) for *_, verdicts in self._rows]

    def _repr_html_(self) -> str:
        rows = [
            (
                escape(what),
                f'<span style="{_TEXT}">{escape(completion)}</span>',
                f'<span style="{_TEXT}">{escape(gold)}</span>',
                *map(_html, verdicts),
            )
            for what, completion, gold, verdicts in self._rows
        ]
        return _table(("case", "completion", "gold", *self._scorers), rows)

    def __repr__(self) -> str:
        lines = []
        for what, completion, gold, verdicts in self._rows:
            lines.append(f"{what}: {completion!r} for {gold}")
            lines += map(_line, self._scorers, verdicts)
        return "\n".join(lines)


class AnswerTester:
    """Two fields, completion and gold answer, and each scorer's verdict, new at every key.

    In a saved notebook that is opened without a kernel, the verdict on the first text stays as a table.

    Args:
        scorers: by name, functions of a completion and a gold answer.
        completion: what stands in the field at first.
        gold: the same.

    Raises:
        ValueError: there are no scorers.
    """

    def __init__(self, scorers: Mapping[str, Scorer], completion: str = "", gold: str = "") -> None:
        self._scorers = _checked(scorers)
        style, wide = {"description_width": "80px"}, widgets.Layout(width="100%", max_width="720px")
        self.completion = widgets.Textarea(
            completion,
            description="completion",
            rows=5,
            style=style,
            layout=wide,
            placeholder="type or paste an answer",
        )
        self.gold = widgets.Text(gold, description="gold", style=style, layout=wide, placeholder="the right number")
        self.verdicts = widgets.HTML()
        self.view = widgets.VBox([self.completion, self.gold, self.verdicts])
        for field in (self.completion, self.gold):
            field.observe(lambda _: self._score(), names="value")
        self._score()

    def _score(self) -> None:
        pair = self.completion.value, self.gold.value
        rows = [(escape(name), _html(score(*pair))) for name, score in self._scorers.items()]
        table = _table(("reading", "score and why"), rows)
        self.verdicts.value = f'<div style="color:var(--jp-ui-font-color1,inherit);max-width:720px">{table}</div>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = ScoredCases([("typed", self.completion.value, self.gold.value)], self._scorers)
        live = dict(self.view._repr_mimebundle_())
        return live | {"text/html": static._repr_html_(), "text/plain": repr(static)}
