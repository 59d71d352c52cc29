"""The shipped model is what its card says, and its recipe runs."""

import json
import random
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from grpo_lab.models import load_model
from grpo_lab.models.make_tiny import (
    HABITS,
    Recipe,
    accuracy,
    conversations,
    corpus_hash,
    save,
    train,
    train_tokenizer,
)
from grpo_lab.tasks import score_correctness
from grpo_lab.tasks.problems import generate_problems

FOLDER = Path(str(files("grpo_lab.models") / "tiny"))


def test_the_card_and_the_recipe_agree_with_the_data() -> None:
    facts = json.loads((FOLDER / "recipe.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert facts["corpus_sha256"] == corpus_hash(facts["recipe"]["seed"])
    assert corpus_hash(facts["recipe"]["seed"] + 1) != facts["corpus_sha256"]
    assert facts["corpus_sha256"] in card
    assert f"{facts['parameters']:,}" in card
    assert f"{facts['vocabulary']:,}" in card
    assert f"{facts['accuracy_sampled']:.1%}" in card
    assert f"{facts['accuracy_greedy']:.0%}" in card
    assert Recipe(**facts["recipe"]) == Recipe()


def test_the_model_is_small_and_right_four_times_in_ten() -> None:
    model, tokenizer = load_model("tiny", dtype="float32", device="cpu")
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 4_000_000
    sampled = accuracy(model, tokenizer, count=128, greedy=False)
    assert 0.30 <= sampled <= 0.56
    assert accuracy(model, tokenizer, count=64, greedy=True) > 0.95


def test_the_tokenizer_keeps_any_text_and_splits_digits() -> None:
    _, tokenizer = load_model("tiny", device="cpu")
    text = "Zoë’s 3½ 🙂 tests:\n#### 1,234"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("12345")["input_ids"]) == 5
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>2 + 2?<|end|><|assistant|>"


def test_the_careful_habit_is_right_and_every_other_is_wrong() -> None:
    assert sum(HABITS.values()) == pytest.approx(1.0)
    problems = generate_problems(3)
    for _ in range(300):
        problem = next(problems)
        for habit in HABITS:
            score = score_correctness(habit(problem, random.Random(0)), str(problem.answer))
            # A story may end on the number that it passed before its last step.
            early = len(problem.steps) > 1 and problem.steps[-2].result == problem.answer
            right = habit.__name__ == "_careful" or (habit.__name__ == "_stops_early" and early)
            assert score.value == float(right), (habit.__name__, problem)


def test_habits_are_drawn_in_their_shares() -> None:
    stream = conversations(5)
    answers = [next(stream)[1] for _ in range(2000)]
    assert sum("I think" in a for a in answers) / 2000 == pytest.approx(0.22 + 0.17 / 6, abs=0.04)
    assert sum("####" not in a for a in answers) / 2000 == pytest.approx(0.15, abs=0.03)


def test_the_recipe_runs_in_miniature(tmp_path: Path) -> None:
    recipe = replace(
        Recipe(), vocabulary=400, tokenizer_texts=200, hidden_size=16, intermediate_size=32, layers=1, heads=2,
        steps=2, batch_size=4,
    )  # fmt: skip
    tokenizer = train_tokenizer(recipe)
    model = train(recipe, tokenizer, torch.device("cpu"))
    save(tmp_path / "made", model, tokenizer)
    loaded, _ = load_model(str(tmp_path / "made"), dtype="bfloat16", device="cpu")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
