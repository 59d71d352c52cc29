"""gsm8k from disk: what comes out, and what is said about a file that cannot be used."""

import json
from pathlib import Path

import datasets
import pytest

from grpo_lab.tasks import correctness_reward, format_reward, load_gsm8k, load_task
from grpo_lab.tasks.gsm8k import HUB_ID

REAL = Path(__file__).parents[3] / "shared" / "gsm8k"
ROW = {"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_real_row_parses_and_its_solution_earns_1(split: str, count: int) -> None:
    if not REAL.is_dir():
        pytest.skip("the real data set is not beside the repository, in shared/gsm8k")
    dataset = load_gsm8k(REAL, split)
    assert len(dataset) == count
    solutions, answers = dataset["solution"], dataset["answer"]
    assert correctness_reward(solutions, answers) == [1] * count
    assert format_reward(solutions) == [1] * count
    shifted = [*answers[1:], answers[0]]
    values = [float(answer.replace(",", "")) for answer in answers]
    right_by_chance = sum(value == values[place - 1] for place, value in enumerate(values))
    assert sum(correctness_reward(solutions, shifted)) == right_by_chance


def test_the_columns_are_those_trl_expects(tmp_path: Path) -> None:
    dataset = load_gsm8k(write(tmp_path / "rows.jsonl", json.dumps(ROW | {"id": 7})))
    assert dataset.column_names == ["prompt", "question", "answer", "solution"]
    assert dataset[0] == {
        "prompt": [{"role": "user", "content": "How many?"}],
        "question": "How many?",
        "answer": "18",
        "solution": ROW["answer"],
    }


def test_a_folder_has_its_splits(tmp_path: Path) -> None:
    for split, gold in (("train", "1"), ("test", "2")):
        write(tmp_path / f"{split}.jsonl", json.dumps(ROW | {"answer": f"#### {gold}"}))
    assert load_task(str(tmp_path), split="train")["answer"] == ["1"]
    assert load_task(str(tmp_path), split="test")["answer"] == ["2"]


def test_a_byte_order_mark_blank_lines_and_line_separators_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps(ROW | {"question": "one\u2028two\x85three"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n  \n{row}".encode())
    assert load_gsm8k(path)["question"] == ["one\u2028two\x85three"] * 2


def test_an_answer_may_be_the_number_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", json.dumps(ROW | {"answer": "$1,800"}))
    assert load_gsm8k(path)["answer"] == ["$1,800"]
    assert correctness_reward(["#### 1800", "#### 1801"], ["$1,800"] * 2) == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"question": "How many?", "answer',
            r"line 2: not JSON \(.*\)\. The row begins: {.question.: .How many",
        ),
        ("[1, 2]", r"line 2: no column question and answer; it has none\. The row begins: \[1, 2\]"),
        ("18", r"line 2: no column question and answer"),
        ('{"q": "How many?", "answer": "#### 18"}', r"line 2: no column question; it has q, answer\."),
        ('{"question": "How many?"}', r"line 2: no column answer; it has question\."),
        (
            '{"question": "", "answer": "#### 18"}',
            "line 2: question must be a text that is not empty; got ''",
        ),
        ('{"question": "?", "answer": 18}', r"answer must be a text that is not empty; got 18\."),
        ('{"question": "?", "answer": null}', r"line 2: answer must be a text"),
        (
            '{"question": "?", "answer": "#### many"}',
            r"line 2: the answer must end with a line '#### number'",
        ),
        ('{"question": "?", "answer": "9 * 2 = 18"}', r"'#### number'; it ends with '9 \* 2 = 18'"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", json.dumps(ROW), line, json.dumps(ROW))
    with pytest.raises(ValueError, match=message) as error:
        load_gsm8k(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < len(str(path)) + 250


def test_a_long_broken_row_is_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "x" * 10_000)
    with pytest.raises(ValueError, match=r"line 1: not JSON .* The row begins: x{60}\.\.\.$"):
        load_gsm8k(path)


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is empty\. Each line must be"):
        load_gsm8k(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(ValueError, match=r"no data at .*missing\.jsonl\. Give a \.jsonl file"):
        load_gsm8k(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"no data at no-such-thing\. Give"):
        load_task("no-such-thing")
    with pytest.raises(ValueError, match=r"has no test\.jsonl \(it holds empty\.jsonl\)"):
        load_gsm8k(tmp_path, "test")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"has no train\.jsonl \(it holds no \.jsonl file\)"):
        load_gsm8k(tmp_path / "folder")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8 text \(byte 17\)"):
        load_gsm8k(tmp_path / "latin.jsonl")


def test_the_hub_is_asked_for_the_main_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: str, split: str) -> datasets.Dataset:
        asked.append((*args, split))
        return datasets.Dataset.from_list([ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task("gsm8k", split="test")["answer"] == ["18"]
    assert load_task("someone/their-data")["answer"] == ["18"]
    assert asked == [(HUB_ID, "main", "test"), ("someone/their-data", "main", "train")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "t"}, "someone/their-data, train split, row 2: no column question and answer; it has text"),
        (ROW | {"answer": "who knows"}, "someone/their-data, train split, row 2: the answer must end with a line"),
    ],
)
def test_a_row_of_the_hub_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [ROW, row])
    with pytest.raises(ValueError, match=message):
        load_task("someone/their-data")


def test_a_hub_out_of_reach_is_told_with_the_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, split: str) -> datasets.Dataset:
        raise ConnectionError(f"Couldn't reach the Hub\nfor {split}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(RuntimeError, match=r"cannot load 'openai/gsm8k' .*reach.*a folder with train\.jsonl"):
        load_task("gsm8k")
