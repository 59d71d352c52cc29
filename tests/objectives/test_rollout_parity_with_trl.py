"""The same rewards and log-probs through TRL's own scoring of a rollout: advantages and sampler ratios agree."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from grpo_lab.objectives import (
    group_advantages,
    k1_sequence_kl,
    normalized_then_summed_advantages,
    rloo_advantages,
    sampler_ratio,
    weighted_rewards,
    zero_spread_fraction,
)

GENERATIONS, LENGTHS = 4, (7, 3, 5, 1, 7, 2, 6, 5, 4, 4, 4, 4)
MASK = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
WEIGHTS = torch.tensor([1.0, 0.5])
NONE = math.nan  # what TRL makes of a reward function's None
REWARDS = {
    "all": [[1, 3], [0, 1], [0.5, 0], [0, 0], [1, 1], [1, 1], [1, 1], [1, 1], [0, 7], [0, 0], [1, 0], [1, 7]],
    # Completions that one function or none rewarded, a group with one reward left, and one with none.
    "some": [[1, NONE], [0, 1], [NONE, NONE], [0.5, 0], [NONE, NONE], [1, NONE], [NONE, NONE], [NONE, NONE],
             [NONE, NONE], [NONE, NONE], [NONE, NONE], [NONE, NONE]],
    "a function that never answers": [[i % 3, NONE] for i in range(12)],
}  # fmt: skip


def logps(seed: int) -> Tensor:
    return -torch.rand(12, 7, generator=torch.Generator().manual_seed(seed)) * 2


def scored_by_trl(trainer_class: type, rewards: str, sampling: Tensor | None = None, **settings: Any) -> Any:
    """What `_generate_and_score_completions` makes of completions, rewards and log-probs that are given to it."""
    rows = torch.tensor(REWARDS[rewards], dtype=torch.float32)
    policy, reference = SimpleNamespace(training=True, is_gradient_checkpointing=False), object()
    prompts, completions = [[1]] * 12, [[1] * length for length in LENGTHS]
    generated: tuple[Any, ...] = (prompts, completions, ["text"] * 12)
    if trainer_class is GRPOTrainer:
        lists = None
        if sampling is not None:  # as vLLM gives them: ragged, None for what it could not score
            lists = [
                [None if math.isnan(x) else x for x in row[:length].tolist()]
                for row, length in zip(sampling, LENGTHS, strict=True)
            ]
        generated = (prompts, completions, None, ["text"] * 12, lists, {}, None, None)
    trainer = SimpleNamespace(
        _calculate_rewards=lambda *_: rows,
        _generate=lambda _: generated,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (logps(2 if model is reference else 1), None, None),
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _metrics={"train": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _tokenizer=SimpleNamespace(pad_token_id=0),
        accelerator=SimpleNamespace(
            device="cpu", process_index=0, gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1
        ),
        args=SimpleNamespace(
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=12,
            steps_per_generation=1,
        ),
        beta=0.0,
        environment_factories=None,
        environments=None,
        log_multimodal=False,
        mask_truncated_completions=False,
        model=policy,
        multi_objective_aggregation="sum_then_normalize",
        normalize_advantages=False,
        num_generations=GENERATIONS,
        num_iterations=1,
        pad_to_multiple_of=None,
        ref_model=reference,
        reward_clip_range=None,
        reward_func_names=["first", "second"],
        reward_funcs=[None, None],
        reward_weights=WEIGHTS,
        scale_rewards="group",
        tools=None,
        use_vllm=sampling is not None,
        vllm_importance_sampling_correction=True,
    )
    vars(trainer).update(settings)
    output = trainer_class._generate_and_score_completions(trainer, [{"prompt": "text"}] * 12)
    return output | {"metrics": trainer._metrics["train"]}


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(rewards: str, scale: str):
    theirs = scored_by_trl(GRPOTrainer, rewards, scale_rewards=scale)
    summed = weighted_rewards(torch.tensor(REWARDS[rewards]), WEIGHTS)
    ours = group_advantages(summed, GENERATIONS, scale_rewards=scale)
    assert theirs["advantages"].any()
    assert torch.allclose(ours, theirs["advantages"], rtol=1e-5, atol=1e-7)
    assert summed.nanmean().item() == pytest.approx(theirs["metrics"]["reward"][0])


def test_the_share_of_groups_that_do_not_spread():
    theirs = scored_by_trl(GRPOTrainer, "all")["metrics"]["frac_reward_zero_std"][0]
    ours = zero_spread_fraction(weighted_rewards(torch.tensor(REWARDS["all"]), WEIGHTS), GENERATIONS)
    assert ours == pytest.approx(theirs) == pytest.approx(1 / 3)


@pytest.mark.parametrize("rewards", REWARDS)
def test_advantages_normalised_before_they_are_summed(rewards: str):
    theirs = scored_by_trl(GRPOTrainer, rewards, multi_objective_aggregation="normalize_then_sum")["advantages"]
    ours = normalized_then_summed_advantages(torch.tensor(REWARDS[rewards]), WEIGHTS, GENERATIONS)
    assert theirs.any()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.7, 1.5), (0.7, None)])
def test_sampler_ratio(mode: str, low: float | None, high: float | None):
    sampling = logps(3).index_put((torch.tensor([0, 2]), torch.tensor([2, 0])), torch.tensor(math.nan))
    theirs = scored_by_trl(
        GRPOTrainer, "all", sampling, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]  # fmt: skip
    ours = sampler_ratio(logps(1), sampling, MASK, mode=mode, clip_min=low, clip_max=high)
    assert ours.shape == theirs.shape == ((12, 1) if mode.startswith("sequence") else (12, 7))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)
    for bound in (low, high):
        if bound is not None:
            assert (ours == (0 if mode.endswith("mask") else bound)).any()


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"normalize": True}, {"beta": 0.1}, {"reward_clip_range": (0.2, 1.2), "beta": 0.1, "normalize": True}],
    ids=str,
)
def test_rloo_advantages(rewards: str, settings: dict[str, Any]):
    theirs = scored_by_trl(
        RLOOTrainer, rewards, normalize_advantages=settings.get("normalize", False),
        beta=settings.get("beta", 0.0), reward_clip_range=settings.get("reward_clip_range"),
    )["advantages"]  # fmt: skip
    kl = k1_sequence_kl(logps(1), logps(2), MASK)
    summed = weighted_rewards(torch.tensor(REWARDS[rewards]), WEIGHTS)
    ours = rloo_advantages(summed, GENERATIONS, sequence_kl=kl, **settings)
    assert theirs.any()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
