"""The head that `read_head` describes against the model's own logits, for each family and each state of PEFT."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_lab.heads import check_head, read_head
from grpo_lab.kernels import per_token_logps

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide enough that a missing scale, cap or bias shows in the log-probs.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"tie_word_embeddings": False} | changes))).eval()


def phi() -> PhiForCausalLM:
    model = PhiForCausalLM(PhiConfig(**SIZES))
    nn.init.normal_(model.lm_head.bias)
    return model


FAMILIES = {
    "Llama": llama,
    "tied Llama": lambda: llama(tie_word_embeddings=True),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "Gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0)),
    "Cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "Granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "Phi": phi,
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    ),
}


@pytest.fixture(params=FAMILIES)
def family_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[request.param]().eval()


IDS = torch.arange(24).reshape(2, 12) * 5 % VOCABULARY


def own_logps(model: Any) -> Tensor:
    """Log-probs of the next tokens from the model's own logits."""
    all_logps = model(input_ids=IDS, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return all_logps.gather(-1, IDS[:, 1:, None])[..., 0]


def head_logps(model: Any) -> Tensor:
    """The same through `read_head` and the kernels."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = read_head(model)
    hidden_states = base.base_model(input_ids=IDS, use_cache=False).last_hidden_state[:, :-1]
    return per_token_logps(
        hidden_states,
        head.weight,
        IDS[:, 1:],
        temperature=1.0,
        chunk_size=5,
        implementation="torch",
        bias=head.bias,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )[0]


def with_lora(model: Any, **settings: Any) -> Any:
    """PEFT around the model, with adapters that already changed."""
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_log_probs_are_those_of_the_model(family_model: PreTrainedModel):
    check_head(family_model)
    assert torch.allclose(head_logps(family_model), own_logps(family_model), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Gemma2", {"final_logit_softcapping": None}),
        ("Cohere", {"logit_scale": 1.0}),
        ("Granite", {"logits_scaling": 1.0}),
    ],
)
def test_the_families_transforms_are_far_from_none(family: str, change: dict[str, Any]):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    own = own_logps(model)
    for name, value in change.items():
        setattr(model.config, name, value)
    assert (head_logps(model) - own).abs().max() > 0.1


def test_a_head_without_its_bias_is_seen():
    torch.manual_seed(0)
    model = phi().eval()
    own = own_logps(model)
    with torch.no_grad():
        model.lm_head.bias.zero_()
    assert (head_logps(model) - own).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_probe_allows_for_the_rounding_of_low_precision(family_model: PreTrainedModel, dtype: torch.dtype):
    check_head(family_model.to(dtype))


@pytest.mark.parametrize("target_modules", [["q_proj", "lm_head"], r".*(q_proj|lm_head)"], ids=["list", "regex"])
def test_an_adapter_on_the_head_is_refused_by_name(target_modules: Any):
    model = with_lora(llama(), target_modules=target_modules)
    with pytest.raises(ValueError, match=r"adapter on the LM head 'lm_head'.*modules_to_save=\['lm_head'\]"):
        check_head(model)


@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_keeps_off_the_head(tied: bool):
    model = with_lora(llama(tie_word_embeddings=tied), target_modules="all-linear")
    assert check_head(model).weight is model.get_base_model().lm_head.weight
    assert torch.allclose(head_logps(model), own_logps(model), atol=1e-5)


def test_a_head_in_modules_to_save_is_the_copy_while_adapters_are_on():
    base = llama()
    untouched = head_logps(base)
    model = with_lora(base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    trained = model.get_base_model().lm_head.modules_to_save["default"]
    with torch.no_grad():
        trained.weight[int(IDS[0, 1])] += 1
    assert check_head(model).weight is trained.weight
    logps = head_logps(model)
    assert torch.allclose(logps, own_logps(model), atol=1e-5)
    logps.sum().backward()
    assert trained.weight.grad.abs().max() > 0
    assert model.get_base_model().lm_head.original_module.weight.grad is None
    with model.disable_adapter():
        assert read_head(model).weight is model.get_base_model().lm_head.original_module.weight
        assert torch.equal(head_logps(model), untouched)
    assert read_head(model).weight is trained.weight


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_trained_on_their_own_are_in_the_weight(tied: bool):
    indices = [3, 7] if tied else {"lm_head": [3, 7]}
    model = with_lora(llama(tie_word_embeddings=tied), target_modules=["q_proj"], trainable_token_indices=indices)
    untouched = read_head(model).weight.detach().clone()
    (deltas,) = {p for name, p in model.named_parameters() if "trainable_tokens_delta" in name}
    with torch.no_grad():
        deltas += 1
    check_head(model)
    ours, own = head_logps(model), own_logps(model)
    assert torch.allclose(ours, own, atol=1e-5)
    grads = [torch.autograd.grad(logps.square().sum(), deltas)[0] for logps in (ours, own)]
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(read_head(model).weight, untouched)
        assert torch.allclose(head_logps(model), own_logps(model), atol=1e-5)


def test_the_adapter_that_is_active_chooses_the_copy():
    model = with_lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    copies = model.get_base_model().lm_head.modules_to_save
    for name in ("other", "default"):
        model.set_adapter(name)
        assert read_head(model).weight is copies[name].weight


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.zeros(0, 64), r"\(0, 64\) torch.float32"),
        (torch.zeros(VOCABULARY * 64), r"\(8192,\) torch.float32"),
        (torch.zeros(VOCABULARY * 32, 1, dtype=torch.uint8), r"\(4096, 1\) torch.uint8"),
        (torch.zeros(VOCABULARY, 64, dtype=torch.int8), r"\(128, 64\) torch.int8"),
    ],
    ids=["empty shard", "flat shard", "4-bit", "8-bit"],
)
def test_a_sharded_or_quantised_weight_is_refused_with_what_to_do(weight: Tensor, found: str):
    model = llama()
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    for function in (read_head, check_head):
        with pytest.raises(ValueError, match=rf"LM head \(Linear\).*{found}.*gathered first.*llm_int8_skip_modules"):
            function(model)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        check_head(llama().model)


class OddLlama(LlamaForCausalLM):
    """Squares its logits, which no config field explains."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=super().forward(*args, **kwargs).logits.square())


def test_an_unknown_transform_of_the_logits_is_refused():
    model = OddLlama(LlamaConfig(**SIZES, logit_power=2)).train()
    with pytest.raises(ValueError, match=r"log-probs of OddLlama differ by .*config fields about logits: logit_power"):
        check_head(model)
    assert model.training


class OverflowingLlama(LlamaForCausalLM):
    """Gives NaN where its logits are large."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits = super().forward(*args, **kwargs).logits
        return SimpleNamespace(logits=torch.where(logits.abs() < 10, logits, torch.nan))


def test_logits_that_are_not_numbers_are_refused():
    torch.manual_seed(0)
    model = OverflowingLlama(LlamaConfig(**(SIZES | {"initializer_range": 0.02})))
    with pytest.raises(ValueError, match="log-probs of OverflowingLlama differ by nan"):
        check_head(model)


class CappedLlama(LlamaForCausalLM):
    """Caps its logits at 30, which no config field tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=30 * torch.tanh(super().forward(*args, **kwargs).logits / 30))


def test_a_cap_is_seen_though_the_model_is_young_and_its_logits_small():
    torch.manual_seed(0)
    model = CappedLlama(LlamaConfig(**(SIZES | {"initializer_range": 0.02})))
    assert model(IDS).logits.abs().max() < 1
    with pytest.raises(ValueError, match="log-probs of CappedLlama differ by"):
        check_head(model)
    assert not model.lm_head._forward_hooks


def test_the_probe_keeps_each_module_in_its_mode():
    model = llama().train()
    model.model.layers[0].eval()
    check_head(model)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
