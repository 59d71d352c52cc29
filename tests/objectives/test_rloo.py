"""RLOO by hand-worked numbers and as TRL's own trainer computes it."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import RLOOTrainer

from grpo_lab.objectives import k1_sequence_kl, rloo_advantages, rloo_loss
from tests.objectives.test_parity_with_trl import rollouts


def test_the_baseline_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, math.nan, 1.0])
    advantages = rloo_advantages(rewards, 3)
    assert advantages.tolist() == pytest.approx([0.75, -0.75, 0, 1, 0, -1])
    assert rloo_advantages(torch.tensor([math.nan, 3.0]), 2).tolist() == [0, 0]


def test_the_kl_is_taken_off_the_clipped_reward():
    rewards, kl = torch.tensor([1.0, 0.0]), torch.tensor([2.0, -1.0])
    assert rloo_advantages(rewards, 2, sequence_kl=kl, beta=0.1).tolist() == pytest.approx([0.7, -0.7])
    # Rewards clipped to 0.5 and 0.2, then 0.2 off and 0.1 on.
    clipped = rloo_advantages(rewards, 2, sequence_kl=kl, beta=0.1, reward_clip_range=(0.2, 0.5))
    assert clipped.tolist() == pytest.approx([0, 0], abs=1e-7)


def test_the_kl_of_a_sequence_is_summed_over_counted_tokens():
    old, ref = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-1.5, -1.0, 3.0]])
    assert k1_sequence_kl(old, ref, torch.tensor([[1, 1, 0]])).tolist() == [-0.5]


def test_the_batch_may_be_brought_to_one_spread():
    advantages = rloo_advantages(torch.tensor([1.0, 0.0, 5.0, 1.0]), 2, normalize=True)
    raw = torch.tensor([1.0, -1, 4, -4])
    assert advantages.tolist() == pytest.approx((raw / raw.std()).tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.1}, r"sequence_kl is needed where beta is not 0; got None, beta 0\.1"),
        ({"epsilon": 0.0}, r"epsilon must be > 0; got 0\.0"),
        ({"reward_clip_range": (1, 1)}, r"reward_clip_range must be \(smallest, largest\); got \(1, 1\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        rloo_advantages(torch.ones(2), 2, **settings)
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"epsilon_low must be >= 0; got -0\.1"):
        rloo_loss(zeros, zeros, torch.ones(2), zeros, epsilon_low=-0.1)
    with pytest.raises(ValueError, match=r"advantages must be \(2,\); got \(2, 3\)"):
        rloo_loss(zeros, zeros, zeros, zeros)


def test_the_ratio_is_that_of_the_whole_sequence():
    # Ratios 0.5 x 2 x 3 = 3 at A = 1, clipped to 1.2; 0.5 x 1.4 = 0.7 at A = -1, clipped to 0.8; a masked 9.
    logps = torch.tensor([[0.5, 2.0, 3.0], [0.5, 1.4, 9.0]]).log().requires_grad_()
    mask, zeros = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.zeros(2, 3)
    advantages = torch.tensor([1.0, -1.0])
    loss, metrics = rloo_loss(logps, zeros, advantages, mask, entropies=zeros + torch.tensor([1.0, 2.0, 3.0]))
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2)
    shares = {"low_mean": 0.5, "low_min": 0, "high_mean": 0.5, "high_max": 1, "region_mean": 1}
    assert metrics == pytest.approx({f"clip_ratio/{name}": x for name, x in shares.items()} | {"entropy": 9 / 5})
    # Neither is clipped with the advantages exchanged: 3 and 0.7 keep their gradient, the masked place none.
    loss, _ = rloo_loss(logps, zeros, -advantages, mask)
    assert loss.item() == pytest.approx((3 - 0.7) / 2)
    (grad,) = torch.autograd.grad(loss, logps)
    assert grad.flatten().tolist() == pytest.approx([1.5, 1.5, 1.5, -0.35, -0.35, 0])


def test_an_advantage_of_zero_is_never_counted_as_clipped():
    logps = torch.tensor([[0.5], [9.0]]).log()
    _, metrics = rloo_loss(logps, torch.zeros(2, 1), torch.zeros(2), torch.ones(2, 1))
    assert not any(metrics.values())


def test_nothing_is_clipped_on_policy_where_the_range_is_a_point():
    zeros, advantages = torch.zeros(2, 1), torch.tensor([1.0, -1.0])
    _, metrics = rloo_loss(zeros, zeros, advantages, torch.ones(2, 1), epsilon_low=0.0, epsilon_high=0.0)
    assert not any(metrics.values())


def test_no_counted_token_gives_no_gradient_whatever_the_places_hold():
    logps = torch.full((2, 3), math.nan, requires_grad=True)
    loss, metrics = rloo_loss(logps, logps.detach(), torch.tensor([1.0, -1.0]), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0
    assert not logps.grad.any()
    assert metrics == {}


def test_loss_gradient_and_metrics_of_trl():
    tensors = rollouts()
    mask, logps = tensors["completion_mask"], tensors["per_token_logps"].requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, tensors["entropies"], None),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(reduce=lambda x, **_: x, gather=lambda x: x),
        aux_loss_enabled=False,
        epsilon_high=0.28,
        epsilon_low=0.2,
        model=SimpleNamespace(training=True),
    )
    inputs = {
        "prompt_ids": torch.zeros(8, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(8, 7, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_logps": (tensors["old_per_token_logps"] * mask).sum(-1),
    }
    theirs = RLOOTrainer._compute_loss(trainer, None, inputs)
    ours, metrics = rloo_loss(
        logps, tensors["old_per_token_logps"], tensors["advantages"], mask, epsilon_low=0.2, epsilon_high=0.28,
        entropies=tensors["entropies"],
    )  # fmt: skip
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(loss, logps)[0] for loss in (ours, theirs)), rtol=1e-5, atol=1e-8)
    assert metrics == pytest.approx({name: values[-1] for name, values in trainer._metrics["train"].items()})
