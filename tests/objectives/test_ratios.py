"""Ratios of the sampler, by hand-worked numbers; those of the losses stand in test_policy_loss."""

import math

import pytest
import torch

from grpo_lab.objectives import gamma_weights, sampler_ratio

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
        ("sequence_truncate", (None, 3.0), [1, 3, math.e]),
        ("sequence_mask", (None, 3.0), [1, 0, math.e]),
        ("sequence_mask", (1.5, 9.0), [0, 8, math.e]),
    ],
)
def test_worked_numbers(mode: str, bounds: tuple[float | None, float | None], expected: list[float]):
    ratio = sampler_ratio(OLD, SAMPLING, MASK, mode=mode, clip_min=bounds[0], clip_max=bounds[1])
    assert ratio.flatten().tolist() == pytest.approx(expected)


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
    assert phi.flatten().tolist() == pytest.approx([0, 1e-16 * math.exp(3), 1], abs=1e-12)
