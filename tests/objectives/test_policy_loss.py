"""The clipped losses by hand-worked numbers, by their gradients, and for any split of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.objectives import PolicyLossOptions, aggregate_token_losses, k3_kl, policy_loss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
LEVELS = ("token", "sequence")


def loss_of_ratios(ratios: list[float], advantage: float, **options: Any):
    """Token-mean loss of one sequence with these ratios, and its gradient by log-prob."""
    logps = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    zeros, mask = torch.zeros(1, len(ratios)), torch.ones(1, len(ratios))
    result = policy_loss(
        logps,
        zeros,
        torch.tensor([advantage]),
        mask,
        PolicyLossOptions("bnpo", **options),
        ref_per_token_logps=zeros,
    )
    (grad,) = torch.autograd.grad(result.loss, logps)
    return result.loss.item(), grad[0].tolist(), result.metrics


def rollouts(seed: int = 0) -> dict[str, Any]:
    """B=8, T=7, ragged masks, ratios on both sides of the clip, advantages of both signs."""
    random = torch.Generator().manual_seed(seed)
    logps = -torch.rand(8, 7, generator=random, dtype=torch.float64) * 3
    noise = [torch.randn(8, 7, generator=random, dtype=torch.float64) * 0.3 for _ in range(2)]
    lengths = torch.tensor([7, 3, 5, 1, 7, 2, 6, 4])
    return {
        "per_token_logps": logps,
        "old_per_token_logps": logps + noise[0],
        "ref_per_token_logps": logps + noise[1],
        "advantages": torch.randn(8, generator=random, dtype=torch.float64),
        "completion_mask": (torch.arange(7) < lengths[:, None]).long(),
    }


def scored(tensors: dict[str, Any], options: PolicyLossOptions, **numbers: Any) -> tuple[Tensor, Tensor, dict]:
    tensors = tensors | {"per_token_logps": tensors["per_token_logps"].detach().requires_grad_()}
    numbers = {"max_completion_length": 7, "num_items_in_batch": 35.0} | numbers
    result = policy_loss(**tensors, options=options, **numbers)
    (grad,) = torch.autograd.grad(result.loss, tensors["per_token_logps"])
    return result.loss, grad, result.metrics


def test_clip_by_the_sign_of_the_advantage():
    # +1: min(0.5, 0.8) = 0.5; 1; min(1.5, 1.2) = 1.2 without gradient.
    loss, grad, metrics = loss_of_ratios([0.5, 1.0, 1.5], 1.0)
    assert loss == pytest.approx(-(0.5 + 1 + 1.2) / 3)
    assert grad == pytest.approx([-0.5 / 3, -1 / 3, 0])
    assert metrics == pytest.approx(
        {"clip_ratio/low_mean": 0, "clip_ratio/high_mean": 1 / 3, "clip_ratio/region_mean": 1 / 3}
    )
    # -1: max(0.5, 0.8) = 0.8 without gradient; 1; max(1.5, 1.2) = 1.5.
    loss, grad, metrics = loss_of_ratios([0.5, 1.0, 1.5], -1.0)
    assert loss == pytest.approx((0.8 + 1 + 1.5) / 3)
    assert grad == pytest.approx([0, 1 / 3, 1.5 / 3])
    assert metrics == pytest.approx(
        {"clip_ratio/low_mean": 1 / 3, "clip_ratio/high_mean": 0, "clip_ratio/region_mean": 1 / 3}
    )


def test_clip_higher_moves_the_upper_side_only():
    loss, _, metrics = loss_of_ratios([0.7, 1.25, 1.5], 1.0, epsilon_high=0.28)
    assert loss == pytest.approx(-(0.7 + 1.25 + 1.28) / 3)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    loss, _, metrics = loss_of_ratios([0.7, 0.85, 1.5], -1.0, epsilon_high=0.28)
    assert loss == pytest.approx((0.8 + 0.85 + 1.5) / 3)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 3)


def test_delta_bounds_large_ratios_of_negative_advantages():
    loss, grad, _ = loss_of_ratios([9.0, 3.0], -1.0, delta=4.0)
    assert loss == pytest.approx((4 + 3) / 2)
    assert grad == pytest.approx([0, 1.5])
    loss, _, _ = loss_of_ratios([9.0, 3.0], 1.0, delta=4.0)
    assert loss == pytest.approx(-1.2)


def test_one_ratio_a_sequence_is_the_geometric_mean():
    loss, grad, metrics = loss_of_ratios([0.9, 1.1, 1.0], 1.0, importance_sampling_level="sequence")
    ratio = 0.99 ** (1 / 3)
    assert loss == pytest.approx(-ratio)
    assert grad == pytest.approx([-ratio / 3] * 3)
    assert metrics["clip_ratio/region_mean"] == 0


def test_kl_by_hand():
    # Policy at ratio 2 to a reference at log-prob 0: d = -log 2, exp(d) - d - 1 = 0.193147.
    assert k3_kl(torch.tensor(2.0).log(), torch.tensor(0.0)).item() == pytest.approx(0.193147, abs=1e-6)
    loss, _, metrics = loss_of_ratios([2.0], 0.0, beta=0.1, use_bias_correction_kl=False)
    assert loss == pytest.approx(0.0193147, abs=1e-7)
    assert metrics["kl"] == pytest.approx(0.193147, abs=1e-6)
    loss, grad, _ = loss_of_ratios([2.0], 0.0, beta=0.1)
    assert loss == pytest.approx(0.0386294, abs=1e-7)
    # d/dlogp of ratio k3 = ratio (k3 + 1 - exp(d)) = 2 (0.193147 + 0.5).
    assert grad == pytest.approx([0.1 * 2 * 0.693147], abs=1e-6)


def test_kl_is_never_negative_and_zero_at_the_reference():
    logps = torch.linspace(-5, 0, 11)
    assert k3_kl(logps, logps.flip(0)).min() >= 0
    assert torch.equal(k3_kl(logps, logps), torch.zeros(11))


def test_normalisers_by_hand():
    ones = torch.ones(2, 4)
    half = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    # A truncated row that is masked counts in no divisor.
    assert aggregate_token_losses(ones, half, "bnpo").item() == 1
    assert aggregate_token_losses(ones, half, "dapo", num_items_in_batch=4.0).item() == 1
    # Two micro-batches: 2 tokens of loss 1 and 6 of loss 3.
    parts = [(torch.full((1, 2), 1.0), torch.ones(1, 2)), (torch.full((1, 6), 3.0), torch.ones(1, 6))]
    assert sum(aggregate_token_losses(*part, "dapo", num_items_in_batch=8) for part in parts).item() == 2.5
    # Row losses [1, 1, 1, 1] and [2, 2, -, -], at most 8 tokens.
    losses, mask = torch.tensor([[1.0, 1, 1, 1], [2, 2, 9, 9]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert aggregate_token_losses(losses, mask, "grpo").item() == 1.5
    assert aggregate_token_losses(losses, mask, "bnpo").item() == pytest.approx(4 / 3)
    assert aggregate_token_losses(losses, mask, "dr_grpo", max_completion_length=8).item() == 0.5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("batch", "length"), [(2, 3), (2, 0)])
def test_no_counted_token_gives_an_attached_zero(loss_type: str, beta: float, batch: int, length: int):
    logps = torch.zeros(batch, length, requires_grad=True)
    junk = torch.full((batch, length), torch.nan)
    loss, metrics = policy_loss(
        logps,
        junk,
        torch.ones(batch),
        torch.zeros(batch, length),
        PolicyLossOptions(loss_type, beta=beta),
        ref_per_token_logps=junk,
        max_completion_length=3,
        num_items_in_batch=0,
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logps.grad, torch.zeros(batch, length))
    assert metrics == {}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", [False, True])
def test_masked_places_may_hold_anything(loss_type: str, level: str, correction: bool):
    options = PolicyLossOptions(loss_type, beta=0.1, importance_sampling_level=level, use_bias_correction_kl=correction)
    clean = rollouts()
    masked = clean["completion_mask"] == 0
    dirty = dict(clean)
    for name in ("per_token_logps", "old_per_token_logps", "ref_per_token_logps"):
        dirty[name] = clean[name].masked_fill(masked, torch.nan)
    for ours, theirs in zip(scored(dirty, options), scored(clean, options), strict=True):
        assert ours == theirs if isinstance(ours, dict) else torch.equal(ours, theirs)
    assert scored(clean, options)[1][masked].abs().max() == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delta", [None, 1.3])
def test_gradient_by_finite_differences(loss_type: str, level: str, delta: float | None):
    options = PolicyLossOptions(loss_type, epsilon_high=0.25, delta=delta, beta=0.1, importance_sampling_level=level)
    tensors = rollouts()
    logps = tensors.pop("per_token_logps").requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return policy_loss(values, **tensors, options=options, max_completion_length=7, num_items_in_batch=35).loss

    assert torch.autograd.gradcheck(loss, logps, eps=1e-7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_permuting_sequences_permutes_the_gradient(loss_type: str, level: str):
    options = PolicyLossOptions(loss_type, beta=0.1, importance_sampling_level=level)
    tensors, order = rollouts(), torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    loss, grad, metrics = scored(tensors, options)
    permuted_loss, permuted_grad, permuted_metrics = scored({k: v[order] for k, v in tensors.items()}, options)
    assert torch.allclose(permuted_loss, loss)
    assert torch.allclose(permuted_grad, grad[order])
    assert permuted_metrics == pytest.approx(metrics)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", LEVELS)
def test_one_batch_of_eight_equals_four_of_two(loss_type: str, level: str):
    options = PolicyLossOptions(loss_type, beta=0.1, importance_sampling_level=level)
    tensors = rollouts()
    loss, grad, _ = scored(tensors, options)
    parts = [
        scored({k: v[start : start + 2] for k, v in tensors.items()}, options, gradient_accumulation_steps=4)
        for start in range(0, 8, 2)
    ]
    assert torch.allclose(sum(part[0] for part in parts), loss)
    assert torch.allclose(torch.cat([part[1] for part in parts]), grad)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_by_token_equal_those_by_sequence(loss_type: str):
    options, tensors = PolicyLossOptions(loss_type), rollouts()
    by_token = tensors | {"advantages": tensors["advantages"][:, None].expand(8, 7)}
    assert torch.equal(scored(by_token, options)[0], scored(tensors, options)[0])


def test_inputs_are_not_changed():
    tensors = rollouts()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    scored(tensors, PolicyLossOptions("dapo", beta=0.1, delta=1.5))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, copies[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sapo"}, "loss_type must be one of grpo, bnpo, dr_grpo, dapo; got 'sapo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be token or sequence; got 'word'"),
        ({"epsilon_low": -0.1}, "epsilon_low must be a finite number >= 0; got -0.1"),
        ({"epsilon_high": float("inf")}, "epsilon_high"),
        ({"beta": float("nan")}, "beta"),
        ({"delta": 1.2}, r"delta must be None or > 1 \+ epsilon_high; got 1.2"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PolicyLossOptions(**({"loss_type": "dapo"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PolicyLossOptions("dapo"), "'dapo' divides by num_items_in_batch; got None"),
        (PolicyLossOptions("dr_grpo"), "'dr_grpo' divides by max_completion_length; got None"),
        (PolicyLossOptions("bnpo", beta=0.1), "ref_per_token_logps is needed where beta > 0"),
    ],
)
def test_a_missing_number_or_reference_is_named(options: PolicyLossOptions, message: str):
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=message):
        policy_loss(zeros, zeros, torch.ones(2), torch.ones(2, 3), options)
    with pytest.raises(ValueError, match="loss_type must be one of"):
        aggregate_token_losses(zeros, zeros, "luspo")
