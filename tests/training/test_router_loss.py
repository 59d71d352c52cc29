"""The router loss beside chunked log-probs against the `aux_loss` of each family's plain forward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from grpo_lab.training.chunked_head import HeadSettings, attach_chunked_head
from grpo_lab.training.router_loss import check_router_loss, router_loss
from tests.heads.models import EXPERTS, FAMILIES, IDS, MIXTURES, SIZES, llama

MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)


def attached(model: Any) -> Any:
    attach_chunked_head(model, lambda: HeadSettings(temperature=0.7, chunk_size=5, implementation="torch"))
    return model


@pytest.mark.parametrize("family", MIXTURES)
def test_value_and_gradient_are_those_of_the_plain_forward_pass(family: str):
    model = FAMILIES[family]()
    check_router_loss(model)
    routers = [p for name, p in model.named_parameters() if "router" in name or "mlp.gate.weight" in name]
    assert routers
    own = model(input_ids=IDS, attention_mask=MASK, use_cache=False, output_router_logits=True).aux_loss
    expected = torch.autograd.grad(own, routers)
    output = attached(model)(input_ids=IDS, attention_mask=MASK, labels=LABELS, fused_lm_head=True)
    assert output.aux_loss.item() == pytest.approx(own.item(), rel=1e-5)
    for gradient, own_gradient in zip(torch.autograd.grad(output.aux_loss, routers), expected, strict=True):
        assert torch.allclose(gradient, own_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("asked", [None, False, True])
def test_it_is_there_where_the_config_or_the_call_asks(asked: bool | None):
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **(EXPERTS | {"output_router_logits": asked is None})))
    call = {} if asked is None else {"output_router_logits": asked}
    output = attached(model)(input_ids=IDS, labels=LABELS, fused_lm_head=True, **call)
    assert (output.aux_loss is None) == (asked is False)
    assert attached(llama())(input_ids=IDS, labels=LABELS, fused_lm_head=True).aux_loss is None


class DoubledMixtral(MixtralForCausalLM):
    """Doubles its router loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(aux_loss=2 * super().forward(*args, **kwargs).aux_loss)


def test_a_router_loss_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no router loss .*router_aux_loss_coef=0.0"):
        router_loss(llama(), (torch.zeros(4, 4),), None)
    DoubledMixtral.__module__ = MixtralForCausalLM.__module__  # as a family of its own would be found
    with pytest.raises(ValueError, match=r"the router loss of DoubledMixtral is .*router_aux_loss_coef=0.0"):
        check_router_loss(DoubledMixtral(MixtralConfig(**SIZES, **EXPERTS)))
