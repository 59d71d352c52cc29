"""A random two-layer Llama, a word tokenizer, fixed rollouts, and trainers on them: what the trainer tests share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

VOCABULARY = 128
PROMPTS = ("w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w12")
TRL_CONFIGS: dict[type, type] = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 7,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}


TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that log-probs differ clearly from token to token.
    "initializer_range": 0.2,
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(TINY | changes)))


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def even_reward(completions: list[str], **_: Any) -> list[float]:
    """Share of even words: a reward that spreads within every group."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split() if word.startswith("w")) / 7 for text in completions]


def long_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tokens of a completion."""
    return [float(len(ids)) for ids in completion_ids]


def lora_config(**changes: Any) -> LoraConfig:
    """Rank 4 on every linear layer but the head."""
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | changes))


def open_adapter_(model: Any) -> None:
    """Give every `lora_B` values that are not zero, the same for the same model."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def build_trainer(
    cls: type,
    folder: Path,
    model: Any = None,
    lora: LoraConfig | None = None,
    reward: Callable[..., list[float]] | list[Callable[..., list[float]]] = even_reward,
    around: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A trainer of the class on four prompts; `around` goes to the trainer itself, `config` to its arguments."""
    config_class = TRL_CONFIGS.get(cls) or cls.config_class
    trainer = cls(
        model=model or tiny_llama(),
        reward_funcs=reward,
        args=config_class(**(ARGUMENTS | {"output_dir": str(folder)} | config)),
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * 8}),
        processing_class=word_tokenizer(),
        peft_config=lora,
        **(around or {}),
    )
    # Set by the training loop, which a test of one loss does not enter.
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def fixed_rollouts() -> dict[str, torch.Tensor]:
    """Eight left-padded prompts and ragged completions, one of them fully masked."""
    generator = torch.Generator().manual_seed(1)
    prompt_lengths, completion_lengths = [2, 5, 1, 5, 3, 4, 5, 2], [7, 3, 1, 5, 7, 2, 4, 0]
    prompt_ids = torch.zeros(8, 5, dtype=torch.long)
    completion_ids = torch.zeros(8, 7, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        prompt_ids[row, 5 - prompt :] = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
        completion_ids[row, :completion] = torch.randint(3, VOCABULARY, (completion,), generator=generator)
    completion_mask = (torch.arange(7) < torch.tensor(completion_lengths)[:, None]).long()
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids != 0).long(),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.0, 0.3]),
        "num_items_in_batch": completion_mask.sum(),
    }
