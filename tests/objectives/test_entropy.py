"""Which tokens learn, the entropy bonus and its controller, by hand-worked numbers."""

import math

import pytest
import torch

from grpo_lab.objectives import (
    PolicyLossOptions,
    adapt_entropy_coefficient,
    entropy_bonus,
    policy_loss,
    top_entropy_mask,
)

ENTROPIES = torch.tensor([[0.1, 0.9, 0.5, 9.0], [0.3, 0.7, math.nan, math.nan]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("quantile", "kept"),
    # Of 0.1, 0.3, 0.5, 0.7, 0.9 the quantiles 0.5, 0.8 and 0 are 0.5, 0.74 and 0.1.
    [(0.5, [0.9, 0.5, 0.7]), (0.2, [0.9]), (1.0, [0.1, 0.9, 0.5, 0.3, 0.7])],
)
def test_the_tokens_of_highest_entropy_are_kept(quantile: float, kept: list[float]):
    mask = top_entropy_mask(ENTROPIES, MASK, quantile)
    assert ENTROPIES[mask].tolist() == pytest.approx(kept)


def test_no_counted_token_keeps_none():
    assert not top_entropy_mask(ENTROPIES, torch.zeros(2, 4), 0.5).any()


def test_the_bonus_is_the_mean_entropy_of_the_tokens_that_count():
    entropies = ENTROPIES.clone().requires_grad_()
    bonus = entropy_bonus(entropies, MASK == 1)
    assert bonus.item() == pytest.approx(0.5)
    (grad,) = torch.autograd.grad(bonus, entropies)
    assert grad.flatten().tolist() == pytest.approx([0.2, 0.2, 0.2, 0, 0.2, 0.2, 0, 0])


@pytest.mark.parametrize(("loss_type", "numbers"), [("bnpo", {}), ("dapo", {"num_items_in_batch": 5})])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_bonus_is_taken_off_the_loss_whatever_divides_it(loss_type: str, numbers: dict, accumulation: int):
    zeros = torch.zeros(2, 4)
    options = PolicyLossOptions(loss_type, entropy_coef=0.3)
    loss, metrics = policy_loss(
        zeros, zeros, torch.tensor([1.0, -2.0]), MASK, options, entropies=ENTROPIES,
        gradient_accumulation_steps=accumulation, **numbers,
    )  # fmt: skip
    policy_term = (-3 * 1.0 + 2 * 2.0) / 5
    divisor = 1 if loss_type == "dapo" else accumulation  # dapo's number of tokens spans the micro-batches
    assert loss.item() == pytest.approx(policy_term / divisor - 0.3 * 0.5 / accumulation)
    assert metrics["policy_loss"] == pytest.approx(policy_term)
    assert metrics["entropy"] == pytest.approx(0.5)


def test_the_mask_of_high_entropy_spares_the_kl_and_narrows_the_bonus():
    zeros = torch.zeros(2, 4)
    options = PolicyLossOptions("bnpo", beta=0.5, top_entropy_quantile=0.2, entropy_coef=0.1)
    loss, _ = policy_loss(
        zeros, zeros, torch.ones(2), MASK, options, entropies=ENTROPIES, ref_per_token_logps=zeros + 1
    )
    # One of five tokens keeps its term of -1; each has a KL of e - 2; the bonus is of the kept token alone.
    assert loss.item() == pytest.approx(-1 / 5 + 0.5 * (math.e - 2) - 0.1 * 0.9)


@pytest.mark.parametrize(
    ("coefficient", "entropy", "moved", "applies"),
    [(0.1, 0.19, 0.15, True), (0.1, 0.2, 0.15, True), (0.1, 0.21, 0.05, False), (0.28, 0.1, 0.3, True),
     (0.03, 0.9, 0.01, False)],
)  # fmt: skip
def test_the_controller_raises_the_coefficient_at_or_below_the_target(
    coefficient: float, entropy: float, moved: float, applies: bool
):
    result = adapt_entropy_coefficient(coefficient, entropy, target=0.2, delta=0.05, minimum=0.01, maximum=0.3)
    assert result.coefficient == pytest.approx(moved)
    assert result.applies is applies
