"""Ratios of the sampler, by hand-worked numbers; those of the losses stand in test_policy_loss."""

import math

import pytest
import torch

from grpo_lab.objectives import gamma_weights, log_importance_ratio, off_policy_keep, sampler_ratio

# Ratios 2, 0.5, 8 and, where masked or unknown, 1.
OLD = torch.tensor([[2.0, 0.5], [8.0, 1.0], [math.e, 5.0]]).log()
SAMPLING = torch.tensor([[0.0, 0.0], [0.0, math.nan], [0.0, 0.0]])
MASK = torch.tensor([[1, 1], [1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", (None, 3.0), [2, 0.5, 3, 1, math.e, 1]),
        ("token_truncate", (0.8, 2.5), [2, 0.8, 2.5, 1, 2.5, 1]),
        ("token_truncate", (None, None), [2, 0.5, 8, 1, math.e, 1]),
        ("token_mask", (None, 3.0), [2, 0.5, 0, 1, math.e, 1]),
        ("token_mask", (0.8, None), [2, 0, 8, 1, math.e, 1]),
        ("token_mask", (1.0, None), [2, 0, 8, 1, math.e, 1]),  # a ratio on a bound stays
        ("token_mask", (None, 1.0), [0, 0.5, 0, 1, 0, 1]),
        ("sequence_truncate", (None, 3.0), [1, 3, math.e]),
        ("sequence_mask", (None, 3.0), [1, 0, math.e]),
        ("sequence_mask", (1.5, 9.0), [0, 8, math.e]),
    ],
)
def test_worked_numbers(mode: str, bounds: tuple[float | None, float | None], expected: list[float]):
    ratio = sampler_ratio(OLD, SAMPLING, MASK, mode=mode, clip_min=bounds[0], clip_max=bounds[1])
    assert ratio.flatten().tolist() == pytest.approx(expected)


def test_the_bound_is_three_unless_said():
    assert sampler_ratio(OLD, SAMPLING, MASK, mode="token_truncate").max() == 3


def test_masked_places_may_hold_anything():
    old, sampling = (x.masked_fill(MASK == 0, math.nan) for x in (OLD, SAMPLING))
    for mode in ("token_mask", "sequence_truncate"):
        assert torch.equal(sampler_ratio(old, sampling, MASK, mode=mode), sampler_ratio(OLD, SAMPLING, MASK, mode=mode))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"mode must be one of token_truncate, token_mask, .*; got 'mask'"):
        sampler_ratio(OLD, SAMPLING, MASK, mode="mask")


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0), (-0.1, 1.0), (math.nan, 1.0)])
def test_bounds_that_hold_no_ratio_are_refused(bounds: tuple[float, float]):
    with pytest.raises(ValueError, match=rf"must be 0 <= clip_min < clip_max; got {bounds[0]} and {bounds[1]}"):
        sampler_ratio(OLD, SAMPLING, MASK, mode="token_mask", clip_min=bounds[0], clip_max=bounds[1])


def test_vespos_weight_stays_finite_for_any_ratio():
    log_ratio = torch.tensor([[300.0, 300.0], [-300.0, -300.0], [30.0, -30.0]])
    phi = gamma_weights(torch.ones(3, 1), log_ratio, None, k=(2.0, 3.0), decay=(3.0, 2.0))
    assert phi.flatten().tolist() == pytest.approx([0, 1e-16 * math.exp(3), 1], rel=1e-5, abs=1e-20)
    # A log-ratio of 25 counts 20; a sampler's ratio of 0 counts 1e-8, here against 1e8.
    bounded = torch.tensor([[25.0, -20.0]])
    assert gamma_weights(torch.ones(1, 1), bounded, None, k=(2.0, 3.0), decay=(3.0, 2.0)).item() == pytest.approx(1)
    log_ratio, sampler = torch.tensor([[8 * math.log(10), 0.0]]), torch.tensor([[0.0, 1.0]])
    phi = gamma_weights(torch.ones(1, 1), log_ratio, sampler, k=(2.0, 3.0), decay=(3.0, 2.0))
    assert phi.item() == pytest.approx(1, rel=1e-4)


def test_the_ratio_of_a_sequence_is_a_mean_over_its_own_tokens():
    log_ratio = torch.tensor([[0.6, 0.0, 0.0], [0.6, 0.3, 0.9]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    assert log_importance_ratio(log_ratio, mask, "sequence").flatten().tolist() == pytest.approx([0.6, 0.6])


def test_the_drift_of_a_sequence_is_a_mean_over_its_own_tokens():
    # Drifts of 0.5 on the threshold, 0.75 over it, and 0.75 with A = 0; means over 1, 2 and 3 tokens.
    sampling = torch.tensor([[0.5, math.inf, math.nan], [1.5, 0.0, 9.0], [0.75, 0.75, 0.75]])
    mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    advantages = torch.tensor([[-1.0], [-1.0], [0.0]])
    keep = off_policy_keep(advantages, torch.zeros(3, 3), sampling, mask, 0.5)
    assert keep.flatten().tolist() == [True, False, True]
