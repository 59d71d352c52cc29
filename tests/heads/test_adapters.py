"""Each state of PEFT's adapters on the LM head: log-probs and gradients are those of the model's own logits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import IA3Config, LoKrConfig, LoraConfig, get_peft_model
from torch import Tensor

from grpo_lab.heads import check_head, read_head
from tests.heads.models import IDS, head_logps, llama, open_adapters, own_logps, phi, with_lora


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_same_log_probs_and_gradients(model: Any) -> None:
    """By the described head and by the model's own logits, for every trainable tensor."""
    parameters = trainable(model)
    ours, own = head_logps(model), own_logps(model)
    assert torch.allclose(ours, own, atol=1e-5)
    grads, own_grads = (
        torch.autograd.grad(logps.square().sum(), list(parameters.values()), allow_unused=True) for logps in (ours, own)
    )
    for name, grad, own_grad in zip(parameters, grads, own_grads, strict=True):
        assert (grad is None) == (own_grad is None), name
        if grad is not None:
            assert torch.allclose(grad, own_grad, rtol=1e-4, atol=1e-4 * float(own_grad.abs().max())), name
    check_head(model)


def two_adapters() -> Any:
    model = with_lora(llama(), target_modules=["q_proj", "lm_head"])
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])
    open_adapters(model)
    return model.eval()


ON_THE_HEAD: dict[str, Callable[[], Any]] = {
    "list": lambda: with_lora(llama(), target_modules=["q_proj", "lm_head"]),
    "pattern": lambda: with_lora(llama(), target_modules=r".*(q_proj|lm_head)"),
    "tied head": lambda: with_lora(llama(tie_word_embeddings=True), target_modules=["q_proj", "lm_head"]),
    "rank 1, own scale": lambda: with_lora(llama(), r=1, lora_alpha=7, target_modules=["lm_head"]),
    "rsLoRA": lambda: with_lora(llama(), use_rslora=True, target_modules=["q_proj", "lm_head"]),
    "dropout, in evaluation": lambda: with_lora(llama(), lora_dropout=0.5, target_modules=["lm_head"]),
    "head with a bias": lambda: with_lora(phi(), target_modules=["q_proj", "lm_head"]),
    "LoRA with a bias": lambda: with_lora(phi(), lora_bias=True, target_modules=["lm_head"]),
    "DoRA": lambda: with_lora(llama(), use_dora=True, target_modules=["q_proj", "lm_head"]),
    "DoRA, head with a bias": lambda: with_lora(phi(), use_dora=True, target_modules=["lm_head"]),
    "two adapters": two_adapters,
    "head trained in full": lambda: with_lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": lambda: with_lora(llama(), target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 7]}),
    "tokens, tied head": lambda: with_lora(
        llama(tie_word_embeddings=True), target_modules=["q_proj"], trainable_token_indices=[3, 7]
    ),
}
on_the_head = pytest.mark.parametrize("make", ON_THE_HEAD.values(), ids=ON_THE_HEAD)


@on_the_head
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(make: Callable[[], Any]):
    assert_same_log_probs_and_gradients(make())


@on_the_head
def test_the_adapter_is_far_from_none_and_off_within_its_context(make: Callable[[], Any]):
    model = make()
    on = head_logps(model)
    with model.disable_adapter():
        off = head_logps(model)
        assert torch.allclose(off, own_logps(model), atol=1e-5)
        assert read_head(model).low_rank is None
    assert (on - off).abs().max() > 0.05
    assert torch.equal(head_logps(model), on)


@on_the_head
def test_merged_adapters_are_in_the_weight_alone(make: Callable[[], Any]):
    model = make()
    separate = head_logps(model)
    model.merge_adapter()
    assert read_head(model).low_rank is None
    merged = head_logps(model)
    assert torch.allclose(merged, own_logps(model), atol=1e-5)
    # Merging LoRA into a head that is also the embedding changes the hidden states too.
    if model.active_peft_config.target_modules != {"q_proj", "lm_head"} or not model.config.tie_word_embeddings:
        assert torch.allclose(merged, separate, atol=2e-4)
    model.unmerge_adapter()
    assert torch.allclose(head_logps(model), separate, atol=2e-4)


def test_merged_adapters_that_are_switched_off_leave_the_weight():
    base = llama()
    untouched = head_logps(base)
    model = with_lora(base, target_modules=["lm_head"])
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.allclose(head_logps(model), untouched, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_keeps_off_the_head(tied: bool):
    model = with_lora(llama(tie_word_embeddings=tied), target_modules="all-linear")
    head = check_head(model)
    assert head.weight is model.get_base_model().lm_head.weight
    assert head.low_rank is None
    assert torch.allclose(head_logps(model), own_logps(model), atol=1e-5)


def test_a_head_in_modules_to_save_is_the_copy_while_adapters_are_on():
    base = llama()
    untouched = head_logps(base)
    model = with_lora(base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    trained = model.get_base_model().lm_head.modules_to_save["default"]
    with torch.no_grad():
        trained.weight[int(IDS[0, 1])] += 1
    assert check_head(model).weight is trained.weight
    head_logps(model).sum().backward()
    assert trained.weight.grad.abs().max() > 0
    assert model.get_base_model().lm_head.original_module.weight.grad is None
    with model.disable_adapter():
        assert read_head(model).weight is model.get_base_model().lm_head.original_module.weight
        assert torch.equal(head_logps(model), untouched)
    assert read_head(model).weight is trained.weight


def test_the_adapter_that_is_active_chooses_the_copy():
    model = with_lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    copies = model.get_base_model().lm_head.modules_to_save
    for name in ("other", "default"):
        model.set_adapter(name)
        assert read_head(model).weight is copies[name].weight


def test_the_adapter_that_is_active_is_the_one_that_is_added():
    model = two_adapters()
    both = head_logps(model)
    seen = []
    for name in ("default", "other"):
        model.set_adapter(name)
        seen.append(head_logps(model))
        assert torch.allclose(seen[-1], own_logps(model), atol=1e-5)
    for one in (*seen, seen[0]):
        assert (one - both).abs().max() > 0.05


def test_dropout_of_the_adapter_on_the_head_is_applied_in_training():
    model = with_lora(llama(), lora_dropout=0.5, target_modules=["lm_head"]).train()
    first, second = head_logps(model), head_logps(model)
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_low_precision_model_with_adapters_in_fp32(dtype: torch.dtype, autocast: bool):
    model = with_lora(llama().to(dtype), target_modules=["q_proj", "lm_head"])
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    check_head(model)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        difference = head_logps(model) - own_logps(model)
    rounded = autocast or dtype == torch.bfloat16
    assert difference.abs().max() < (0.2 if rounded else 1e-5)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "IA3": (
        lambda: get_peft_model(llama(), IA3Config(target_modules=["lm_head"], feedforward_modules=[])),
        r"ia3.layer.Linear puts an adapter on the LM head .*It knows LoRA and DoRA.*\(module 'lm_head'\)",
    ),
    "LoKr": (
        lambda: get_peft_model(llama(), LoKrConfig(target_modules=["lm_head"])),
        r"lokr.layer.Linear puts an adapter on the LM head .*\(module 'lm_head'\)",
    ),
    "DoRA with dropout": (
        lambda: with_lora(llama(), use_dora=True, lora_dropout=0.1, target_modules=["lm_head"]),
        r"DoRA adapter 'default' drops inputs of the LM head \(lora_dropout 0.1\).*\(module 'lm_head'\)",
    ),
    "another variant": (
        lambda: get_peft_model(
            llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], alora_invocation_tokens=[1, 2])
        ),
        r"'default' is a LoRA variant \(ALoraLinearVariant\).*\(module 'lm_head'\)",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_refused_by_name(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        check_head(make())


def test_dora_beside_another_adapter_is_refused_by_name():
    model = with_lora(llama(), use_dora=True, target_modules=["lm_head"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="DoRA adapter 'default' shares the LM head with other"):
        check_head(model)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_fine_tuning_the_adapter_on_the_head_learns(settings: dict[str, Any]):
    model = with_lora(llama(), target_modules=["lm_head"], **settings)
    assert all("lm_head" in name for name in trainable(model))
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = -head_logps(model).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert -own_logps(model).mean().item() < losses[-1] + 0.1
