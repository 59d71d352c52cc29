"""The same rollouts through TRL's own losses: values, gradients and metrics agree."""

import dataclasses
import itertools
import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from grpo_lab.objectives import PolicyLossOptions, adapt_entropy_coefficient, policy_loss, sampler_ratio

STEPS_PER_GENERATION, ACCUMULATION, MAX_LENGTH, TOKENS = 4, 2, 9, 34.0
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")


def rollouts() -> dict[str, Tensor]:
    """B=8, T=7, ragged masks, one sequence with one counted token and one without, ratios on both sides of the clip."""
    random = torch.Generator().manual_seed(1)
    logps = -torch.rand(8, 7, generator=random) * 3
    lengths = torch.tensor([7, 3, 5, 0, 7, 1, 6, 5])
    return {
        "per_token_logps": logps,
        "old_per_token_logps": logps + torch.randn(8, 7, generator=random) * 0.3,
        "ref_per_token_logps": logps + torch.randn(8, 7, generator=random) * 0.3,
        "advantages": torch.randn(8, generator=random),
        "completion_mask": (torch.arange(7) < lengths[:, None]).long(),
        "entropies": torch.rand(8, 7, generator=random) * 2,
        "sampling_per_token_logps": logps + torch.randn(8, 7, generator=random) * 0.5,
    }


def options_of(loss_type: str, **settings: Any) -> PolicyLossOptions:
    if loss_type == "cispo":
        settings = {"epsilon_high": 1.2} | {k: v for k, v in settings.items() if k not in ("epsilon_high", "delta")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sequences weighted by length: equal to TRL all the same
        return PolicyLossOptions(loss_type, **settings)


def loss_of_trl(
    tensors: dict[str, Tensor], options: PolicyLossOptions, *, adaptive: dict[str, float] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """`GRPOTrainer._compute_loss` in training mode on given log-probs and entropies."""
    corrected = "importance_sampling_ratio" in tensors
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["per_token_logps"], tensors["entropies"], None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=options.entropy_coef != 0 or adaptive is not None,
        _entropy_window_stats=None,
        _last_world_entropy=(adaptive or {}).get("last_entropy"),
        accelerator=SimpleNamespace(
            num_processes=1,
            reduce=lambda x, **_: x,
            gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
            sync_gradients=True,
        ),
        args=SimpleNamespace(
            delta=options.delta,
            use_bias_correction_kl=options.use_bias_correction_kl,
            steps_per_generation=STEPS_PER_GENERATION,
            sapo_temperature_pos=options.sapo_temperature_pos,
            sapo_temperature_neg=options.sapo_temperature_neg,
            vespo_k_pos=options.vespo_k_pos,
            vespo_lambda_pos=options.vespo_lambda_pos,
            vespo_k_neg=options.vespo_k_neg,
            vespo_lambda_neg=options.vespo_lambda_neg,
            **(adaptive or {}),
        ),
        aux_loss_enabled=False,
        beta=options.beta,
        current_gradient_accumulation_steps=ACCUMULATION,
        entropy_coef=options.entropy_coef,
        epsilon_high=options.epsilon_high,
        epsilon_low=options.epsilon_low,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=options.importance_sampling_level,
        loss_type=options.loss_type,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=options.off_policy_mask_threshold,
        top_entropy_quantile=options.top_entropy_quantile,
        use_adaptive_entropy=adaptive is not None,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
    )
    trainer.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    inputs = tensors | {
        "prompt_ids": torch.zeros(8, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(8, 7, dtype=torch.int64),
        "num_items_in_batch": torch.tensor(TOKENS),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def assert_equal_to_trl(tensors: dict[str, Tensor], options: PolicyLossOptions) -> None:
    leaves = [tensors[name].requires_grad_() for name in ("per_token_logps", "entropies")]
    theirs, their_metrics = loss_of_trl(tensors, options)
    ours, our_metrics = policy_loss(
        **tensors,
        options=options,
        max_completion_length=MAX_LENGTH,
        # TRL counts the tokens of the whole generation batch and rescales them to one optimizer step.
        num_items_in_batch=TOKENS * ACCUMULATION / STEPS_PER_GENERATION,
        gradient_accumulation_steps=ACCUMULATION,
    )
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    for ours_grad, their_grad in zip(
        torch.autograd.grad(ours, leaves, allow_unused=True),
        torch.autograd.grad(theirs, leaves, allow_unused=True),
        strict=True,
    ):
        assert (ours_grad is None) == (their_grad is None)
        if ours_grad is not None:
            assert torch.allclose(ours_grad, their_grad, rtol=1e-5, atol=1e-8)
    their_metrics.pop("entropy_coef", None)  # the trainer's own state
    assert our_metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon_low": 0.1, "epsilon_high": 0.28},
        {"delta": 1.3},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.5},
        {"top_entropy_quantile": 0.3, "beta": 0.1},
        {"entropy_coef": 0.05},
        {"entropy_coef": -0.05, "top_entropy_quantile": 0.4},
        {"off_policy_mask_threshold": 0.05},
        {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.7},
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
    ],
    ids=str,
)
def test_loss_gradients_and_metrics(loss_type: str, level: str, settings: dict[str, Any]):
    tensors = rollouts()
    options = options_of(loss_type, importance_sampling_level=level, **settings)
    if options.off_policy_mask_threshold is None:
        del tensors["sampling_per_token_logps"]
    assert_equal_to_trl(tensors, options)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_by_token(loss_type: str):
    tensors = rollouts()
    tensors["advantages"] = torch.randn(8, 7, generator=torch.Generator().manual_seed(2))
    assert_equal_to_trl(tensors, options_of(loss_type, beta=0.1, off_policy_mask_threshold=0.05))


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES_AND_MODES = [
    (loss_type, mode) for loss_type in LOSS_TYPES for mode in (MODES[:2] if loss_type == "vespo" else MODES)
]


@pytest.mark.parametrize(("loss_type", "mode"), LOSSES_AND_MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_with_a_sampler_ratio(loss_type: str, mode: str, level: str):
    tensors = rollouts()
    sampling = tensors["sampling_per_token_logps"].index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(math.nan))
    tensors["sampling_per_token_logps"] = sampling
    tensors["importance_sampling_ratio"] = sampler_ratio(
        tensors["old_per_token_logps"], sampling, tensors["completion_mask"], mode=mode, clip_max=1.5
    )
    options = options_of(
        loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.01, top_entropy_quantile=0.6,
        off_policy_mask_threshold=0.05,
    )  # fmt: skip
    assert_equal_to_trl(tensors, options)


@pytest.mark.parametrize("last_entropy", [0.5, 3.0])
@pytest.mark.parametrize("target", [0.6, 1.4])
def test_adaptive_entropy(last_entropy: float, target: float):
    tensors = rollouts()
    bounds = {"target": target, "delta": 0.02, "minimum": 0.0, "maximum": 1.0}
    now = adapt_entropy_coefficient(0.05, last_entropy, **bounds)
    adaptive = {
        "last_entropy": last_entropy, "entropy_target": target, "entropy_coef_delta": 0.02, "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0,
    }  # fmt: skip
    theirs, metrics = loss_of_trl(tensors, options_of("bnpo", entropy_coef=now.coefficient), adaptive=adaptive)
    options = options_of("bnpo", entropy_coef=now.coefficient if now.applies else 0.0)
    ours = policy_loss(**tensors, options=options, gradient_accumulation_steps=ACCUMULATION)
    assert torch.allclose(ours.loss, theirs, rtol=1e-5)
    after = adapt_entropy_coefficient(now.coefficient, ours.metrics["entropy"], **bounds)
    assert after.coefficient == pytest.approx(metrics["entropy_coef"])


def test_options_left_unsaid_are_those_of_trl():
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    theirs |= {"epsilon_low": theirs["epsilon"], "epsilon_high": theirs["epsilon_high"] or theirs["epsilon"]}
    ours = dataclasses.asdict(PolicyLossOptions(theirs["loss_type"]))
    assert ours == {name: theirs[name] for name in ours}


def test_the_rollouts_reach_every_branch():
    tensors = rollouts()
    ratio = (tensors["per_token_logps"] - tensors["old_per_token_logps"]).exp()
    mask, advantages = tensors["completion_mask"] == 1, tensors["advantages"][:, None]
    for clipped, signed in itertools.product((ratio < 0.8, ratio > 1.28), (advantages < 0, advantages > 0)):
        assert (clipped & signed & mask).any()
    assert ((ratio > 1.5) & (advantages < 0) & mask).any()
    drift = tensors["sampling_per_token_logps"] - tensors["per_token_logps"]
    means = (drift * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    dropped = (tensors["advantages"] < 0) & (means > 0.05)
    assert dropped.any()
    assert ((tensors["advantages"] < 0) & ~dropped).any()
