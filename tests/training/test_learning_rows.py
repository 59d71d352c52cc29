"""Completions without a policy term stay out of the backward pass and in everything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab.monitoring import MemoryMeter
from grpo_lab.training import trainer as trainer_module
from grpo_lab.training.guards import LOSS_TYPES
from tests.training.small import PROMPTS, build_trainer, even_reward, fixed_rollouts, lora_config, open_adapter_
from tests.training.test_trainer import assert_same, loss_and_gradients

TEACHES = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, -1.5, 0.0, 0.0])
Rollouts = dict[str, torch.Tensor]


def rollouts(advantages: torch.Tensor = TEACHES) -> Rollouts:
    """Fixed rollouts whose old log-probs differ from the policy's."""
    generator = torch.Generator().manual_seed(3)
    fixed = fixed_rollouts()
    old = -4.0 + torch.randn(fixed["completion_ids"].shape, generator=generator)
    return fixed | {"old_per_token_logps": old, "ref_per_token_logps": old - 0.1, "advantages": advantages}


def differentiated_rows(trainer: Any) -> list[int]:
    """Rows of each pass through the model that keeps a graph, from now on."""
    seen: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            seen.append(kwargs["input_ids"].size(0))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def pair(folder: Path, **settings: Any) -> list[Any]:
    """The trainer that skips and the one that does not, otherwise alike."""
    settings |= {"implementation": "torch", "chunk_size": 5}
    return [build_trainer_of(folder, skip_zero_advantage=skip, **settings) for skip in (True, False)]


def build_trainer_of(folder: Path, **settings: Any) -> Any:
    # Looked up now, since the mutants of the trainer's parts stand in its module.
    trainer = build_trainer(trainer_module.ChunkedGRPOTrainer, folder, lora=lora_config(), **settings)
    open_adapter_(trainer.model)
    return trainer


def equal_to_the_whole_batch(folder: Path, loss_type: str = "dapo", **settings: Any) -> None:
    """Loss, gradients and metrics do not change, and fewer rows are differentiated."""
    settings |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    skipping, whole = pair(folder, loss_type=loss_type, **settings)
    rows, all_rows = differentiated_rows(skipping), differentiated_rows(whole)
    assert_same(loss_and_gradients(skipping, rollouts()), loss_and_gradients(whole, rollouts()))
    assert (rows, all_rows) == ([3], [8])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.filterwarnings("ignore::grpo_lab.training.guards.ObjectiveWarning")
def test_loss_gradients_and_metrics_are_those_of_the_whole_batch(tmp_path: Path, loss_type: str) -> None:
    equal_to_the_whole_batch(tmp_path, loss_type)


@pytest.mark.parametrize(
    "settings", [{"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"top_entropy_quantile": 0.5},
                 {"gradient_checkpointing": False}, {"off_policy_mask_threshold": 0.1}], ids=str
)  # fmt: skip
def test_other_options_of_the_policy_term(tmp_path: Path, settings: dict[str, Any]) -> None:
    equal_to_the_whole_batch(tmp_path, **settings)


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"entropy_coef": 0.1}, {"use_adaptive_entropy": True}], ids=str)
def test_every_row_is_differentiated_where_the_loss_has_another_term(tmp_path: Path, settings: dict[str, Any]) -> None:
    skipping, whole = pair(tmp_path, **settings)
    rows = differentiated_rows(skipping)
    assert_same(loss_and_gradients(skipping, rollouts()), loss_and_gradients(whole, rollouts()))
    assert rows == [8]


def test_advantages_by_token_count_where_any_token_has_one(tmp_path: Path) -> None:
    by_token = torch.zeros(8, 7)
    by_token[1, 2], by_token[3, 0] = 1.0, -0.5
    skipping, whole = pair(tmp_path)
    rows = differentiated_rows(skipping)
    assert_same(loss_and_gradients(skipping, rollouts(by_token)), loss_and_gradients(whole, rollouts(by_token)))
    assert rows == [2]


def test_a_batch_that_teaches_nothing_still_has_a_backward_pass(tmp_path: Path) -> None:
    trainer, _ = pair(tmp_path)
    rows = differentiated_rows(trainer)
    loss, gradients, _ = loss_and_gradients(trainer, rollouts(torch.zeros(8)))
    assert rows == [1]
    assert loss == 0
    assert gradients
    assert not any(gradient.any() for gradient in gradients.values())


def half_spread(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that spreads for two of the four prompts."""
    scores = even_reward(completions)
    return [score if prompt in PROMPTS[:2] else 0.5 for prompt, score in zip(prompts, scores, strict=True)]


def test_whole_runs_end_in_the_same_weights(make_trainer: Callable[..., Any]) -> None:
    ends, rows = [], []
    for skip in (True, False):
        trainer = make_trainer(
            lora=lora_config(), implementation="torch", max_steps=3, num_iterations=2, skip_zero_advantage=skip,
            reward=half_spread,
        )  # fmt: skip
        rows.append(differentiated_rows(trainer))
        trainer.train()
        ends.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert any(ends[0][name].any() for name in ends[0] if "lora_B" in name)
    assert min(rows[0]) < 8
    assert set(rows[1]) == {8}
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], atol=1e-5, rtol=1e-4, msg=name)


def test_less_memory_is_needed(tmp_path: Path) -> None:
    peaks = []
    for trainer in pair(tmp_path, gradient_checkpointing=False):
        meter = MemoryMeter(torch.device("cpu"))
        with meter.region("loss") as region:
            loss_and_gradients(trainer, rollouts(torch.tensor([1.0] + [0.0] * 7)))
        peaks.append(region.peak_bytes)
    assert peaks[0] < peaks[1]
