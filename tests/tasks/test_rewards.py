"""Rewards pay for the right answer and nothing else, say why, and take completions in either form."""

import inspect
import threading
import time
from types import ModuleType
from typing import Any

import pytest
from trl.rewards import get_soft_overlong_punishment

from grpo_lab.tasks import rewards
from grpo_lab.tasks.rewards import (
    correctness_reward,
    format_reward,
    lenient_correctness_reward,
    overlong_reward,
    score_correctness,
    score_format,
    score_tags,
    tags_reward,
)

# completion, gold answer, strict, lenient
CORRECTNESS = [
    ("the total cost is $29.00.", "29", 0, 1),  # case R01, in its order
    ("#### 70,000", "70000", 1, 1),
    ("#### $70,000", "70000", 1, 1),
    ("#### 70000.", "70000", 1, 1),
    ("**#### 70,000 dollars**", "70000", 1, 1),
    ("#### 0.5", "0.50", 1, 1),
    ("#### 8.124,12.852", "8.124", 0, 0),
    ("9 * 2 = 18\n#### 18", "18", 1, 1),
    ("9 * 2 = 18\n#### 18", "9 eggs at $2\n#### 18", 1, 1),  # a whole solution as gold
    ("#### 18", 18, 1, 1),
    ("#### 18", "$18.00", 1, 1),
    ("#### 17", "18", 0, 0),
    ("#### 18", "17", 0, 0),
    ("#### -18", "18", 0, 0),
    ("#### 1.8", "18", 0, 0),
    ("#### 180", "18", 0, 0),
    ("#### 9 * 2", "18", 0, 0),
    ("#### 36/2", "18", 0, 0),
    ("#### 18 or 19", "18", 0, 0),
    ("#### 17\n#### 18", "18", 1, 1),  # the last line counts
    ("#### 18\n#### 17", "18", 0, 0),
    ("#### 18\nI am sure it is not 17", "18", 1, 1),
    ("#### 17\nIt is 18", "18", 0, 0),  # lenient does not look past a readable marker
    ("> #### 18", "18", 1, 1),
    ("it is #### 18", "18", 0, 1),
    ("##### 18", "18", 0, 1),
    (r"so \boxed{18}, not 17", "18", 0, 1),
    (r"\boxed{17} and then 18", "18", 0, 0),
    ("The answer is 18, because 9 * 2 = 18 and 3 + 1 = 4", "18", 0, 1),
    ("The answer is 17. No, the answer is 18 and not 16", "18", 0, 1),
    ("Answer: 18 (3 * 6)", "18", 0, 1),
    ("the answer is:\n9 * 2 = 18", "18", 0, 1),
    ("<<9*2=18>>18", "18", 0, 1),
    ("18 then 17", "18", 0, 0),
    ("eighteen", "18", 0, 0),
    ("", "18", 0, 0),
    ("#### ", "18", 0, 0),
    ("#### 18", "none", 0, 0),
    ("#### none", "none", 0, 0),
    ("", "", 0, 0),
    ("#### 18<|im_end|>", "18", 1, 1),
]

FORMAT = [
    ("9 * 2 = 18\n#### 18", 1),
    ("#### 18", 1),
    ("#### 17", 1),  # form, not truth
    ("**#### $18.00**", 1),
    ("one\ntwo\n\n#### 18\n\n", 1),
    ("#### 18<|im_end|>", 1),
    ("#### 18 <|im_end|>\n<|endoftext|>", 1),
    ("#### 18</s>", 1),
    ("#### 18\nI hope this helps", 0),
    ("#### 17\n#### 18", 0),
    ("18", 0),
    ("it is #### 18", 0),
    ("#### eighteen", 0),
    ("#### 9 * 2", 0),
    ("####", 0),
    ("", 0),
    ("#### 18<|im_end|>\nuser", 0),
]

NINE_LINES = "\n".join(f"step {n}" for n in range(9))

TAGS = [  # case R04, in its order
    (f"<think>\n{NINE_LINES}\n</think>\n<answer>\n18\n</answer>\n", 1),
    ("<think>9 * 2</think><answer>18</answer>", 1),
    ("<think>9 * 2</think>  \n <answer>18</answer>", 1),
    ("<think>a</think><answer>18</answer></answer>", 0),
    ("<think>a</think><think>b</think><answer>18</answer>", 0),
    ("Well: <think>a</think><answer>18</answer>", 0),
    ("<think>a</think><answer>18</answer><|im_end|>", 1),
    ("<think>a</think><answer>18</answer><|im_end|>\n<|endoftext|>", 1),
    ("<think>a</think><answer>18</answer> done", 0),
    ("<think>a</think> so <answer>18</answer>", 0),
    ("<answer>18</answer><think>a</think>", 0),
    ("<think>a<answer>18</answer></think>", 0),
    ("<think>a</think>", 0),
    ("<answer>18</answer>", 0),
    ("", 0),
]


def check_scores(module: ModuleType) -> None:
    """All of the above."""
    for completion, answer, strict, lenient in CORRECTNESS:
        assert module.score_correctness(completion, answer).value == strict, completion
        assert module.score_correctness(completion, answer, strict=False).value == lenient, completion
    for completion, value in FORMAT:
        assert module.score_format(completion).value == value, completion
    for completion, value in TAGS:
        assert module.score_tags(completion).value == value, completion


def test_the_scores() -> None:
    check_scores(rewards)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if number != gold", "if False"),
        ("if number != gold", "if number < gold"),
        ("if number != gold", "if number > gold"),
        ("if gold is None", "if False"),
        ("####(?!#)(.*)", "####(.*)"),
        (r"[ \t*_>`]*####", "####"),
        (
            "read_number(lines[-1]) if lines else None\n    if strict",
            "read_number(lines[0]) if lines else None\n    if strict",
        ),
        ("if strict or number is not None", "if strict"),
        ("if strict or number is not None", "if number is not None"),
        ("gold_lines[-1] if gold_lines else str(answer)", "str(answer)"),
        (r"(?: is|:| =)", r"(?: is)"),
        ('.partition("\\n")[0]', ""),
        ("first_number(text[stated.end() :]", "last_number(text[stated.end() :]"),
        ("return last_number(text)", "return first_number(text)"),
        ("if box is not None and", "if False and"),
        ("if len(lines) > 1", "if False"),
        ("if not _ANSWER_LINE.match(text.splitlines()[-1])", "if False"),
        ("if read_number(lines[0]) is None", "if False"),
        ("while text.endswith(_END_OF_TURN)", "while False"),
        ("while text.endswith(_END_OF_TURN)", "if text.endswith(_END_OF_TURN)"),
        ("if (count := text.count(tag)) != 1", "if (count := text.count(tag)) < 1"),
        ("_TAGGED.fullmatch", "_TAGGED.search"),
        (", re.DOTALL)", ")"),
        (r"</think>\s*<answer>", "</think><answer>"),
    ],
)
def test_each_mutant_of_the_scores_is_caught(old: str, new: str) -> None:
    source = inspect.getsource(rewards)
    assert source.count(old) == 1, "the mutant no longer applies"
    mutant = ModuleType(rewards.__name__)
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, TypeError, AttributeError)):
        check_scores(mutant)


@pytest.mark.parametrize(
    ("completion", "answer", "reason"),
    [
        ("#### 18", "18", "right: 18"),
        ("#### $70,000.00", "70000", "right: 70000"),
        ("#### 17", "18", "answer 17, expected 18"),
        ("#### 0.25", "1/3", "answer 0.25, expected 0.333333"),
        ("it is 18", "18", "no '####' line"),
        ("#### 9 * 2", "18", "no single number after '####': '9 * 2'"),
        ("#### 18", "many", "gold answer unreadable: 'many'"),
    ],
)
def test_the_reason_tells_wrong_from_unread(completion: str, answer: str, reason: str) -> None:
    assert score_correctness(completion, answer).reason == reason


def test_the_reason_stays_short() -> None:
    for strict in (True, False):
        assert len(score_correctness("#### " + "9" * 10_000, "18", strict=strict).reason) < 100
    assert score_correctness("nothing", "18", strict=False).reason == "no number at the end"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("#### 18", "ends with one '####' line"),
        ("18", "no '####' line"),
        ("#### 17\n#### 18", "2 '####' lines"),
        ("#### 18\nBye", "text after the '####' line"),
        ("#### none", "no single number after '####': 'none'"),
    ],
)
def test_the_format_score_says_why(completion: str, reason: str) -> None:
    assert score_format(completion).reason == reason


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("<answer>18</answer>", "no <think>"),
        ("<think>a</think><answer>18</answer></answer>", "</answer> 2 times"),
        ("Well: <think>a</think><answer>18</answer>", "text outside the blocks, or blocks out of order"),
    ],
)
def test_the_tag_score_says_why(completion: str, reason: str) -> None:
    assert score_tags(completion).reason == reason


def as_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def as_parts(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("shape", [str, as_messages, as_parts])
def test_text_and_messages_earn_the_same(shape) -> None:
    completions = [shape(text) for text in ("#### 4", "#### 5", "4", "")]
    columns = {
        "prompts": ["?"] * 4,
        "completion_ids": [[1]] * 4,
        "question": ["?"] * 4,
        "trainer_state": None,
    }
    assert correctness_reward(completions=completions, answer=["4"] * 4, **columns) == [1, 0, 0, 0]
    assert lenient_correctness_reward(completions=completions, answer=["4"] * 4, **columns) == [1, 0, 1, 0]
    assert format_reward(completions=completions, answer=["4"] * 4, **columns) == [1, 1, 0, 0]
    tagged = [shape("<think>2 + 2</think><answer>4</answer>"), shape("4")]
    assert tags_reward(completions=tagged, **columns) == [1, 0]


@pytest.mark.parametrize("completion", [[], [{"role": "assistant", "content": None}], [{"role": "assistant"}]])
def test_an_empty_completion_earns_nothing(completion) -> None:
    for reward in (correctness_reward, lenient_correctness_reward, format_reward, tags_reward):
        assert reward(completions=[completion], answer=["4"]) == [0]


def test_strict_and_lenient_are_logged_beside_each_other() -> None:  # case X16
    columns: dict[str, list[str]] = {}
    metrics: dict[str, float] = {}
    completions = ["#### 4", "so it is 4", "#### 5", "#### many"]
    values = correctness_reward(completions, ["4"] * 4, log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert values == [1, 0, 0, 0]
    assert columns == {
        "reason": [
            "right: 4",
            "no '####' line",
            "answer 5, expected 4",
            "no single number after '####': 'many'",
        ]
    }
    assert metrics == {"accuracy/lenient": 0.5, "format/share": 0.5, "answer/unread_share": 0.5}


def test_the_lenient_reward_logs_a_column_of_its_own() -> None:
    columns: dict[str, list[str]] = {}
    lenient_correctness_reward(["so it is 4"], ["4"], log_extra=columns.__setitem__)
    assert columns == {"lenient_reason": ["right: 4"]}


def test_answers_that_do_not_fit_the_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        correctness_reward(["#### 4", "#### 5"], ["4"])


def test_a_thread_scores_as_the_main_thread_does() -> None:
    completions, answers, strict, lenient = (list(column) for column in zip(*CORRECTNESS, strict=True))
    found: list[list[float]] = []

    def work() -> None:
        found.append(correctness_reward(completions, answers))
        found.append(lenient_correctness_reward(completions, answers))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(10)
    assert found == [strict, lenient]


@pytest.mark.parametrize(
    "text",
    [
        "#### " + "(1+2)*" * 2000,
        "#### " + "9**" * 5000 + "9",
        "#### " * 20_000,
        "answer is " * 10_000,
        "<think>" * 20_000,
        "<answer>" + " " * 100_000,
        "<|im_end|>" * 10_000,
        "\n" * 100_000,
    ],
    ids=lambda text: text[:12].strip(),
)
def test_hostile_completions_return_at_once(text: str) -> None:
    started = time.process_time()
    for reward in (correctness_reward, lenient_correctness_reward, format_reward, tags_reward):
        assert reward(completions=[text], answer=["18"]) == [0]
    assert time.process_time() - started < 1.0


def check_overlong(module: ModuleType) -> None:
    """Worked numbers of equation 13 (L_max 10, L_cache 4), and TRL's at every length."""
    lengths = (0, 6, 7, 8, 9, 10, 11, 50)
    values = module.overlong_reward([[1] * length for length in lengths], max_completion_length=10, overlong_tokens=4)
    assert values == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    for limit, cache in ((20, 4), (7, 7), (5, 1)):
        ids = [[1] * length for length in range(limit + 3)]
        expected = get_soft_overlong_punishment(limit, cache)(completion_ids=ids)
        assert module.overlong_reward(ids, max_completion_length=limit, overlong_tokens=cache) == expected


def test_the_overlong_penalty() -> None:
    check_overlong(rewards)
    columns = {"completions": ["text"], "prompts": ["?"], "log_extra": None, "answer": ["4"]}
    assert overlong_reward(completion_ids=[[1] * 9], max_completion_length=10, overlong_tokens=2, **columns) == [-0.5]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("free = max_completion_length - overlong_tokens", "free = max_completion_length"),
        ("(free - len(ids)) / overlong_tokens", "(free - len(ids)) / max_completion_length"),
        ("(free - len(ids)) / overlong_tokens", "(len(ids) - free) / overlong_tokens"),
        ("max(-1.0, min(0.0, (free - len(ids)) / overlong_tokens))", "min(0.0, (free - len(ids)) / overlong_tokens)"),
        ("max(-1.0, min(0.0, (free - len(ids)) / overlong_tokens))", "max(-1.0, (free - len(ids)) / overlong_tokens)"),
    ],
)
def test_each_mutant_of_the_overlong_penalty_is_caught(old: str, new: str) -> None:
    source = inspect.getsource(rewards)
    assert source.count(old) == 1, "the mutant no longer applies"
    mutant = ModuleType(rewards.__name__)
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    with pytest.raises(AssertionError):
        check_overlong(mutant)
