"""Groups without spread are drawn again, counted once, and the same after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from grpo_lab.training import ChunkedGRPOTrainer
from grpo_lab.training.dynamic_sampling import groups_with_spread
from tests.training.small import build_trainer, lora_config, open_adapter_

ENDS: dict[str, Any] = {"generation_kwargs": {"sequence_bias": [[[2], 5.0]]}, "optim": "sgd"}


def only_w3(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Spread for prompts that begin with w3, a constant for the others."""
    return [
        float(len(ids) % 5) if prompt.startswith("w3") else 0.0
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Counting:
    """Pays for length, logs its completions, and remembers what it was given."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        self.calls.append(list(completions))
        log_extra("text", list(completions))
        log_metric("calls", float(len(self.calls)))
        return [float(len(text)) for text in completions]


def sampled(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    torch.manual_seed(0)
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._generate_and_score_completions(rows)


def spreads(trainer: Any) -> list[bool]:
    advantages = torch.tensor(list(trainer._logs["advantages"])).view(-1, trainer.num_generations)
    return advantages.any(-1).tolist()


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_the_batch_fills_with_groups_that_have_spread(make_trainer: Callable[..., Any], implementation: str) -> None:
    trainer = make_trainer(
        reward=only_w3,
        dynamic_sampling_rounds=40,
        per_device_train_batch_size=16,
        implementation=implementation,
        **ENDS,
    )
    output = sampled(trainer)
    assert all(spreads(trainer))
    assert all(prompt.startswith("w3") for prompt in trainer._logs["prompt"])
    metrics = trainer._metrics["train"]
    assert metrics["frac_reward_zero_std"] == [0.0]
    assert metrics["sampling/redraw_rounds"][0] >= 1
    assert metrics["sampling/redrawn_groups"][0] >= metrics["sampling/redraw_rounds"][0]
    assert output["advantages"].shape == (16,)
    assert output["num_items_in_batch"] == output["completion_mask"].sum()


def test_what_is_never_spread_is_kept_and_counted(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(reward=lambda completions, **_: [1.0] * len(completions), dynamic_sampling_rounds=3, **ENDS)
    output = sampled(trainer)
    metrics = trainer._metrics["train"]
    assert metrics["frac_reward_zero_std"] == [1.0]
    assert (metrics["sampling/redraw_rounds"], metrics["sampling/redrawn_groups"]) == ([3.0], [6.0])
    assert not output["advantages"].any()


def test_without_need_nothing_is_drawn_again_and_the_batch_is_trls(make_trainer: Callable[..., Any]) -> None:
    theirs, ours = make_trainer(GRPOTrainer, **ENDS), make_trainer(dynamic_sampling_rounds=5, **ENDS)
    expected, output = sampled(theirs), sampled(ours)
    assert ours._metrics["train"]["sampling/redraw_rounds"] == [0.0]
    assert ours._metrics["train"]["sampling/redrawn_groups"] == [0.0]
    assert output.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(output[name], value, msg=name)
    assert list(ours._logs["completion"]) == list(theirs._logs["completion"])
    for name, values in theirs._metrics["train"].items():
        assert ours._metrics["train"][name] == pytest.approx(values), name


def test_metrics_and_logs_are_of_the_kept_batch_alone(make_trainer: Callable[..., Any]) -> None:
    reward = Counting()
    trainer = make_trainer(reward=[only_w3, reward], reward_weights=[1.0, 0.0], dynamic_sampling_rounds=2, **ENDS)
    seen_before = trainer.state.num_input_tokens_seen
    output = sampled(trainer)
    assert len(reward.calls) > 2
    *drawn, final = reward.calls
    assert set(final) <= {text for texts in drawn for text in texts}, "nothing is sampled anew for the final batch"
    metrics, logs = trainer._metrics["train"], trainer._logs
    for name, values in metrics.items():
        assert len(values) == 1, name
    assert [len(logs[name]) for name in ("prompt", "completion", "advantages")] == [8, 8, 8]
    assert list(logs["extra"]["text"]) == list(logs["completion"])
    assert metrics["calls"] == [float(len(reward.calls))]
    lengths = output["completion_mask"].sum(1).float()
    assert metrics["completions/mean_length"] == [pytest.approx(lengths.mean().item())]
    assert metrics["completions/max_length"] == [lengths.max().item()]
    tokens = output["completion_mask"].sum() + output["prompt_mask"].sum()
    assert trainer.state.num_input_tokens_seen - seen_before == tokens
    decoded = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    assert decoded == list(logs["completion"])


def test_evaluation_takes_what_comes_first(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        reward=lambda completions, **_: [1.0] * len(completions), dynamic_sampling_rounds=3,
        per_device_eval_batch_size=4, around={"eval_dataset": Dataset.from_dict({"prompt": ["w3", "w4"]})}, **ENDS,
    )  # fmt: skip
    assert "eval_sampling/redraw_rounds" not in trainer.evaluate()


@pytest.mark.parametrize(
    ("summed", "expected"), [(True, [False, True, True, False, False]), (False, [True] * 3 + [False] * 2)]
)
def test_spread_of_groups(summed: bool, expected: list[bool]) -> None:
    nan = float("nan")
    rewards = torch.tensor(
        [[1, 0], [0, 1], [1, 0], [0, 0], [nan, 1], [nan, 2], [0.7, 0.7], [0.7, 0.7], [nan, nan], [1, nan]]
    )
    assert groups_with_spread(rewards, torch.ones(2), 2, summed=summed) == expected


def test_a_reward_without_weight_gives_no_spread() -> None:
    rewards = torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    for summed in (True, False):
        assert groups_with_spread(rewards, torch.tensor([1.0, 0.0]), 2, summed=summed) == [False]


def test_rollout_functions_are_refused_by_name(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="dynamic_sampling_rounds does not go with rollout_func; got 2"):
        make_trainer(dynamic_sampling_rounds=2, around={"rollout_func": dict})


def _training(folder: Path, **config: Any) -> Any:
    settings = {"dynamic_sampling_rounds": 3, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = build_trainer(
        ChunkedGRPOTrainer, folder, lora=lora_config(), reward=only_w3, **(settings | ENDS | config)
    )
    open_adapter_(trainer.model)
    return trainer


def test_a_resumed_run_draws_what_the_unbroken_run_drew(tmp_path: Path) -> None:
    unbroken = _training(tmp_path / "unbroken")
    unbroken.train()
    rows = [row for row in unbroken.state.log_history if "loss" in row]
    assert sum(row["sampling/redrawn_groups"] for row in rows[2:]) > 0
    resumed = _training(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-2"))
    assert list(resumed._logs["completion"]) == list(unbroken._logs["completion"])
    for (name, weight), other in zip(resumed.model.named_parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    state = json.loads((tmp_path / "resumed" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["log_history"][-1]["sampling/redraw_rounds"] == rows[-1]["sampling/redraw_rounds"]
