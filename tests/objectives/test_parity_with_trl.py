"""The same rollouts through TRL's own loss and advantages: values, gradients and metrics agree."""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_lab.objectives import PolicyLossOptions, policy_loss

STEPS_PER_GENERATION, ACCUMULATION, MAX_LENGTH, TOKENS = 4, 2, 9, 35.0


def rollouts() -> dict[str, Tensor]:
    """B=8, T=7, ragged masks, one sequence without a counted token, ratios on both sides of the clip."""
    random = torch.Generator().manual_seed(1)
    logps = -torch.rand(8, 7, generator=random) * 3
    lengths = torch.tensor([7, 3, 5, 0, 7, 2, 6, 5])
    return {
        "per_token_logps": logps,
        "old_per_token_logps": logps + torch.randn(8, 7, generator=random) * 0.3,
        "ref_per_token_logps": logps + torch.randn(8, 7, generator=random) * 0.3,
        "advantages": torch.randn(8, generator=random),
        "completion_mask": (torch.arange(7) < lengths[:, None]).long(),
    }


def loss_of_trl(tensors: dict[str, Tensor], options: PolicyLossOptions) -> tuple[Tensor, dict[str, float]]:
    """`GRPOTrainer._compute_loss` in training mode on given log-probs."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["per_token_logps"], torch.zeros(8, 7), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x),
        args=SimpleNamespace(
            delta=options.delta,
            use_bias_correction_kl=options.use_bias_correction_kl,
            steps_per_generation=STEPS_PER_GENERATION,
        ),
        aux_loss_enabled=False,
        beta=options.beta,
        current_gradient_accumulation_steps=ACCUMULATION,
        epsilon_high=options.epsilon_high,
        epsilon_low=options.epsilon_low,
        importance_sampling_level=options.importance_sampling_level,
        loss_type=options.loss_type,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    inputs = tensors | {
        "prompt_ids": torch.zeros(8, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(8, 7, dtype=torch.int64),
        "num_items_in_batch": torch.tensor(TOKENS),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon_low": 0.1, "epsilon_high": 0.28},
        {"delta": 1.3},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.5},
    ],
    ids=str,
)
def test_loss_gradient_and_metrics(loss_type: str, level: str, settings: dict[str, Any]):
    options = PolicyLossOptions(loss_type, importance_sampling_level=level, **settings)
    tensors = rollouts()
    logps = tensors["per_token_logps"].requires_grad_()
    theirs, their_metrics = loss_of_trl(tensors, options)
    ours, our_metrics = policy_loss(
        **tensors,
        options=options,
        max_completion_length=MAX_LENGTH,
        # TRL counts the tokens of the whole generation batch and rescales them to one optimizer step.
        num_items_in_batch=TOKENS * ACCUMULATION / STEPS_PER_GENERATION,
        gradient_accumulation_steps=ACCUMULATION,
    )
    (our_grad,), (their_grad,) = torch.autograd.grad(ours, logps), torch.autograd.grad(theirs, logps)
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert torch.allclose(our_grad, their_grad, rtol=1e-5, atol=1e-8)
    assert our_metrics == pytest.approx({name: their_metrics[name] for name in our_metrics}, rel=1e-5)
    assert ("kl" in our_metrics) == ("kl" in their_metrics)


def test_the_rollouts_reach_every_branch():
    tensors = rollouts()
    ratio = (tensors["per_token_logps"] - tensors["old_per_token_logps"]).exp()
    mask, advantages = tensors["completion_mask"] == 1, tensors["advantages"][:, None]
    for clipped, signed in itertools.product((ratio < 0.8, ratio > 1.28), (advantages < 0, advantages > 0)):
        assert (clipped & signed & mask).any()
    assert ((ratio > 1.5) & (advantages < 0) & mask).any()
