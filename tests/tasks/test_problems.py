"""Generated problems: each is solved again from its question alone."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from grpo_lab.tasks import correctness_reward, format_reward, load_gsm8k, load_task
from grpo_lab.tasks.problems import DEFAULT_SIZE, Problem, generate_problems, problems_dataset

COUNT = 1200
MARK = re.compile(r"(\d+)([-+*/])(\d+)=<<\1\2\3=(\d+)>>\4(?!\d)")
CALCULATE: dict[str, Callable[[int, int], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
FACTORS = {"twice": 2, "three times": 3, "four times": 4}

# A pattern for each kind of story, and its answer from the quantities there; an independent second reading.
READINGS: list[tuple[str, Callable[..., float]]] = [
    (r"has (\d+) \w+ and \w+ (\d+) more", lambda x, y: x + y),
    (r"has (\d+) \w+ and \w+ (\d+) of them", lambda x, y: x - y),
    (r"fills (\d+) \w+ with (\d+) .* uses (\d+)", lambda n, k, gone: n * k - gone),
    (r"cost \$(\d+) each\. \w+ takes (\d+) and pays with \$(\d+)", lambda price, n, paid: paid - n * price),
    (r"has (\d+) .* has (\d+)\. They share .* among (\d+)", lambda x, y, k: (x + y) / k),
    (r"has (\d+) .* has (twice|three times|four times) as many", lambda x, factor: x + factor * x),
    (r"reads (\d+) .* for (\d+) days and (\d+) pages", lambda pages, days, rest: pages * days + rest),
    (r"earns \$(\d+) .* working (\d+) .* and (\d+) hours", lambda wage, a, b: wage * (a + b)),
    (r"collects (\d+) .* half as many", lambda x: x + x / 2),
    (r"with (\d+) people\. Then (\d+) .* and (\d+) get on", lambda start, off, on: start - off + on),
    (r"bakes (\d+) rows of (\d+) .* eats (\d+) .* of (\d+)\.", lambda n, per, eaten, k: (n * per - eaten) / k),
    (r"saves \$(\d+) .* for (\d+) weeks, gets \$(\d+) .* spends \$(\d+)", lambda w, n, gift, out: w * n + gift - out),
]  # fmt: skip


def some(split: str = "train", seed: int = 0) -> list[Problem]:
    return list(islice(generate_problems(seed, split), COUNT))


def read_again(question: str) -> tuple[int, float]:
    """The kind of story, and its answer."""
    found = [(kind, m, solve) for kind, (pattern, solve) in enumerate(READINGS) if (m := re.search(pattern, question))]
    assert len(found) == 1, question
    kind, match, solve = found[0]
    return kind, solve(*(FACTORS.get(text) or int(text) for text in match.groups()))


def test_the_answer_is_that_of_the_question():
    for problem in some():
        assert problem.answer == read_again(problem.question)[1], problem


def test_every_line_of_a_solution_holds_one_true_calculation():
    for problem in some():
        *lines, last = problem.solution.split("\n")
        for line in lines:
            (left, operator, right, result), *more = MARK.findall(line)
            assert not more
            assert CALCULATE[operator](int(left), int(right)) == int(result), line
        assert last == f"#### {result}" == f"#### {problem.answer}"


def test_a_wrong_result_can_be_put_into_a_line():
    step = some()[0].steps[-1]
    assert step.line(step.result + 1) != step.line() == step.line(step.result)
    assert [mark[3] for mark in MARK.findall(step.line(step.result + 1))] == [str(step.result + 1)]


def test_numbers_are_small_and_whole():
    results = [step.result for problem in some() for step in problem.steps]
    assert min(results) >= 1
    assert max(results) < 200


@pytest.mark.parametrize("split", ["train", "test"])
def test_all_stories_and_lengths_are_there(split: str):
    problems = some(split)
    kinds = Counter(read_again(problem.question)[0] for problem in problems)
    assert len(kinds) == len(READINGS)
    assert min(kinds.values()) > COUNT / len(READINGS) / 2
    assert {len(problem.steps) for problem in problems} == {1, 2, 3}


def test_names_and_things_vary():
    assert len({problem.question.split()[0] for problem in some()}) > 40
    assert len({problem.question for problem in some()}) > 0.99 * COUNT


def test_a_question_belongs_to_one_split_whatever_the_seed():
    def splits(name: str) -> set[str]:
        return {Problem(problem.question, ()).split for seed in range(2) for problem in some(name, seed)}

    assert splits("train") == {"train"}
    assert splits("test") == {"test"}


def test_the_same_seed_gives_the_same_problems_and_another_gives_others():
    assert some(seed=3) == some(seed=3)
    questions = {problem.question for problem in some(seed=3)}
    assert len(questions & {problem.question for problem in some(seed=4)}) < 0.05 * COUNT


def test_the_data_set_has_the_columns_of_gsm8k(tmp_path):
    (tmp_path / "row.jsonl").write_text('{"question": "3 + 4?", "answer": "#### 7"}\n', encoding="utf-8")
    assert problems_dataset(size=1).features == load_gsm8k(tmp_path / "row.jsonl").features


def test_rows_are_the_problems_of_split_and_seed():
    dataset = problems_dataset("test", size=5, seed=2)
    assert len(dataset) == 5
    for row, problem in zip(dataset, some("test", 2), strict=False):
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
        assert (row["question"], row["answer"]) == (problem.question, str(problem.answer))
        assert row["solution"] == problem.solution


def test_without_a_size_the_data_set_has_its_default():
    assert len(problems_dataset()) == DEFAULT_SIZE


def test_the_task_problems_is_this_data_set():
    assert load_task("problems", split="test", size=7, seed=5).to_list() == problems_dataset("test", 7, 5).to_list()


def test_solutions_earn_1_and_those_of_other_answers_0():
    solutions, answers = [p.solution for p in some()], [str(p.answer) for p in some()]
    assert correctness_reward(solutions, answers) == [1] * COUNT
    assert format_reward(solutions) == [1] * COUNT
    assert correctness_reward(solutions, [f"{answer}1" for answer in answers]) == [0] * COUNT


def test_an_unknown_split_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"split must be one of train, test; got 'dev'"):
        problems_dataset("dev")


def test_problems_load_without_torch_or_datasets():
    code = "import sys, grpo_lab.tasks.problems; print(sorted({'torch', 'datasets'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
