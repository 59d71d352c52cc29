"""A head that is not what its description says is refused when a trainer is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_lab.heads import check_head
from tests.heads.models import IDS, SIZES, llama


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
