"""The trainer tests' common things as fixtures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lab.training import ChunkedGRPOTrainer
from tests.training.small import build_trainer, fixed_rollouts, lora_config, open_adapter_, tiny_llama, word_tokenizer


@pytest.fixture
def model_factory() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """`make_trainer(cls, model=..., lora=..., **config)`: a trainer on four prompts."""

    def make(cls: type = ChunkedGRPOTrainer, **options: Any) -> Any:
        meter = options.pop("meter", None)
        around = options.pop("around", {}) | ({} if meter is None else {"meter": meter})
        return build_trainer(cls, tmp_path, around=around, **options)

    return make


@pytest.fixture
def rollouts() -> dict[str, torch.Tensor]:
    return fixed_rollouts()


@pytest.fixture
def lora() -> Callable[..., LoraConfig]:
    return lora_config


@pytest.fixture
def open_adapter() -> Callable[[Any], None]:
    return open_adapter_
