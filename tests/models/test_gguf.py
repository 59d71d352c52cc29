"""Conversion of a GGUF file that is written here from a random Llama, so every weight and token is known."""

import functools
import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from grpo_lab.models import gguf, load_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two halves of each head alternate."""
    return weight.view(heads, 2, -1, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(model_folder: Path, file: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types([3 if token_id < 4 else 1 for token_id in range(len(tokenizer))])
    writer.add_token_merges(merges(tokenizer))
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    writer.add_chat_template(tokenizer.chat_template)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied to the embeddings
    for name, weight in weights.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = interleave_rotary_halves(weight, heads) if heads else weight
        writer.add_tensor(gguf_name(name), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def merges(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    in_folder = functools.partial(huggingface_hub.cached_assets_path, assets_dir=folder)
    monkeypatch.setattr(huggingface_hub, "cached_assets_path", in_folder)
    return folder


@pytest.fixture
def gguf_file(llama: Path, tmp_path: Path) -> Path:
    file = tmp_path / "files" / "random.gguf"
    file.parent.mkdir()
    write_gguf(llama, file)
    return file


def test_a_gguf_file_gives_the_weights_and_the_tokenizer_that_it_was_made_from(gguf_file, llama, cache):
    model, tokenizer = load_model(gguf_file, device="cpu")
    original = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).float()
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    ids = tokenizer("Anna has 3 apples", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [AutoTokenizer.from_pretrained(llama)("Anna has 3 apples")["input_ids"]]
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(llama).chat_template
    assert model.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_the_model_of_a_gguf_file_trains_and_saves(gguf_file, cache, tmp_path):
    model, tokenizer = load_model(gguf_file.parent, device="cpu")
    ids = tokenizer("Anna has 3 apples", return_tensors="pt")["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved(ids).logits, model(ids).logits)


def test_a_file_is_converted_once_until_it_changes(gguf_file, cache, monkeypatch):
    conversions = []
    convert = gguf._convert
    monkeypatch.setattr(gguf, "_convert", lambda *paths: (conversions.append(paths), convert(*paths)))
    folder = gguf.converted_folder(gguf_file)
    assert folder.is_relative_to(cache)
    assert gguf.converted_folder(gguf_file) == folder
    assert len(conversions) == 1
    os.utime(gguf_file, ns=(0, 1))
    assert gguf.converted_folder(gguf_file) != folder
    assert len(conversions) == 2


def test_an_interrupted_conversion_leaves_nothing(gguf_file, cache, monkeypatch):
    def interrupted(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}", "utf-8")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf.converted_folder(gguf_file)
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert (gguf.converted_folder(gguf_file) / "model.safetensors").is_file()


def test_two_conversions_at_once_agree_on_one_folder(gguf_file, cache, monkeypatch):
    convert = gguf._convert

    def overtaken(file: Path, folder: Path) -> None:
        monkeypatch.setattr(gguf, "_convert", convert)
        gguf.converted_folder(file)
        convert(file, folder)

    monkeypatch.setattr(gguf, "_convert", overtaken)
    folder = gguf.converted_folder(gguf_file)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_file_that_is_no_gguf_is_refused(tmp_path, cache):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model" * 100)
    with pytest.raises(ValueError, match=r"broken\.gguf cannot be read as a GGUF model"):
        load_model(file)


def test_a_folder_with_two_gguf_files_is_refused_by_their_names(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"exactly one GGUF file; found: a\.gguf, b\.gguf"):
        load_model(tmp_path)


def test_without_the_package_gguf_the_message_says_what_to_install(gguf_file, cache, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"pip install 'grpo-lab\[gguf\]'"):
        load_model(gguf_file)
