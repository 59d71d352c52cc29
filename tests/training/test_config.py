"""The run's settings: what they reach in TRL, and what is refused or warned of, the same at both doors."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from grpo_lab.training import ChunkedGRPOConfig, ChunkedRLOOConfig, RunConfig, RunConfigError
from grpo_lab.training import build as build_module
from grpo_lab.training.config import OBJECTIVE_SETTINGS
from grpo_lab.training.guards import LOSS_TYPES, ObjectiveWarning

# A value of each setting that is not its default and goes with the defaults of the others.
REACHES_TRL: dict[str, Any] = {
    "temperature": 0.7, "loss_type": "sapo", "importance_sampling_level": "sequence", "epsilon": 0.1,
    "epsilon_high": 0.28, "delta": 4.0, "beta": 0.04, "use_bias_correction_kl": False, "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum", "mask_truncated_completions": True,
    "top_entropy_quantile": 0.2, "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 1.0,
    "entropy_coef_delta": 0.01, "entropy_coef_min": 0.001, "entropy_coef_max": 0.5,
    "off_policy_mask_threshold": 0.5, "sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.9, "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0, "dynamic_sampling_rounds": 2,
    "num_generations": 4, "gradient_accumulation_steps": 2, "num_iterations": 5, "learning_rate": 1e-4,
    "max_grad_norm": 0.5, "max_completion_length": 48, "gradient_checkpointing": False, "chunk_size": 64,
    "implementation": "torch", "seed": 3, "skip_zero_advantage": False,
}  # fmt: skip
OTHER_NAMES: dict[str, tuple[Any, str, Any]] = {
    "steps": (7, "max_steps", 7),
    "prompts_per_step": (2, "generation_batch_size", 16),
    "rewards": ({"correctness": 1.0, "overlong": 0.5}, "reward_weights", [1.0, 0.5]),
    "save_every": (10, "save_steps", 10),
    "output_dir": ("elsewhere", "output_dir", "elsewhere"),
    "dtype": ("bfloat16", "bf16", True),
    "device": ("cpu", "use_cpu", True),
}
# Model, data and what is around the trainer.
NOT_TRLS = (
    "model", "task", "task_size", "lora_r", "lora_alpha", "lora_target_modules", "overlong_tokens", "wandb_mode",
    "wandb_project",
)  # fmt: skip


def test_every_setting_has_a_place() -> None:
    names = [*REACHES_TRL, *OTHER_NAMES, *NOT_TRLS]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(RunConfig))
    assert set(OBJECTIVE_SETTINGS) <= set(REACHES_TRL)


@pytest.mark.parametrize("name", REACHES_TRL)
def test_a_setting_reaches_trl_under_its_name(name: str) -> None:
    value = REACHES_TRL[name]
    assert getattr(build_module.trainer_arguments(RunConfig(device="cpu")), name) != value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)
        config = RunConfig(device="cpu", **{name: value})
    assert getattr(build_module.trainer_arguments(config), name) == value


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_setting_reaches_trl_under_another_name(name: str) -> None:
    value, theirs, expected = OTHER_NAMES[name]
    config = RunConfig(**({"device": "cpu"} | {name: value}))
    assert getattr(build_module.trainer_arguments(config), theirs) == expected


def test_defaults_of_the_objective_are_trls(tmp_path: Path) -> None:
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    ours = RunConfig()
    for name in set(OBJECTIVE_SETTINGS) - {"dynamic_sampling_rounds", "skip_zero_advantage"}:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.fixture(params=["run", "trainer"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Make the settings of a run, or the trainer's arguments."""
    if request.param == "run":
        return RunConfig
    return lambda **settings: ChunkedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "ppo"}, f"loss_type must be one of {', '.join(LOSS_TYPES)}; got 'ppo'"),
    ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence; got 'word'"),
    ({"scale_rewards": "all"}, "scale_rewards must be one of group, batch, none; got 'all'"),
    ({"multi_objective_aggregation": "max"}, "multi_objective_aggregation must be one of sum_then_normalize, norm"),
    ({"loss_type": "cispo"}, "epsilon_high must be >= 1 with loss_type 'cispo'"),
    ({"loss_type": "cispo"}, "got None, which stands for epsilon (0.2). Its paper's value is 5.0"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "got 0.28. Its paper's value is 5.0"),
    ({"num_generations": 1}, "num_generations must be an int >= 2, since a group of one has no spread"),  # case T08
    ({"beta": -0.1}, "beta must be >= 0; got -0.1"),
    ({"epsilon": float("nan")}, "epsilon must be a finite number; got nan"),
    ({"epsilon_high": -1.0}, "epsilon_high must be >= 0; got -1.0"),
    ({"delta": 0.0}, "delta must be > 0; got 0.0"),
    ({"temperature": 0.0}, "temperature must be > 0"),
    ({"top_entropy_quantile": 1.5}, "top_entropy_quantile must be the share of tokens to keep, from 0 to 1; got 1.5"),
    ({"entropy_coef": float("inf")}, "entropy_coef must be a finite number; got inf"),
    ({"entropy_coef_min": 2.0}, "entropy_coef_min must be <= entropy_coef_max (1.0); got 2.0"),
    ({"off_policy_mask_threshold": -0.5}, "off_policy_mask_threshold must be > 0; got -0.5"),
    ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos must be > 0; got 0.0"),
    ({"vespo_lambda_neg": -1.0}, "vespo_lambda_neg must be > 0; got -1.0"),
    ({"dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds must be an int >= 0 (0: off); got -1"),
    ({"dynamic_sampling_rounds": 1.5}, "dynamic_sampling_rounds must be an int >= 0 (0: off); got 1.5"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_what_cannot_be_meant_is_refused(door: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        door(**settings)
    assert isinstance(caught.value, RunConfigError) == (door is RunConfig)


WARNED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"importance_sampling_level": "sequence", "loss_type": loss_type}, "weights each sequence by its length")
        for loss_type in ("bnpo", "dr_grpo", "dapo")
    ),
    (
        {"importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 5.0},
        "weights each sequence by its length",
    ),
    ({"loss_type": "luspo"}, "'luspo' is meant with importance_sampling_level 'sequence'"),
    ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "makes its own sequence ratio"),
    ({"delta": 1.1}, "delta 1.1 is not above the clip range, which ends at 1.2"),
    ({"delta": 4.0, "loss_type": "sapo"}, "delta does nothing with loss_type 'sapo'"),
]


@pytest.mark.parametrize(("settings", "message"), WARNED, ids=str)
def test_what_may_not_be_meant_is_warned_of(door: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.warns(ObjectiveWarning, match=message) as caught:
        door(**settings)
    told = [warning.filename for warning in caught if warning.category is ObjectiveWarning]
    assert told == [__file__]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "vespo"},
        {"delta": 4.0, "epsilon_high": 0.28},
        {"num_iterations": 5, "gradient_accumulation_steps": 4},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error::grpo_lab.training.guards.ObjectiveWarning")
def test_what_papers_do_passes_without_a_word(door: Callable[..., Any], settings: dict[str, Any]) -> None:
    door(**settings)


@pytest.mark.parametrize("arguments", [ChunkedGRPOConfig, ChunkedRLOOConfig])
@pytest.mark.parametrize(
    ("settings", "never_moved"),
    [
        ({"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, True),
        ({"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, True),
        ({"num_iterations": 2, "gradient_accumulation_steps": 4}, False),
        ({"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 3}, False),
        ({"num_iterations": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, False),
    ],
    ids=str,
)
def test_a_reuse_that_never_sees_a_moved_policy_is_warned_of(
    tmp_path: Path, arguments: type, settings: dict[str, Any], never_moved: bool
) -> None:  # case X12
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ObjectiveWarning)
        arguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
    found = [str(one.message) for one in caught if one.category is ObjectiveWarning]
    assert [("no pass sees a policy that moved" in text) for text in found] == [True] * never_moved


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_vespo_with_a_sequence_correction_is_refused(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "loss_type": "vespo"}
    with pytest.raises(ValueError, match=f"must be one of token_truncate, token_mask with loss_type 'vespo'.*{mode}"):
        ChunkedGRPOConfig(**settings, use_vllm=True, vllm_importance_sampling_mode=mode)
    ChunkedGRPOConfig(**settings, use_vllm=False, vllm_importance_sampling_mode=mode)
    ChunkedGRPOConfig(**settings, use_vllm=True, vllm_importance_sampling_mode="token_mask")


@pytest.mark.parametrize(
    ("changes", "tokens"), [({}, 19), ({"overlong_tokens": 5}, 5), ({"max_completion_length": 3}, 1)]
)
def test_the_overlong_reward_is_given_the_runs_lengths(changes: dict[str, Any], tokens: int) -> None:
    config = RunConfig(rewards={"overlong": 1.0}, **changes)
    (reward,) = build_module.reward_functions(config)
    limit = config.max_completion_length
    assert reward(completion_ids=[[1] * (limit - tokens), [1] * limit]) == [0.0, -1.0]
    assert reward(completion_ids=[[1] * (limit - tokens + 1)]) == [pytest.approx(-1 / tokens)]


@pytest.mark.parametrize("tokens", [0, 97, 2.5, True])
def test_overlong_tokens_that_do_not_fit_are_refused(tokens: Any) -> None:
    with pytest.raises(RunConfigError, match=r"overlong_tokens must be an int from 1 to max_completion_length \(96\)"):
        RunConfig(overlong_tokens=tokens)
