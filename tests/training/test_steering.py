"""What a step boundary does with what the trainer logs."""

import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_lab.training.chunked_trainer import StepReadings, without_cudnn_attention
from grpo_lab.training.steering import Steering, SteeringCallback, step_row


def trainer_with(readings: StepReadings) -> Any:
    return Mock(take_readings=lambda: readings, chunk_size=64)


def test_what_was_not_measured_is_absent_and_what_was_has_its_unit() -> None:
    logs = {"loss": 0.0, "reward": 0.5, "kl": float("nan"), "reward_std": None, "epoch": 0.1}
    row = step_row(logs, 3, 12.5, 2.0, trainer_with(StepReadings(head_s=0.25, loss_s=1.5, generation_s=0.4)))
    assert row == {
        "step": 3, "time_s": 12.5, "loss": 0.0, "reward": 0.5, "loss/chunk_size": 64, "time/step_s": 2.0,
        "time/loss_s": 1.5, "time/generation_s": 0.4, "time/head_ms": 250.0,
    }  # fmt: skip
    measured = StepReadings(peak_bytes=3 * 2**20, head_extra_bytes=2**19)
    row = step_row(logs, 3, 12.5, 2.0, trainer_with(measured))
    assert (row["memory/peak_mib"], row["memory/head_extra_mib"]) == (3.0, 0.5)


@pytest.mark.parametrize("grad_norm", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_end_the_run_with_their_row_written(tmp_path: Any, grad_norm: float) -> None:
    written: list[dict[str, Any]] = []
    callback = SteeringCallback(Steering(64), trainer_with(StepReadings()), written.append, Mock(), time.monotonic())
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state = TrainerState(global_step=5)
    callback.on_log(arguments, state, TrainerControl(), {"loss": 0.1, "grad_norm": 0.2})
    with pytest.raises(FloatingPointError, match=r"gradients of step 5 were not finite .*continue_from"):
        callback.on_log(arguments, state, TrainerControl(), {"loss": 0.1, "grad_norm": grad_norm})
    assert len(written) == 2
    assert "grad_norm" not in written[1]


def test_attention_backends_are_as_before_after_a_step() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
