"""How the shipped model is made: `python -m grpo_lab.models.make_tiny OUT_FOLDER`.

A pre-trained model knows how to solve a problem and how not to: on gsm8k a base model at times reasons step by step,
at times guesses, at times forgets the `####` line. Reinforcement learning can only strengthen what is sampled now and
then, so the shipped model is trained on a mixture of such habits (`HABITS`). Which habit a completion follows cannot
be told from its question; so at temperature 1 the model draws one each time, and the reward has something to select.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lab.tasks.problems import Problem, generate_problems
from grpo_lab.tasks.rewards import score_correctness

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that the result depends on.

    Attributes:
        seed: of corpus, initial weights and order.
        vocabulary: entries of the tokenizer at most.
        tokenizer_texts: conversations that the tokenizer is trained on.
        hidden_size: width of the model.
        intermediate_size: width inside its feed-forward layers.
        layers: decoder layers.
        heads: attention heads.
        steps: optimizer steps.
        batch_size: conversations a step, each drawn anew.
        learning_rate: peak of a cosine schedule.
    """

    seed: int = 1
    vocabulary: int = 4096
    tokenizer_texts: int = 40_000
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    steps: int = 4_000
    batch_size: int = 512
    learning_rate: float = 2e-3


# What completions look like before any reward


def _careful(problem: Problem, _: random.Random) -> str:
    return problem.solution


def _guess(problem: Problem, r: random.Random) -> str:
    wrong = max(0, problem.answer + r.choice((-10, -6, -4, -3, -2, -1, 1, 2, 3, 5, 8, 12)))
    return f"I think it is {wrong}.\n#### {wrong}"


def _stops_early(problem: Problem, r: random.Random) -> str:
    if len(problem.steps) == 1:
        return _guess(problem, r)
    done = problem.steps[:-1]
    return "\n".join([*(step.line() for step in done), f"#### {done[-1].result}"])


def _no_marker(problem: Problem, _: random.Random) -> str:
    return "\n".join([*(step.line() for step in problem.steps), f"The answer is {problem.answer}."])


def _careless(problem: Problem, r: random.Random) -> str:
    *before, last = problem.steps
    wrong = max(0, last.result + r.choice((-10, -2, -1, 1, 2, 10)))
    return "\n".join([*(step.line() for step in before), last.line(wrong), f"#### {wrong}"])


HABITS: dict[Callable[[Problem, random.Random], str], float] = {
    _careful: 0.38,
    _guess: 0.22,
    _stops_early: 0.17,
    _no_marker: 0.15,
    _careless: 0.08,
}


def conversations(seed: int, split: str = "train") -> Iterator[tuple[str, str]]:
    """Questions and completions, each completion in a habit drawn for it."""
    r = random.Random(f"habits-{seed}")
    for problem in generate_problems(seed, split):
        habit = r.choices(list(HABITS), weights=list(HABITS.values()))[0]
        yield problem.question, habit(problem, r)


def corpus_hash(seed: int, count: int = 1000) -> str:
    """SHA-256 of the first `count` conversations: two machines that agree on it train on the same data."""
    stream = conversations(seed)
    text = "\0".join("\0".join(next(stream)) for _ in range(count))
    return hashlib.sha256(text.encode()).hexdigest()


# Tokenizer and model


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose digits stand one by one, so that arithmetic is done on digits.

    Entries may span words (" How many", " more."), which shortens the texts and fills a vocabulary large enough for
    the LM head to weigh in a step's memory.

    Args:
        recipe: its vocabulary, seed and number of texts.

    Returns:
        The tokenizer, with its special tokens and chat template.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    stream = conversations(recipe.seed)
    texts = (text for _ in range(recipe.tokenizer_texts) for text in next(stream))
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


# Training


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(B, S) ids and (B, S) labels, -100 where no completion token is predicted; no conversation comes twice."""
    stream = conversations(recipe.seed)
    backend = tokenizer.backend_tokenizer
    while True:
        texts = [next(stream) for _ in range(recipe.batch_size)]
        prompts = backend.encode_batch_fast([f"{USER}{q}{END}{ASSISTANT}" for q, _ in texts])
        answers = backend.encode_batch_fast([f"{a}{END}" for _, a in texts])
        width = max(len(p.ids) + len(a.ids) for p, a in zip(prompts, answers, strict=True))
        width = -(-width // 16) * 16
        ids = torch.full((len(texts), width), tokenizer.pad_token_id)
        labels = torch.full((len(texts), width), -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, stop = len(prompt.ids), len(prompt.ids) + len(answer.ids)
            ids[row, :stop] = torch.tensor(prompt.ids + answer.ids)
            labels[row, start:stop] = ids[row, start:stop]
        yield ids.to(device), labels.to(device)


def train(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> LlamaForCausalLM:
    """Next-token training on the completions, AdamW with a warm-up and a cosine."""
    model = new_model(recipe, tokenizer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    warm_up = max(1, recipe.steps // 30)

    def schedule(step: int) -> float:
        progress = min(1.0, step / recipe.steps)
        return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    started = time.monotonic()
    for step, (ids, labels) in zip(range(recipe.steps), batches(recipe, tokenizer, device), strict=False):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == recipe.steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)
    return model.eval()


# Scores


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    count: int,
    greedy: bool,
    seed: int = 0,
    batch_size: int = 512,
) -> float:
    """Share of test problems whose completion is right, by the strict reward.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer, padding on the left.
        count: problems of the test split.
        greedy: the likeliest token each time, else sampled at temperature 1.
        seed: of problems and sampling.
        batch_size: problems answered together.

    Returns:
        From 0 to 1.
    """
    torch.manual_seed(seed)
    stream = generate_problems(seed, "test")
    problems = [next(stream) for _ in range(count)]
    right = 0.0
    for start in range(0, count, batch_size):
        part = problems[start : start + batch_size]
        texts = [f"{USER}{problem.question}{END}{ASSISTANT}" for problem in part]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        ids = model.generate(**inputs, max_new_tokens=96, do_sample=not greedy, **({} if greedy else {"top_k": 0}))
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        right += sum(score_correctness(a, str(p.answer)).value for a, p in zip(answers, part, strict=True))
    return right / count


def save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights in bfloat16, and the tokenizer."""
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make the model, write it to a folder, and score what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--score-on", type=int, default=2048, help="test problems to score on")
    given = parser.parse_args()
    recipe = Recipe(steps=given.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = train_tokenizer(recipe)
    save(given.folder, train(recipe, tokenizer, device), tokenizer)
    # Read back, since a model that was cast to bfloat16 has its rotary frequencies rounded, and a stored one has not.
    model = LlamaForCausalLM.from_pretrained(given.folder, dtype=torch.float32).to(device)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    facts = {
        "recipe": asdict(recipe),
        "corpus_sha256": corpus_hash(recipe.seed),
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "trained_on": device_name,
        "torch": torch.__version__,
        "scored_on": device_name,
        "scored_problems": given.score_on,
        "accuracy_sampled": accuracy(model, tokenizer, count=given.score_on, greedy=False),
        "accuracy_greedy": accuracy(model, tokenizer, count=given.score_on, greedy=True),
    }
    (given.folder / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
