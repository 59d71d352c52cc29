"""What a model wrote is text, never markup."""

import pytest

from grpo_lab.widgets import compare_answers
from grpo_lab.widgets.tables import completions_table
from tests.widgets.fake_run import QUESTION

EVIL = "<img src=x onerror=alert(1)> & </td>"


def completion(reward: float, text: str = "#### 5", prompt: str = "2 + 3?") -> dict[str, object]:
    return {
        "step": 7,
        "prompt": prompt,
        "completion": text,
        "reward": reward,
        "advantage": reward - 0.5,
        "reason": f"why {reward:g}",
    }


def test_completions_are_escaped():
    table = completions_table([completion(0.0, EVIL, prompt=EVIL) | {"reason": EVIL}])
    assert "<img" not in table
    assert table.count("&lt;img src=x onerror=alert(1)&gt; &amp; &lt;/td&gt;") == 3


def test_a_long_question_is_folded_and_whole():
    table = completions_table([completion(1.0, prompt=QUESTION)])
    assert table.count("<details>") == 1
    assert "how many apples" not in table.split("</summary>")[0]
    assert "How many apples does Tom have now, in all?" in table.split("</summary>")[1]


@pytest.mark.parametrize(("order", "first"), [("lowest", "why 0"), ("highest", "why 1")])
def test_order(order, first):
    rows = [completion(reward) for reward in (0.5, 1.0, 0.0)]
    table = completions_table(rows, order=order)
    assert min(("why 0<", "why 0.5", "why 1"), key=table.index).rstrip("<") == first


def test_some_of_many():
    table = completions_table([completion(float(n)) for n in range(10)], count=4)
    assert "4 of 10 completions of step 7" in table
    assert table.count("why") == 1 + 4


def test_no_completions_no_table():
    assert completions_table([]) == ""


def test_a_reward_that_is_not_a_number_does_not_break_the_table():
    assert "why" in completions_table([completion(1.0) | {"reward": None, "advantage": None}])


def test_answers_side_by_side_are_escaped_and_judged():
    shown = compare_answers([EVIL], ["#### 4"], ["#### 5"], [False], [True])
    page = shown._repr_html_()
    assert "<img" not in page
    assert page.index(">wrong<") < page.index("#### 4") < page.index(">right<") < page.index("#### 5")
    assert page.startswith('<table class="mathjax_ignore tex2jax_ignore"')  # $4 and $50 are prices, not a formula
    assert repr(shown) == f"wrong -> right: {EVIL}"


@pytest.mark.parametrize("short", ["before", "after", "right_before", "right_after"])
def test_answers_of_another_length_are_refused(short):
    columns = {"before": ["a", "b"], "after": ["a", "b"], "right_before": [True, True], "right_after": [True, True]}
    columns[short] = columns[short][:1]
    with pytest.raises(ValueError, match=f"^{short} must have one entry a question, 2; got 1"):
        compare_answers(["a", "b"], **columns)
