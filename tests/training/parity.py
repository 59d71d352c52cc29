"""One case through a trainer of TRL's or of ours: what came out, and how far two outcomes are apart."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PrinterCallback, set_seed
from trl import GRPOTrainer, RLOOTrainer

from grpo_lab.training import ChunkedGRPOTrainer, ChunkedRLOOTrainer
from tests.training.options import Case, Settings
from tests.training.small import (
    TINY,
    VOCABULARY,
    build_trainer,
    even_reward,
    fixed_rollouts,
    long_reward,
    lora_config,
    open_adapter_,
    tiny_llama,
)

RUN: Settings = {
    # Plain SGD: weights move in proportion to gradients, where Adam blows the rounding of small ones up.
    "optim": "sgd",
    "learning_rate": 0.3,
    # About a fourth of the tokens ends its completion, so that lengths differ and some are cut.
    "generation_kwargs": {"sequence_bias": [[[2], 5.0]]},
}
_NOT_COMPARED = ("step_time", "train_runtime", "runtime", "samples_per_second", "steps_per_second")
# A loss or metric below it, which may be 0 by cancellation, is compared as if it were that large.
_SMALLEST = 1.0


def ours(cls: type) -> type:
    """Our trainer in the place of one of TRL's."""
    return {GRPOTrainer: ChunkedGRPOTrainer, RLOOTrainer: ChunkedRLOOTrainer}[cls]


@dataclass(frozen=True)
class Outcome:
    """What a trainer made of a case.

    Attributes:
        losses: one a micro-batch, or one an optimizer step of a run.
        gradients: of every trainable tensor after the last micro-batch, or what a run added to each.
        metrics: all that was logged, by name, but for times.
        rounding: what the values of `gradients` lost before they were taken.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    metrics: dict[str, list[float]]
    rounding: float = 0.0


@dataclass(frozen=True)
class Differences:
    """Largest relative differences of two outcomes; infinite where one has a name that the other lacks."""

    loss: float
    gradient: float
    metric: float
    worst_metric: str

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.gradient, self.metric) <= tolerance


def differences(ours: Outcome, theirs: Outcome) -> Differences:
    """How far `ours` is from `theirs`, gradients tensor by tensor."""
    loss = _apart(ours.losses, theirs.losses)
    gradient = math.inf
    if ours.gradients.keys() == theirs.gradients.keys():
        largest = max(float(value.abs().max()) for value in theirs.gradients.values())
        gradient = max(
            max(float((ours.gradients[name] - value).abs().max()) - theirs.rounding, 0.0)
            / max(float(value.abs().max()), 1e-2 * largest, 1e-12)
            for name, value in theirs.gradients.items()
        )
    metrics = {
        name: _apart(ours.metrics.get(name, []), theirs.metrics.get(name, []))
        for name in ours.metrics.keys() | theirs.metrics.keys()
    }
    worst = max(metrics, key=lambda name: metrics[name])
    return Differences(loss, gradient, metrics[worst], worst)


def _apart(ours: list[float], theirs: list[float]) -> float:
    if len(ours) != len(theirs):
        return math.inf
    scale = max([abs(value) for value in theirs if not math.isnan(value)] + [_SMALLEST])
    pairs = [pair for pair in zip(ours, theirs, strict=True) if not all(map(math.isnan, pair))]
    gaps = [abs(a - b) / scale for a, b in pairs]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def outcome(
    cls: type,
    case: Case,
    folder: Path,
    *,
    without_option: bool = False,
    trained_head: bool = False,
    inputs: dict[str, Tensor] | None = None,
    **arguments: Any,
) -> Outcome:
    """Take `case` through a trainer of class `cls`.

    Args:
        cls: TRL's class or ours.
        case: the option, its value, and what surrounds it.
        folder: for files.
        without_option: leave the option as it is by default, and set only what it needs.
        trained_head: train the LM head in full, beside the adapters.
        inputs: put over the fixed rollouts.
        **arguments: further ones of the config, `implementation` and `chunk_size`.

    Returns:
        Losses, gradients and metrics.
    """
    settings = (case.needs if without_option else case.settings) | arguments
    trainer = _trainer(cls, case, settings, folder, trained_head)
    return _whole_run(trainer) if case.run else _micro_batches(trainer, case.steps, inputs or {})


def _trainer(cls: type, case: Case, settings: Settings, folder: Path, trained_head: bool) -> Any:
    around: Settings = {}
    if case.world == "sampler":
        around["rollout_func"] = _sampled_elsewhere
    if case.run:
        settings = RUN | settings
    lora = None
    if case.world != "whole":
        lora = lora_config(
            target_modules=["q_proj", "o_proj", "up_proj"],
            lora_dropout=0.5 if case.world == "dropout" else 0.0,
            modules_to_save=["lm_head"] if trained_head else None,
        )
    model = _model(case.world, folder)
    rewards = [even_reward, long_reward] if case.run else even_reward
    trainer = build_trainer(cls, folder, model, lora, rewards, around, **settings)
    if lora is not None:
        open_adapter_(trainer.model)
    if case.world == "sampler":
        # As if vLLM had sampled, without vLLM.
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def _model(world: str, folder: Path) -> Any:
    if world == "half":
        return tiny_llama().to(torch.bfloat16)
    if world == "experts":
        torch.manual_seed(0)
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        return MixtralForCausalLM(MixtralConfig(**TINY, **experts))
    if world == "whole":
        # The reference model is loaded from where the policy came from.
        saved = folder / "model"
        if not saved.exists():
            tiny_llama().save_pretrained(saved)
        return LlamaForCausalLM.from_pretrained(saved)
    return tiny_llama()


@torch.no_grad()
def _own_logps(trainer: Any, ids: Tensor, mask: Tensor, length: int) -> Tensor:
    """(B, length) log-probs of the last tokens by the model's plain forward pass, without dropout."""
    trainer.model.eval()
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].float()
    trainer.model.train()
    return logits.log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]


def _near_policy(trainer: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rollouts with old and reference log-probs a little off the policy's, so that ratios fall on all sides of 1."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].size(1)
    own = _own_logps(trainer, ids, mask, length)
    generator = torch.Generator().manual_seed(3)
    old, ref = (own + 0.4 * torch.randn(own.shape, generator=generator) for _ in range(2))
    old_logps = ((own + (ref - own) / 3) * inputs["completion_mask"]).sum(1)
    # Of a whole generation batch, of which these rows are a part.
    tokens = torch.tensor(50)
    scored = {"old_per_token_logps": old, "ref_per_token_logps": ref, "old_logps": old_logps}
    return inputs | scored | {"num_items_in_batch": tokens}


def _micro_batches(trainer: Any, steps: int, inputs: dict[str, Tensor]) -> Outcome:
    inputs = _near_policy(trainer, fixed_rollouts()) | inputs
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Outcome(losses, gradients, {name: list(values) for name, values in trainer._metrics["train"].items()})


def _whole_run(trainer: Any) -> Outcome:
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.remove_callback(PrinterCallback)
    set_seed(7)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return Outcome(
        losses=[row["loss"] for row in rows],
        gradients={name: after[name].detach() - weight for name, weight in before.items()},
        # A weight in fp32 is off by half a step of its last bit after each of the optimizer's steps.
        rounding=len(rows) * torch.finfo(torch.float32).eps * max(float(w.abs().max()) for w in before.values()),
        metrics={
            name: [float("nan") if row.get(name) is None else float(row[name]) for row in rows]
            for name in rows[0]
            if name not in _NOT_COMPARED
        },
    )


def _sampled_elsewhere(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of random words, some ended and some cut, with log-probs a little off the policy's own."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    completion_ids, logprobs = [], []
    for row, prompt in enumerate(prompt_ids):
        words = torch.randint(3, VOCABULARY, (7,), generator=generator).tolist()
        ids = words if row % 3 == 0 else [*words[: row % 5], 2]
        tokens = torch.tensor([prompt + ids])
        own = _own_logps(trainer, tokens, torch.ones_like(tokens), len(ids))[0]
        noisy = own + 0.1 * torch.randn(own.shape, generator=generator)
        completion_ids.append(ids)
        # A sampler may have no log-prob for a token.
        logprobs.append([None if row == 1 and place == 0 else value for place, value in enumerate(noisy.tolist())])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
