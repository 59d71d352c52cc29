"""The losses by hand-worked numbers, by their gradients, and for any split of a batch."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.objectives import PolicyLossOptions, aggregate_token_losses, k3_kl, policy_loss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
HELD = ("cispo", "vespo")  # their weight lets no gradient through, so that finite differences see another slope
LEVELS = ("token", "sequence")


def options_of(loss_type: str, **settings: Any) -> PolicyLossOptions:
    """Options with a cap that CISPO takes, and without the warning that sequences are weighted by length."""
    if loss_type == "cispo":
        settings = {"epsilon_high": 1.2} | {k: v for k, v in settings.items() if k not in ("epsilon_high", "delta")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PolicyLossOptions(loss_type, **settings)


def loss_of_ratios(ratios: list[float], advantage: float, loss_type: str = "bnpo", **options: Any):
    """Loss of one sequence with these ratios, a mean over its tokens, and its gradient by log-prob."""
    logps = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    zeros, mask = torch.zeros(1, len(ratios)), torch.ones(1, len(ratios))
    result = policy_loss(
        logps,
        zeros,
        torch.tensor([advantage]),
        mask,
        options_of(loss_type, **options),
        ref_per_token_logps=zeros,
        num_items_in_batch=len(ratios),
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
    shares = {"low_mean": 0, "high_mean": 1 / 3, "region_mean": 1 / 3, "low_min": 0, "high_max": 1 / 3}
    assert metrics == pytest.approx({f"clip_ratio/{name}": share for name, share in shares.items()})
    # -1: max(0.5, 0.8) = 0.8 without gradient; 1; max(1.5, 1.2) = 1.5.
    loss, grad, metrics = loss_of_ratios([0.5, 1.0, 1.5], -1.0)
    assert loss == pytest.approx((0.8 + 1 + 1.5) / 3)
    assert grad == pytest.approx([0, 1 / 3, 1.5 / 3])
    shares = {"low_mean": 1 / 3, "high_mean": 0, "region_mean": 1 / 3, "low_min": 1 / 3, "high_max": 0}
    assert metrics == pytest.approx({f"clip_ratio/{name}": share for name, share in shares.items()})


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


def test_the_extremes_of_the_clip_are_over_sequences():
    logps = torch.tensor([[0.5, 0.5, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    options = PolicyLossOptions("grpo")
    _, metrics = policy_loss(logps, torch.zeros(3, 4), -torch.ones(3), mask, options)
    assert metrics["clip_ratio/low_min"] == 0.25  # of 0.5 and 0.25; a sequence without tokens has no share
    assert metrics["clip_ratio/low_mean"] == 0.375
    _, metrics = policy_loss(-logps, torch.zeros(3, 4), torch.ones(3), mask, options)
    assert metrics["clip_ratio/high_max"] == 0.5


@pytest.mark.parametrize("loss_type", ["bnpo", "cispo"])
def test_an_advantage_of_zero_is_never_counted_as_clipped(loss_type: str):
    _, _, metrics = loss_of_ratios([0.5, 1.0, 9.0], 0.0, loss_type)
    assert metrics
    assert not any(metrics.values())


def test_nothing_is_clipped_on_policy_where_the_range_is_a_point():
    zeros = torch.zeros(2, 1)
    for options in (
        PolicyLossOptions("bnpo", epsilon_low=0.0, epsilon_high=0.0),
        PolicyLossOptions("cispo", epsilon_high=1.0),
    ):
        _, metrics = policy_loss(
            zeros, zeros, torch.tensor([1.0, -1.0]), torch.ones(2, 1), options, num_items_in_batch=2
        )
        assert metrics
        assert not any(metrics.values())


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    options = PolicyLossOptions("cispo", epsilon_high=5.0)
    for advantage, capped in ((2.0, 1 / 3), (-2.0, 0.0)):
        logps = torch.tensor([[0.5, 1.0, 9.0]], dtype=torch.float64).log().requires_grad_()
        loss, metrics = policy_loss(
            logps, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3), options, num_items_in_batch=3
        )
        assert loss.item() == pytest.approx(-advantage / 3 * (0.5 * math.log(0.5) + 5 * math.log(9)))
        (grad,) = torch.autograd.grad(loss, logps)
        assert grad[0].tolist() == pytest.approx([-advantage / 3 * weight for weight in (0.5, 1.0, 5.0)])
        assert metrics == pytest.approx({"cispo_clip_ratio": capped})


def test_sapo_is_a_soft_gate_with_slope_one_on_policy():
    for advantage, temperature in ((1.5, 2.0), (-1.5, 0.5)):
        settings = {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}
        loss, grad, metrics = loss_of_ratios([1.0], advantage, "sapo", **settings)
        assert loss == pytest.approx(-advantage * 2 / temperature)  # 4 / tau sigmoid(0)
        assert grad == pytest.approx([-advantage])
        assert metrics == {}
        gate = 1 / (1 + math.exp(-temperature * 0.5))
        _, grad, _ = loss_of_ratios([1.5], advantage, "sapo", **settings)
        assert grad == pytest.approx([-advantage * 1.5 * 4 * gate * (1 - gate)])


def test_luspo_is_the_sequence_term_times_the_length():
    ratios, ratio = [0.9, 1.1, 1.0], 0.99 ** (1 / 3)
    loss, grad, _ = loss_of_ratios(ratios, 1.0, "luspo", importance_sampling_level="sequence")
    assert loss == pytest.approx(-3 * ratio)
    assert grad == pytest.approx([-ratio] * 3)


@pytest.mark.parametrize(
    ("advantage", "weight"),
    # W = 0.5 x 2 x 4 = 4: phi = 4^2 exp(3 (1 - 4)), and 4^3 exp(2 (1 - 4)) for a negative advantage.
    [(1.0, 16 * math.exp(-9)), (0.0, 16 * math.exp(-9)), (-1.0, 64 * math.exp(-6))],
)
def test_vespo_weights_a_sequence_by_its_whole_ratio(advantage: float, weight: float):
    loss, grad, metrics = loss_of_ratios([0.5, 2.0, 4.0], advantage, "vespo")
    assert metrics == pytest.approx({"vespo/phi_seq_mean": weight})
    assert loss == pytest.approx(-weight * advantage * math.log(4) / 3)
    assert grad == pytest.approx([-weight * advantage / 3] * 3)
    _, _, metrics = loss_of_ratios([1.0, 1.0], advantage, "vespo")
    assert metrics == pytest.approx({"vespo/phi_seq_mean": 1.0})


def test_weights_of_sapo_and_vespo_are_as_exact_as_their_ratios():
    settings = {"sapo_temperature_pos": 1.1, "vespo_k_pos": 1.1, "vespo_lambda_pos": 0.7}
    loss, _, _ = loss_of_ratios([1.5], 1.0, "sapo", **settings)
    assert loss == pytest.approx(-4 / 1.1 / (1 + math.exp(-1.1 * 0.5)), rel=1e-14)
    loss, _, _ = loss_of_ratios([1.5], 1.0, "vespo", **settings)
    assert loss == pytest.approx(-(1.5**1.1) * math.exp(0.7 * (1 - 1.5)) * math.log(1.5), rel=1e-14)


def test_vespo_multiplies_the_samplers_ratio_into_the_weight():
    zeros, ratio = torch.zeros(1, 2), torch.tensor([[0.5, 8.0]])
    options = PolicyLossOptions("vespo")
    logps = torch.tensor([[-1.0, -2.0]])
    result = policy_loss(
        logps, logps, torch.ones(1), torch.ones(1, 2), options, importance_sampling_ratio=ratio, num_items_in_batch=2
    )
    assert result.metrics["vespo/phi_seq_mean"] == pytest.approx(16 * math.exp(-9))
    assert result.loss.item() == pytest.approx(16 * math.exp(-9) * 1.5)
    # In a batch of one token each, that token's ratio is the sequence's.
    policy_loss(
        logps[:, :1], zeros[:, :1], torch.ones(1), torch.ones(1, 1), options,
        importance_sampling_ratio=ratio[:, :1], num_items_in_batch=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"importance_sampling_ratio must be by token.*vespo.*got \(1, 1\)"):
        policy_loss(logps, zeros, torch.ones(1), torch.ones(1, 2), options, importance_sampling_ratio=ratio[:, :1])


def test_the_samplers_ratio_multiplies_the_policy_term_and_not_the_kl():
    zeros = torch.zeros(1, 2)
    settings: dict[str, Any] = {"ref_per_token_logps": zeros + 1}
    options = PolicyLossOptions("bnpo", beta=0.5)
    plain, corrected = (
        policy_loss(zeros, zeros, torch.ones(1), torch.ones(1, 2), options, importance_sampling_ratio=ratio, **settings)
        for ratio in (None, torch.tensor([[3.0]]))
    )
    assert plain.loss.item() == pytest.approx(-1 + 0.5 * (math.e - 2))
    assert corrected.loss.item() == pytest.approx(-3 + 0.5 * (math.e - 2))


def test_off_policy_sequences_of_negative_advantage_are_dropped():
    # Mean drifts 0.6, 0.6 and 0.4; the first is kept by its advantage, the third by its drift.
    sampling = torch.tensor([[0.6, 0.6, 0.6], [0.2, 1.0, 0.6], [0.8, torch.nan, 0.4]])
    logps, mask = torch.zeros(3, 3, requires_grad=True), torch.ones(3, 3)
    options = PolicyLossOptions("grpo", off_policy_mask_threshold=0.5)
    advantages = torch.tensor([1.0, -1.0, -1.0])
    loss, _ = policy_loss(logps, torch.zeros(3, 3), advantages, mask, options, sampling_per_token_logps=sampling)
    (grad,) = torch.autograd.grad(loss, logps)
    assert grad.flatten().tolist() == pytest.approx([-1 / 9] * 3 + [0] * 3 + [1 / 9] * 3)
    # Without the sampler's log-probs the old ones tell the drift.
    loss, _ = policy_loss(logps, sampling.nan_to_num(0), advantages, mask, options)
    (grad,) = torch.autograd.grad(loss, logps)
    assert not grad[1].any()
    assert grad[0].abs().min() > 0


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
    assert aggregate_token_losses(losses, mask, "sapo").item() == 1.5
    assert aggregate_token_losses(losses, mask, "luspo").item() == 4
    assert aggregate_token_losses(losses[:, :1], mask, "luspo").item() == 4  # a term by sequence counts each token
    for loss_type in ("dapo", "cispo", "vespo"):
        assert aggregate_token_losses(losses, mask, loss_type, num_items_in_batch=16).item() == 0.5
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
        options_of(loss_type, beta=beta, top_entropy_quantile=0.5, entropy_coef=0.1, off_policy_mask_threshold=0.1),
        ref_per_token_logps=junk,
        entropies=junk,
        importance_sampling_ratio=junk,
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
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -100.0])
def test_masked_places_may_hold_anything(loss_type: str, level: str, correction: bool, junk: float):
    options = options_of(
        loss_type, beta=0.1, importance_sampling_level=level, use_bias_correction_kl=correction,
        top_entropy_quantile=0.6, entropy_coef=0.1, off_policy_mask_threshold=0.1,
    )  # fmt: skip
    clean = rollouts()
    generator = torch.Generator().manual_seed(5)
    for name in ("entropies", "sampling_per_token_logps", "importance_sampling_ratio", "advantages"):
        clean[name] = torch.rand(8, 7, generator=generator, dtype=torch.float64) + 0.5
    masked = clean["completion_mask"] == 0
    dirty = dict(clean)
    for name in clean.keys() - {"completion_mask"}:
        dirty[name] = clean[name].masked_fill(masked, junk)
    for ours, theirs in zip(scored(dirty, options), scored(clean, options), strict=True):
        assert ours == theirs if isinstance(ours, dict) else torch.equal(ours, theirs)
    assert scored(clean, options)[1][masked].abs().max() == 0


@pytest.mark.parametrize("loss_type", [loss_type for loss_type in LOSS_TYPES if loss_type not in HELD])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delta", [None, 1.3])
def test_gradient_by_finite_differences(loss_type: str, level: str, delta: float | None):
    options = options_of(loss_type, epsilon_high=0.25, delta=delta, beta=0.1, importance_sampling_level=level)
    tensors = rollouts()
    logps = tensors.pop("per_token_logps").requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return policy_loss(values, **tensors, options=options, max_completion_length=7, num_items_in_batch=35).loss

    assert torch.autograd.gradcheck(loss, logps, eps=1e-7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_permuting_sequences_permutes_the_gradient(loss_type: str, level: str):
    options = options_of(loss_type, beta=0.1, importance_sampling_level=level)
    tensors, order = rollouts(), torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    loss, grad, metrics = scored(tensors, options)
    permuted_loss, permuted_grad, permuted_metrics = scored({k: v[order] for k, v in tensors.items()}, options)
    assert torch.allclose(permuted_loss, loss)
    assert torch.allclose(permuted_grad, grad[order])
    assert permuted_metrics == pytest.approx(metrics)


@pytest.mark.parametrize("loss_type", [loss_type for loss_type in LOSS_TYPES if loss_type != "bnpo"])
@pytest.mark.parametrize("level", LEVELS)
def test_one_batch_of_eight_equals_four_of_two(loss_type: str, level: str):
    options = options_of(loss_type, beta=0.1, importance_sampling_level=level)
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
    options, tensors = options_of(loss_type), rollouts()
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
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, .* luspo, vespo; got 'ppo'"),
        ({"loss_type": "cispo"}, "epsilon_high must be >= 1 with loss_type 'cispo'.*largest ratio.*got 0.2"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be a finite number > 0; got 0.0"),
        ({"vespo_k_pos": -1.0}, "vespo_k_pos must be a finite number >= 0; got -1.0"),
        ({"vespo_lambda_neg": 0.0}, "vespo_lambda_neg must be a finite number > 0; got 0.0"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be a finite number; got nan"),
        ({"top_entropy_quantile": 1.1}, r"top_entropy_quantile must be in \(0, 1\]; got 1.1"),
        ({"top_entropy_quantile": 0.0}, r"top_entropy_quantile must be in \(0, 1\]; got 0.0"),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold must be None or a finite number > 0; got 0.0"),
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
        aggregate_token_losses(zeros, zeros, "ppo")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "old_per_token_logps",
            (2, 1),
            r"old_per_token_logps must have completion_mask's shape \(2, 2\); got \(2, 1\)",
        ),
        ("ref_per_token_logps", (2,), r"ref_per_token_logps must have .* \(2, 2\); got \(2,\)"),
        ("entropies", (1, 2), r"entropies must have .*; got \(1, 2\)"),
        ("sampling_per_token_logps", (4,), r"sampling_per_token_logps must have .*; got \(4,\)"),
        ("advantages", (1,), r"advantages must be \(2,\), or by token \(2, 2\); got \(1,\)"),
        ("importance_sampling_ratio", (2,), r"importance_sampling_ratio must be \(2, 2\) or \(2, 1\); got \(2,\)"),
    ],
)
def test_what_would_broadcast_in_silence_is_refused(name: str, shape: tuple[int, ...], message: str):
    zeros = torch.zeros(2, 2)
    tensors = {"per_token_logps": zeros, "old_per_token_logps": zeros, "advantages": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        policy_loss(
            **tensors | {name: torch.ones(shape)}, completion_mask=torch.ones(2, 2), options=PolicyLossOptions("bnpo")
        )


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}], ids=str)
def test_missing_entropies_are_named(settings: dict[str, Any]):
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"entropies are needed for an entropy_coef .*got None"):
        policy_loss(zeros, zeros, torch.ones(2), torch.ones(2, 3), PolicyLossOptions("bnpo", **settings))


@pytest.mark.parametrize("loss_type", ["bnpo", "dr_grpo", "dapo", "cispo"])
def test_ratios_by_sequence_in_a_sum_over_tokens_are_told(loss_type: str):
    settings = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    with pytest.warns(
        UserWarning, match=f"'sequence' with loss_type '{loss_type}' weights each sequence by its length"
    ):
        PolicyLossOptions(loss_type, importance_sampling_level="sequence", **settings)
