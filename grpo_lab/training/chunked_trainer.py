"""What TRL's trainers gain from the chunked head, and what is measured around the loss pass.

The parts are mixed into `trl.GRPOTrainer` and `trl.RLOOTrainer`, which both ask their model for log-probs with
`fused_lm_head=True` and keep everything else: sampling, rewards, advantages, losses, logging, checkpoints.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from grpo_lab.heads import base_model, check_head
from grpo_lab.monitoring import MemoryMeter, MemoryRegion
from grpo_lab.training.chunked_head import HeadSettings, attach_chunked_head, resolve_implementation
from grpo_lab.training.guards import dropout_caution, warn_of
from grpo_lab.training.head_adapters import adapters_on_the_head_allowed
from grpo_lab.training.head_arguments import ChunkedHeadArguments, check_chunk_size
from grpo_lab.training.router_loss import check_router_loss


@dataclass
class StepReadings:
    """What was measured during one optimizer step; `None` where nothing was.

    Attributes:
        peak_bytes: highest live memory during forward and backward of the loss, over the micro-batches.
        head_extra_bytes: most that one pass through the LM head added to what was live before it.
        head_s: seconds inside the LM head's forward passes of the loss.
        loss_s: seconds of forward and backward of the loss.
        generation_s: seconds of sampling, scoring old and reference log-probs, and rewards.
    """

    peak_bytes: int | None = None
    head_extra_bytes: int | None = None
    head_s: float = 0.0
    loss_s: float = 0.0
    generation_s: float = 0.0


def _highest(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else max(known, new)


class ChunkedHeadMixin(Trainer):
    """The part of a trainer that scores with the chunked head and measures the loss pass.

    `chunk_size` may be assigned between optimizer steps. With PEFT, the reference log-probs come from the same model
    with its adapters off.

    Args:
        *args: as for the TRL trainer it is mixed into.
        meter: where given, peak memory and times of each step are collected in `readings`.
        **kwargs: as for the TRL trainer; `args` must be of the class that `config_class` names.

    Attributes:
        config_class: class of the arguments.
        implementation: the head's implementation in use: `"triton"`, `"torch"` or `"reference"`.
        readings: what was measured since `take_readings`.
        rollouts: generation batches sampled for training so far.

    Raises:
        ValueError: the config is of another class, the model's head cannot be described (named, with the reason), or
            nothing is trainable.
        RuntimeError: the implementation asked for cannot run on this machine.
    """

    config_class: type[ChunkedHeadArguments]

    def __init__(self, *args: Any, meter: MemoryMeter | None = None, **kwargs: Any) -> None:
        config = kwargs.get("args", args[2] if len(args) > 2 else None)
        if not isinstance(config, self.config_class):
            raise ValueError(f"args must be a {self.config_class.__name__}; got {type(config).__name__}.")
        with adapters_on_the_head_allowed(kwargs.get("model", args[0] if args else None)):
            super().__init__(*args, **kwargs)
        self.meter = meter
        self.readings = StepReadings()
        self.rollouts = 0
        self.implementation = resolve_implementation(config.implementation, self.accelerator.device)
        self._chunk_size = config.chunk_size
        self._pass_stack = ExitStack()
        policy = self.accelerator.unwrap_model(self.model)
        check_head(policy)
        if self.aux_loss_enabled:
            check_router_loss(base_model(policy))
        check_trainable(self.model)
        rates = [module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout)]
        warn_of(dropout_caution(max(rates, default=0.0), self._compares_policies()), stacklevel=2)
        attach_chunked_head(base_model(policy), self._head_settings, self._measure_head)
        if self.ref_model is not None:
            reference = self.accelerator.unwrap_model(self.ref_model)
            attach_chunked_head(base_model(reference), self._head_settings)

    def _compares_policies(self) -> bool:
        """Whether log-probs of two passes through the model meet in the loss."""
        return True

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits exist at one time; assign between optimizer steps."""
        return self._chunk_size

    @chunk_size.setter
    def chunk_size(self, value: int) -> None:
        self._chunk_size = check_chunk_size(value)

    def _head_settings(self) -> HeadSettings:
        return HeadSettings(
            temperature=self.temperature, chunk_size=self._chunk_size, implementation=self.implementation
        )

    def take_readings(self) -> StepReadings:
        """Return what was measured since the last call, and start anew."""
        readings, self.readings = self.readings, StepReadings()
        return readings

    @contextmanager
    def _measure_head(self) -> Iterator[None]:
        # Only the loss's own pass counts: scoring old and reference log-probs runs without gradients.
        if self.meter is None or not torch.is_grad_enabled():
            yield
            return
        self._synchronize()
        started = time.perf_counter()
        with self.meter.region("head") as region:
            yield
        self._synchronize()
        self.readings.head_s += time.perf_counter() - started
        self.readings.head_extra_bytes = _highest(self.readings.head_extra_bytes, region.extra_bytes)

    @contextmanager
    def _measure_loss_pass(self) -> Iterator[None]:
        started = time.perf_counter()
        region: MemoryRegion | None = None
        with ExitStack() as stack:
            if self.meter is not None:
                region = stack.enter_context(self.meter.region("loss"))
            yield
            self._synchronize()
        self.readings.loss_s += time.perf_counter() - started
        if region is not None:
            self.readings.peak_bytes = _highest(self.readings.peak_bytes, region.peak_bytes)

    def _synchronize(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's step on one micro-batch, with peak memory and time of the loss pass taken around it."""
        # `_prepare_inputs`, called first inside, opens the measurement once the rollout is there.
        with without_cudnn_attention(), ExitStack() as self._pass_stack:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._pass_stack.enter_context(self._measure_loss_pass())
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        started = time.perf_counter()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._synchronize()
        self.readings.generation_s += time.perf_counter() - started
        self.rollouts += self.model.training
        return output

    def scored_completions(self) -> list[dict[str, Any]]:
        """The latest generation batch: prompt, completion, advantage, each reward function's value, extra columns."""
        logs = self._logs
        columns: dict[str, Any] = {**logs["rewards"], **logs["extra"], "advantage": logs["advantages"]}
        return [
            {
                "prompt": prompt,
                "completion": completion,
                **{name: values[row] for name, values in columns.items() if row < len(values)},
            }
            for row, (prompt, completion) in enumerate(zip(logs["prompt"], logs["completion"], strict=True))
        ]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """TRL's optimizer, refused where it would train nothing."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        check_trainable(self.model, optimizer)
        return optimizer


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave attention to PyTorch's other backends.

    Since torch 2.11 cuDNN comes first on H100 and H200, and its backward pass gives NaN for a masked sequence of
    64 more than a multiple of 128 tokens (pytorch/pytorch#196678, huggingface/trl#7181).
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def check_trainable(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse to train nothing.

    Args:
        model: the policy.
        optimizer: where given, its tensors are counted too.

    Raises:
        ValueError: no parameter requires a gradient, or the optimizer holds none of those that do.
    """
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    total = sum(1 for _ in model.parameters())
    if not trainable:
        raise ValueError(
            f"model has no trainable parameter (0 of {total} tensors require a gradient). Pass a peft_config, load "
            "the adapter with is_trainable=True, or unfreeze what should learn."
        )
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held & trainable:
        raise ValueError(
            f"the optimizer holds {len(held)} tensors, none of them among the model's {len(trainable)} trainable "
            "ones. Build it from this model's parameters, or leave optimizers unset."
        )
