"""The head that `read_head` describes against the model's own logits, for each family."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lab.heads import check_head, read_head
from tests.heads.models import FAMILIES, VOCABULARY, head_logps, llama, own_logps, phi


@pytest.fixture(params=FAMILIES)
def family_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[request.param]().eval()


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
