"""A random Llama of two layers, with a byte-level tokenizer made from the text below."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "Anna has 3 apples and buys 4 more. How many apples does she have? 3 + 4 = 7 #### 7"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special_tokens)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` writes it: no pad token, and turns end with another token than eos."""
    tokenizer = make_tokenizer(eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path / "llama"
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert "pad_token" not in json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    return folder
