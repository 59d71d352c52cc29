"""Tiny random models of many families, and their log-probs by their own logits and by the described head."""

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from grpo_lab.heads import read_head
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
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
OLD_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make(name: str, **settings: Any) -> Any:
    """`{name}ForCausalLM` of the family, with random weights of seed 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def llama(**changes: Any) -> Any:
    return make("Llama", **(SIZES | {"tie_word_embeddings": False} | changes))


def phi() -> Any:
    model = make("Phi", **SIZES)
    nn.init.normal_(model.lm_head.bias)
    return model


def gemma3(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**OLD_SIZES, **sizes)).eval()


FAMILIES: dict[str, Any] = {
    "Llama": llama,
    "tied Llama": lambda: llama(tie_word_embeddings=True),
    "Mistral": lambda: make("Mistral", **SIZES),
    "Qwen2": lambda: make("Qwen2", **SIZES),
    "Qwen3": lambda: make("Qwen3", **SIZES, head_dim=16),
    "Gemma2": lambda: make("Gemma2", **SIZES, head_dim=16, final_logit_softcapping=5.0),
    "Gemma3": lambda: gemma3(**SIZES, head_dim=16, final_logit_softcapping=5.0),
    "Cohere": lambda: make("Cohere", **SIZES, logit_scale=0.25),
    "Cohere2": lambda: make("Cohere2", **SIZES, logit_scale=0.25),
    "Granite": lambda: make("Granite", **SIZES, logits_scaling=8.0),
    "HyperCLOVAX": lambda: make("HyperCLOVAX", **SIZES, logits_scaling=0.25),
    "Phi": phi,
    "Phi3": lambda: make("Phi3", **SIZES),
    "GPT-2": gpt2,
    "GPT-NeoX": lambda: make("GPTNeoX", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "OLMo 2": lambda: make("Olmo2", **SIZES),
    "SmolLM3": lambda: make("SmolLM3", **SIZES),
    "Mixtral": lambda: make("Mixtral", **SIZES, **EXPERTS, num_local_experts=4),
    "Qwen2-MoE": lambda: make(
        "Qwen2Moe", **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "Qwen3-MoE": lambda: make("Qwen3Moe", **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=16),
    "Granite-MoE": lambda: make("GraniteMoe", **SIZES, **EXPERTS, num_local_experts=4, logits_scaling=8.0),
}
MIXTURES = [name for name in FAMILIES if "MoE" in name or name == "Mixtral"]

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
        low_rank=head.low_rank_product(hidden_states),
        vocabulary_scale=head.vocabulary_scale,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )[0]


def with_lora(model: Any, **settings: Any) -> Any:
    """PEFT around the model, with adapters that already changed."""
    model = get_peft_model(model, LoraConfig(**({"r": 4, "task_type": "CAUSAL_LM"} | settings))).eval()
    open_adapters(model)
    return model


def open_adapters(model: Any) -> None:
    """Adapters that already changed, so that leaving one out shows."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_magnitude" in name or "trainable_tokens_delta" in name:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.data.add_(0.2 * noise)
