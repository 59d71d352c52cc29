"""What a model answers to questions, with its adapter on or off."""

from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    *,
    adapter: bool,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
) -> list[str]:
    """Answers to `questions`, each one user message in the model's chat template.

    Args:
        model: a PEFT causal LM; its mode and the global random state are as before afterwards.
        tokenizer: padding on the left.
        questions: one an answer.
        adapter: with the adapter on; off gives the model below it.
        max_new_tokens: tokens of an answer at most.
        temperature: of the sampling, from the full vocabulary; `None` takes the likeliest token each time.
        seed: of the sampling.

    Returns:
        One answer a question, without special tokens.
    """
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
    ).to(model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    was_training = model.training
    model.eval()
    try:
        with nullcontext() if adapter else model.disable_adapter(), torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
    finally:
        model.train(was_training)
    answers: list[str] = tokenizer.batch_decode(ids[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    return answers
