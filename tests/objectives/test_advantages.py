"""Group statistics by hand-worked numbers."""

import math

import pytest
import torch

from grpo_lab.objectives import (
    PolicyLossOptions,
    group_advantages,
    normalized_then_summed_advantages,
    policy_loss,
    weighted_rewards,
    zero_spread_fraction,
)

REWARDS = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(("scale_rewards", "size"), [("group", 0.865875), ("batch", 1.079890), ("none", 0.5)])
def test_worked_numbers_of_each_scope(scale_rewards: str, size: float):
    advantages = group_advantages(REWARDS, 4, scale_rewards=scale_rewards)
    assert advantages.tolist() == pytest.approx([0, 0, 0, 0, -size, size, -size, size], abs=1e-6)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1e3])
def test_the_rounding_of_equal_rewards_is_not_amplified(scale_rewards: str, reward: float):
    rewards = torch.full((7,), reward)
    assert group_advantages(rewards, 7, scale_rewards=scale_rewards).abs().max() < 1e-3 * reward
    assert zero_spread_fraction(rewards, 7) == 1


def test_the_share_of_groups_that_teach_nothing():
    assert zero_spread_fraction(REWARDS, 4) == 0.5
    assert zero_spread_fraction(torch.tensor([math.nan, 1, 0, 1]), 2) == 0.5
    assert zero_spread_fraction(torch.tensor([0, 1e-3]), 2) == 0


def test_a_group_of_equal_rewards_is_pulled_to_the_reference_unless_its_tokens_are_masked():
    mask = torch.ones(8, 3)
    spreading = mask * (torch.arange(8) >= 4)[:, None]
    for loss_type in ("bnpo", "dapo"):
        for completion_mask, pulled in ((mask, True), (spreading, False)):
            logps = torch.zeros(8, 3, requires_grad=True)
            loss, metrics = policy_loss(
                logps, logps.detach(), group_advantages(REWARDS, 4), completion_mask,
                PolicyLossOptions(loss_type, beta=0.1), ref_per_token_logps=torch.ones(8, 3),
                num_items_in_batch=completion_mask.sum().item(),
            )  # fmt: skip
            loss.backward()
            assert logps.grad[:4].any() == pulled
            # KL of each counted token e - 2, over the counted tokens alone; advantages sum to 0.
            assert loss.item() == pytest.approx(0.1 * (math.e - 2), abs=1e-6)
            assert metrics["kl"] == pytest.approx(math.e - 2)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_completion_without_a_reward_is_left_out_of_its_group(scale_rewards: str):
    rewards = torch.tensor([0.0, math.nan, 1.0, 1.0, math.nan, 0.0])
    advantages = group_advantages(rewards, 3, scale_rewards=scale_rewards)
    without = group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0]), 2, scale_rewards=scale_rewards)
    assert advantages[[0, 2, 3, 5]].tolist() == pytest.approx(without.tolist())
    assert advantages[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_lone_reward_has_no_advantage(scale_rewards: str):
    rewards = torch.tensor([math.nan, 1.0, math.nan, math.nan])
    assert group_advantages(rewards, 2, scale_rewards=scale_rewards).tolist() == [0, 0, 0, 0]


def test_permuting_groups_permutes_advantages():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0)).view(3, 4)
    order = [2, 0, 1]
    for scale_rewards in ("group", "batch", "none"):
        expected = group_advantages(rewards.flatten(), 4, scale_rewards=scale_rewards).view(3, 4)[order]
        result = group_advantages(rewards[order].flatten(), 4, scale_rewards=scale_rewards).view(3, 4)
        assert torch.allclose(result, expected)


@pytest.mark.parametrize(
    ("rewards", "num_generations", "options", "message"),
    [
        (torch.ones(4), 1, {}, "num_generations must be >= 2.*got 1"),
        (torch.ones(5), 2, {}, r"multiple of num_generations \(2\).*got \(5,\)"),
        (torch.ones(2, 2), 2, {}, r"rewards must be \(B,\).*got \(2, 2\)"),
        (torch.ones(4), 2, {"scale_rewards": True}, "scale_rewards must be one of group, batch, none; got True"),
        (torch.ones(4), 2, {"epsilon": 0.0}, "epsilon must be > 0; got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(rewards, num_generations, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, num_generations, **options)


def test_rewards_that_a_function_did_not_give_are_left_out_of_the_sum():
    rewards = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]])
    summed = weighted_rewards(rewards, torch.tensor([2.0, 0.5]))
    assert summed[:2].tolist() == [3, 1]
    assert summed[2].isnan()


def test_each_reward_has_the_same_say_where_it_is_normalised_first():
    # The second reward is a hundred times the first; each is +-1 of its spread, so the pair that wins both leads.
    rewards = torch.tensor([[1.0, 100.0], [0.0, 0.0], [1.0, 0.0], [0.0, 100.0]])
    advantages = normalized_then_summed_advantages(rewards, torch.ones(2), 2)
    z = math.sqrt(0.5)  # of two values, by Bessel's standard deviation
    sums = torch.tensor([2 * z, -2 * z, z - z, 0.0])
    expected = (sums - sums.mean()) / sums.std()
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_completion_that_no_function_rewarded_is_left_out():
    rewards = torch.tensor([[1.0, 3.0], [0.0, 1.0], [math.nan, math.nan], [0.5, math.nan]])
    advantages = normalized_then_summed_advantages(rewards, torch.tensor([1.0, 2.0]), 4)
    assert advantages[2] == 0
    assert advantages[[0, 1, 3]].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[0] > advantages[3] > advantages[1]
