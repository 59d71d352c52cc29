"""The verdict is the scorers' own, follows the text, and what was typed is text, never markup."""

from functools import partial

import pytest

from grpo_lab.tasks import score_correctness, score_format
from grpo_lab.widgets import AnswerTester, ScoredCases

SCORERS = {
    "strict": score_correctness,
    "lenient": partial(score_correctness, strict=False),
    "format": lambda completion, _: score_format(completion),
}
EVIL = "<img src=x onerror=alert(1)> $5 and $6"


def test_the_verdict_follows_the_text():
    tester = AnswerTester(SCORERS, "so it is 18", "18")
    assert "no &#x27;####&#x27; line" in tester.verdicts.value
    assert tester.verdicts.value.count("right: 18") == 1  # lenient
    tester.completion.value = "9 * 2 = 18\n#### 18"
    assert tester.verdicts.value.count("right: 18") == 2
    assert "no &#x27;####&#x27; line" not in tester.verdicts.value


def test_the_verdict_follows_the_gold():
    tester = AnswerTester(SCORERS, "#### 18", "18")
    tester.gold.value = "19"
    assert tester.verdicts.value.count("answer 18, expected 19") == 2
    assert "right" not in tester.verdicts.value


@pytest.mark.parametrize("gold", ["", "eighteen", "18 or 19", "1/0"])
def test_gold_that_is_no_number_is_said(gold):
    tester = AnswerTester(SCORERS, "#### 18", "18")
    tester.gold.value = gold
    assert tester.verdicts.value.count("gold answer unreadable") == 2
    assert "right" not in tester.verdicts.value


def test_a_wrong_answer_scores_zero():
    cases = ScoredCases([("wrong", "#### 17", "18"), ("nothing", "", "18"), ("right", "#### 18", "18")], SCORERS)
    assert cases.values == [(0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]


def test_a_table_stays_where_there_is_no_kernel():
    tester = AnswerTester(SCORERS, "#### $18", "18")
    bundle = tester._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"].startswith("<table")
    assert bundle["text/html"].count("right: 18") == 2
    assert bundle["text/plain"].splitlines()[:2] == ["typed: '#### $18' for 18", "  strict     1  right: 18"]


def test_what_was_typed_is_escaped_and_no_formula():
    tester = AnswerTester(SCORERS, EVIL, EVIL)
    page = ScoredCases([(EVIL, EVIL, EVIL)], SCORERS)._repr_html_()
    for shown in (page, tester._repr_mimebundle_()["text/html"], tester.verdicts.value):
        assert "<img" not in shown
        assert "&lt;img src=x" in shown
        assert '<table class="mathjax_ignore tex2jax_ignore"' in shown  # $5 and $6 are prices


@pytest.mark.parametrize("make", [AnswerTester, partial(ScoredCases, [])])
def test_no_scorers_are_refused(make):
    with pytest.raises(ValueError, match=r"^scorers must name at least one"):
        make({})
