import math
from pathlib import Path

import pytest
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from grpo_lab.models.adapters import lora_config


def test_all_linear_layers_but_the_head_are_adapted(llama: Path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), lora_config(r=4, alpha=8, dropout=0.1))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 2.0
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.lora_dropout["default"].p == 0.1
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def test_named_modules_alone_are_adapted(llama: Path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), lora_config(4, 8, ("q_proj", "v_proj")))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_a_module_that_the_model_lacks_is_named(llama: Path):
    with pytest.raises(ValueError, match="query_key_value"):
        get_peft_model(AutoModelForCausalLM.from_pretrained(llama), lora_config(4, 8, ["query_key_value"]))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"r": 0, "alpha": 8}, "r "),
        ({"r": 2.5, "alpha": 8}, "r "),
        ({"r": True, "alpha": 8}, "r "),
        ({"r": 4, "alpha": 0}, "alpha "),
        ({"r": 4, "alpha": math.nan}, "alpha "),
        ({"r": 4, "alpha": 8, "dropout": 1.0}, "dropout "),
        ({"r": 4, "alpha": 8, "dropout": -0.1}, "dropout "),
        ({"r": 4, "alpha": 8, "target_modules": []}, "target_modules "),
    ],
)
def test_an_argument_outside_its_range_is_named(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        lora_config(**arguments)
