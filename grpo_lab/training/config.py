"""The settings of one run: validated once, frozen, and written to its record."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.training.errors import RunConfigError
from grpo_lab.training.guards import LOSS_TYPES, cautions, refusals, warn_of

IMPLEMENTATIONS = ("auto", "triton", "torch", "reference")
REWARDS = ("correctness", "lenient_correctness", "format", "overlong")
DTYPES = ("auto", "float32", "bfloat16")
WANDB_MODES = (None, "online", "offline", "disabled")
# Settings of the objective, which the trainer's arguments have under the same names.
OBJECTIVE_SETTINGS = (
    "temperature", "loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta",
    "use_bias_correction_kl", "scale_rewards", "multi_objective_aggregation", "mask_truncated_completions",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_target", "entropy_coef_delta",
    "entropy_coef_min", "entropy_coef_max", "off_policy_mask_threshold", "sapo_temperature_neg",
    "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    "dynamic_sampling_rounds", "skip_zero_advantage",
)  # fmt: skip


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class RunConfig:
    """Settings of one GRPO run; the defaults are the tutorial's and run on a laptop CPU.

    One optimizer step draws `prompts_per_step` prompts, samples `num_generations` completions of each, and learns from
    all of them in `gradient_accumulation_steps` micro-batches. The help text of each field says what it means.

    Raises:
        RunConfigError: a value is out of range or two values do not fit each other; the message names the field, what
            came and what is possible.
    """

    model: str = _setting("tiny", "a preset (tiny, smollm2), a local folder, a SmolLM2 GGUF file, or a Hub id")
    task: str = _setting("problems", "problems (generated), gsm8k (Hub), or a JSONL file or folder in gsm8k's format")
    task_size: int | None = _setting(None, "use only the first so many training rows; none: all")
    steps: int = _setting(60, "optimizer steps")
    prompts_per_step: int = _setting(8, "prompts of one optimizer step")
    num_generations: int = _setting(8, "completions sampled for each prompt (the group), at least 2")
    gradient_accumulation_steps: int = _setting(1, "micro-batches of one optimizer step")
    num_iterations: int = _setting(1, "optimizer steps taken on each batch of completions")
    learning_rate: float = _setting(1e-3, "peak learning rate of AdamW")
    max_grad_norm: float = _setting(1.0, "gradient norm above which gradients are scaled down")
    max_completion_length: int = _setting(96, "tokens sampled at most")
    temperature: float = _setting(1.0, "divides the logits in sampling and in scoring, > 0")
    loss_type: str = _setting("dapo", f"one of {', '.join(LOSS_TYPES)}")
    importance_sampling_level: str = _setting("token", "a ratio for each token, or one for each sequence (GSPO)")
    epsilon: float = _setting(0.2, "clip range of the ratio below 1, and above unless epsilon_high is given")
    epsilon_high: float | None = _setting(
        None, "clip range of the ratio above 1; none: epsilon; for cispo the largest ratio itself, >= 1"
    )
    delta: float | None = _setting(None, "largest ratio where the advantage is negative; none: unbounded")
    beta: float = _setting(
        0.0, "weight of the KL term to the model with its adapters off; it pulls in groups of equal rewards too"
    )
    use_bias_correction_kl: bool = _setting(True, "multiply the KL term by the ratio, for the gradient of reverse KL")
    scale_rewards: str = _setting("group", "divide advantages by the spread of group or batch, or by none")
    multi_objective_aggregation: str = _setting(
        "sum_then_normalize", "sum rewards and normalise the sum, or normalize_then_sum: each reward by itself first"
    )
    mask_truncated_completions: bool = _setting(False, "leave completions cut at max_completion_length out of the loss")
    top_entropy_quantile: float = _setting(1.0, "share of tokens, by entropy, that keep their policy term")
    entropy_coef: float = _setting(0.0, "weight of the entropy bonus; the first one where it is adaptive")
    use_adaptive_entropy: bool = _setting(False, "move entropy_coef after each step towards entropy_target")
    entropy_target: float = _setting(0.2, "nats; the adaptive bonus acts while the entropy is not above it")
    entropy_coef_delta: float = _setting(0.005, "step of the adaptive entropy_coef")
    entropy_coef_min: float = _setting(0.0, "smallest adaptive entropy_coef")
    entropy_coef_max: float = _setting(1.0, "largest adaptive entropy_coef")
    off_policy_mask_threshold: float | None = _setting(
        None, "leave out sequences of negative advantage that moved further than this (nats a token); none: keep all"
    )
    sapo_temperature_neg: float = _setting(1.05, "sapo: temperature where the advantage is not positive")
    sapo_temperature_pos: float = _setting(1.0, "sapo: temperature where the advantage is positive")
    vespo_k_pos: float = _setting(2.0, "vespo: exponent of the sequence ratio, advantage >= 0")
    vespo_lambda_pos: float = _setting(3.0, "vespo: decay in the sequence ratio, advantage >= 0")
    vespo_k_neg: float = _setting(3.0, "vespo: exponent of the sequence ratio, advantage < 0")
    vespo_lambda_neg: float = _setting(2.0, "vespo: decay in the sequence ratio, advantage < 0")
    dynamic_sampling_rounds: int = _setting(
        0, "times that groups whose completions all earned the same are drawn again with other prompts"
    )
    skip_zero_advantage: bool = _setting(
        True, "take no backward pass for completions whose gradient is 0 by their advantage; results do not change"
    )
    overlong_tokens: int | None = _setting(
        None, "last tokens before max_completion_length over which the overlong reward falls to -1; none: a fifth of it"
    )
    rewards: dict[str, float] = field(
        default_factory=lambda: {"correctness": 1.0},
        metadata={"help": f"weight of each reward, among {', '.join(REWARDS)}"},
    )
    lora_r: int = _setting(16, "rank of the LoRA adapters")
    lora_alpha: int = _setting(32, "LoRA scale: the adapter's product is multiplied by alpha / r")
    lora_target_modules: str = _setting("all-linear", "all-linear, or module names separated by commas")
    gradient_checkpointing: bool = _setting(True, "recompute activations in the backward pass to save memory")
    chunk_size: int = _setting(512, "tokens whose logits exist at one time; may change during the run")
    implementation: str = _setting("auto", "auto, triton, torch or reference (full logits)")
    seed: int = _setting(0, "seed of data order, adapters and sampling")
    device: str | None = _setting(None, "cpu or cuda; none: cuda where there is one")
    dtype: str = _setting("auto", "auto (bfloat16 on CUDA, float32 on CPU), float32 or bfloat16")
    save_every: int = _setting(25, "optimizer steps between checkpoints")
    output_dir: str = _setting("runs", "folder under which the run makes its own")
    wandb_mode: str | None = _setting(None, "online, offline or disabled; none: WANDB_MODE, else logged in or offline")
    wandb_project: str = _setting("grpo-lab", "project name in Weights & Biases")

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_choices()
        self._check_fit()
        warn_of(cautions(self, steps_per_generation=self.gradient_accumulation_steps), stacklevel=3)

    def _check_positive(self) -> None:
        counts = ("steps", "prompts_per_step", "gradient_accumulation_steps", "num_iterations", "save_every")
        sizes = ("max_completion_length", "chunk_size", "lora_r", "lora_alpha")
        for name in counts + sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RunConfigError(f"{name} must be an int >= 1; got {value!r}.")
        for name in ("learning_rate", "temperature", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise RunConfigError(f"{name} must be > 0; got {getattr(self, name)!r}.")

    def _check_choices(self) -> None:
        for name, choices in (
            ("dtype", DTYPES),
            ("wandb_mode", WANDB_MODES),
            ("implementation", IMPLEMENTATIONS),
        ):
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise RunConfigError(f"{name} must be one of {listed}; got {getattr(self, name)!r}.")
        unknown = set(self.rewards) - set(REWARDS)
        if unknown or not self.rewards:
            raise RunConfigError(f"rewards must give a weight to some of {', '.join(REWARDS)}; got {self.rewards!r}.")
        for message in refusals(self):
            raise RunConfigError(message)

    def _check_fit(self) -> None:
        buffer = self.overlong_buffer
        if isinstance(buffer, bool) or not isinstance(buffer, int) or not 1 <= buffer <= self.max_completion_length:
            raise RunConfigError(
                f"overlong_tokens must be an int from 1 to max_completion_length ({self.max_completion_length}); "
                f"got {self.overlong_tokens!r}."
            )
        completions = self.completions_per_step
        if completions % self.gradient_accumulation_steps:
            valid = [n for n in range(1, completions + 1) if completions % n == 0]
            raise RunConfigError(
                f"gradient_accumulation_steps must divide the {completions} completions of a step (prompts_per_step "
                f"{self.prompts_per_step} x num_generations {self.num_generations}); got "
                f"{self.gradient_accumulation_steps}. Valid here: {', '.join(map(str, valid))}."
            )
        if self.save_every % self.num_iterations:
            raise RunConfigError(
                f"save_every must be a multiple of num_iterations ({self.num_iterations}), so that a checkpoint never "
                f"falls inside the use of one batch of completions; got {self.save_every}."
            )

    @property
    def completions_per_step(self) -> int:
        """Completions that one optimizer step samples and learns from."""
        return self.prompts_per_step * self.num_generations

    @property
    def overlong_buffer(self) -> int:
        """Tokens over which the overlong reward falls: `overlong_tokens`, or a fifth of the length as in DAPO."""
        return max(1, self.max_completion_length // 5) if self.overlong_tokens is None else self.overlong_tokens

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """The settings that `to_dict` wrote.

        Args:
            values: names and values; what is absent keeps its default.

        Returns:
            The settings.

        Raises:
            RunConfigError: a key is not a setting (the closest names are listed), or a value is out of range.
        """
        names = [entry.name for entry in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise RunConfigError(f"unknown setting: {', '.join(unknown)}. Known: {', '.join(names)}.")
        return cls(**values)

    def target_modules(self) -> str | list[str]:
        """`lora_target_modules` as PEFT takes it."""
        if self.lora_target_modules == "all-linear":
            return "all-linear"
        return [name.strip() for name in self.lora_target_modules.split(",")]

    @property
    def label(self) -> str:
        """A short name for folders and W&B: model and task, safe in a file name."""
        parts = (Path(self.model).name or self.model, Path(self.task).stem or self.task)
        return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in part) for part in parts)
