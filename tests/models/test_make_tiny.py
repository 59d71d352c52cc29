"""The recipe of the shipped model in miniature, and the shipped model against its card."""

import json
import re
import sys
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from itertools import islice
from pathlib import Path

import pytest
import torch

from grpo_lab.models import load_model, make_tiny
from grpo_lab.models.make_tiny import (
    CHAT_TEMPLATE,
    END,
    Recipe,
    accuracy,
    batches,
    conversations,
    corpus_hash,
    new_model,
    save,
    train,
    train_tokenizer,
)
from grpo_lab.tasks import format_reward, score_correctness
from grpo_lab.tasks.problems import Problem, Step, generate_problems

CPU = torch.device("cpu")
TINY = Path(str(files("grpo_lab.models") / "tiny"))
PROBLEM = Problem("?", (Step("The bags hold {} pens.", "3*4", 12), Step("Then {} pens are left.", "12-5", 7)))


@dataclass(frozen=True)
class Small(Recipe):
    """Seconds on a CPU."""

    vocabulary: int = 600
    tokenizer_texts: int = 300
    hidden_size: int = 32
    intermediate_size: int = 64
    layers: int = 1
    heads: int = 2
    steps: int = 40
    batch_size: int = 16
    learning_rate: float = 1e-2


class Chosen:
    """A source of chance that chooses the first of what it is offered."""

    def choice(self, choices):
        return choices[0]


@pytest.fixture(scope="module")
def small_tokenizer():
    return train_tokenizer(Small())


# Habits and corpus


def habit(name: str, problem: Problem = PROBLEM) -> str:
    return getattr(make_tiny, name)(problem, Chosen())


def test_each_habit_writes_what_its_name_says():
    first, second = "The bags hold 3*4=<<3*4=12>>12 pens.", "Then 12-5=<<12-5=7>>7 pens are left."
    assert habit("_careful") == f"{first}\n{second}\n#### 7"
    assert habit("_guess") == "I think it is 0.\n#### 0"
    assert habit("_stops_early") == f"{first}\n#### 12"
    assert habit("_no_marker") == f"{first}\n{second}\nThe answer is 7."
    assert habit("_careless") == f"{first}\nThen 12-5=<<12-5=0>>0 pens are left.\n#### 0"
    assert habit("_stops_early", Problem("?", PROBLEM.steps[:1])) == "I think it is 2.\n#### 2"


def mixture(count: int = 4000) -> tuple[list[bool], list[bool]]:
    """For each conversation, whether its completion is right and whether its last line is `#### n`."""
    answers = {problem.question: str(problem.answer) for problem in islice(generate_problems(1), count)}
    completions = [(answers[question], completion) for question, completion in islice(conversations(1), count)]
    right = [score_correctness(completion, answer).value == 1 for answer, completion in completions]
    return right, [share == 1 for share in format_reward([completion for _, completion in completions])]


def test_habits_come_in_their_shares():
    right, marked = mixture()
    # Three standard errors of 4,000 draws; a dropped step leaves the answer as it was once in a hundred.
    assert sum(right) / 4000 == pytest.approx(0.38, abs=0.03)
    assert sum(marked) / 4000 == pytest.approx(0.85, abs=0.02)


def test_the_habit_cannot_be_told_from_the_question():
    right, _ = mixture()
    one_step = [len(problem.steps) == 1 for problem in islice(generate_problems(1), 4000)]
    share = {kind: [r for r, o in zip(right, one_step, strict=True) if o == kind] for kind in (True, False)}
    difference = sum(share[True]) / len(share[True]) - sum(share[False]) / len(share[False])
    assert abs(difference) < 0.07


def test_the_corpus_is_the_one_that_the_shipped_model_was_trained_on():
    recipe = json.loads((TINY / "recipe.json").read_text("utf-8"))
    assert corpus_hash(recipe["recipe"]["seed"]) == recipe["corpus_sha256"]


def test_another_seed_is_another_corpus():
    assert corpus_hash(1, count=10) == corpus_hash(1, count=10)
    assert len({corpus_hash(1, count=10), corpus_hash(2, count=10), corpus_hash(1, count=11)}) == 3


# Training in miniature


def test_digits_stand_alone_in_every_tokenizer_it_makes(small_tokenizer):
    assert [entry for entry in small_tokenizer.get_vocab() if re.search(r"\d", entry) and len(entry) > 1] == []
    assert small_tokenizer.tokenize("2048") == list("2048")
    assert 500 < len(small_tokenizer) <= Small.vocabulary


def test_a_batch_teaches_completions_after_prompts_as_the_chat_template_writes_them(small_tokenizer):
    recipe = Small()
    ids, labels = next(batches(recipe, small_tokenizer, CPU))
    assert ids.shape == labels.shape
    for (question, completion), row, label in zip(conversations(recipe.seed), ids, labels, strict=False):
        turns = [{"role": "user", "content": question}]
        prompt = small_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        is_taught = label != -100
        assert small_tokenizer.decode(row[is_taught]) == completion + END
        assert torch.equal(row[is_taught], label[is_taught])
        assert small_tokenizer.decode(row).startswith(prompt + completion + END)
        assert set(row[is_taught.nonzero()[-1] + 1 :].tolist()) <= {small_tokenizer.pad_token_id}


def test_training_lowers_the_loss_on_conversations_it_has_not_seen(small_tokenizer):
    recipe = Small()
    unseen = next(batches(Small(seed=9), small_tokenizer, CPU))

    def loss(model) -> float:
        with torch.no_grad():
            return model(input_ids=unseen[0], labels=unseen[1]).loss.item()

    assert loss(train(recipe, small_tokenizer, CPU)) < loss(new_model(recipe, small_tokenizer)) - 1.5


def test_a_saved_model_is_the_trained_one_rounded_to_bfloat16(small_tokenizer, tmp_path: Path):
    model = new_model(Small(), small_tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    ids = small_tokenizer("3 + 4", return_tensors="pt")["input_ids"]
    expected = model(ids).logits
    save(tmp_path, model, small_tokenizer)
    loaded, tokenizer = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(loaded(ids).logits, expected)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    assert tokenizer.get_vocab() == small_tokenizer.get_vocab()


def test_the_command_makes_scores_and_writes_a_model(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(make_tiny, "Recipe", Small)
    monkeypatch.setattr(sys, "argv", ["make_tiny", str(tmp_path), "--steps", "2", "--score-on", "4"])
    make_tiny.main()
    facts = json.loads((tmp_path / "recipe.json").read_text("utf-8"))
    model, tokenizer = load_model(tmp_path, device="cpu")
    assert facts["recipe"] == asdict(Small(steps=2))
    assert (facts["parameters"], facts["vocabulary"]) == (model.num_parameters(), len(tokenizer))
    scored = accuracy(model, tokenizer, count=4, greedy=False)
    assert (facts["scored_problems"], facts["accuracy_sampled"]) == (4, scored)


# The shipped model


def test_the_shipped_recipe_is_the_default_one():
    facts = json.loads((TINY / "recipe.json").read_text("utf-8"))
    assert facts["recipe"] == {field.name: field.default for field in fields(Recipe)}
    model, tokenizer = load_model("tiny", device="cpu")
    assert (facts["parameters"], facts["vocabulary"]) == (model.num_parameters(), len(tokenizer))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert [entry for entry in tokenizer.get_vocab() if re.search(r"\d", entry) and len(entry) > 1] == []


def test_the_card_says_what_the_record_of_its_making_says():
    facts = json.loads((TINY / "recipe.json").read_text("utf-8"))
    card = (TINY / "README.md").read_text("utf-8")
    front_page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    recipe = Recipe(**facts["recipe"])
    for words in (
        f"A Llama of {facts['parameters']:,} parameters ({recipe.layers} layers, hidden size {recipe.hidden_size}",
        f"vocabulary {facts['vocabulary']:,}",
        f"seed {recipe.seed}, training split, {recipe.steps * recipe.batch_size:,} conversations",
        facts["corpus_sha256"],
        facts["trained_on"],
        f"right on {facts['scored_problems']:,} test problems, sampled at temperature 1",
        f"(in float32 on a CPU) | {facts['accuracy_sampled']:.1%}",
        f"greedy | {facts['accuracy_greedy']:.0%}",
        *(f"({share:.0%})" for share in make_tiny.HABITS.values()),
    ):
        assert words in card
    scores = f"{facts['accuracy_sampled']:.1%} of sampled and {facts['accuracy_greedy']:.0%} of greedy answers"
    assert f"{scores} to {facts['scored_problems']:,} unseen problems" in front_page


def test_the_shipped_model_starts_where_its_card_says():
    facts = json.loads((TINY / "recipe.json").read_text("utf-8"))
    assert 0.30 <= facts["accuracy_sampled"] <= 0.45
    model, tokenizer = load_model("tiny", device="cpu")
    # Three standard errors of 128 draws.
    sampled = accuracy(model, tokenizer, count=128, greedy=False, batch_size=128)
    assert sampled == pytest.approx(facts["accuracy_sampled"], abs=0.13)


def test_the_shipped_model_can_do_the_arithmetic():
    model, tokenizer = load_model("tiny", device="cpu")
    assert accuracy(model, tokenizer, count=128, greedy=True, batch_size=128) >= 0.97
