"""TRL's GRPO and RLOO trainers with their log-probs taken from the chunked head.

What TRL does well stays TRL's: sampling, rewards, advantages, every loss type, logging, checkpoints. What changes is
the pass from hidden states to log-probs (current policy, old policy and reference), and what is measured around it.
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from trl import GRPOConfig, RLOOConfig, RLOOTrainer

from grpo_lab.training.chunked_head import HeadSettings
from grpo_lab.training.chunked_trainer import ChunkedHeadMixin
from grpo_lab.training.dynamic_sampling import DynamicSamplingTrainer
from grpo_lab.training.guards import cautions, refusals, reuse_cautions, sampler_refusals, warn_of
from grpo_lab.training.head_arguments import ChunkedHeadArguments, split_groups_explained
from grpo_lab.training.learning_rows import LearningRowsTrainer


@dataclass
class ChunkedGRPOConfig(GRPOConfig, ChunkedHeadArguments):
    """TRL's `GRPOConfig`, how the LM head is scored, dynamic sampling, and what is left out of the backward pass.

    Args:
        chunk_size: tokens whose logits exist at one time; memory of the head grows with it, results do not change.
        implementation: `"auto"` (Triton where it runs, else torch), `"triton"`, `"torch"`, or `"reference"`
            (full logits, to compare with).
        dynamic_sampling_rounds: times that groups whose completions all earned the same are drawn again with other
            prompts; 0 takes what comes first.
        skip_zero_advantage: whether completions whose gradient is 0 by their advantage are scored without a backward
            pass; results do not change.

    Raises:
        ValueError: `chunk_size` < 1, `temperature` <= 0, an unknown implementation, a batch that does not hold whole
            groups (valid values are listed), or an objective that `grpo_lab.training.guards` refuses.
    """

    dynamic_sampling_rounds: int = field(
        default=0, metadata={"help": "Times that groups without spread are drawn again; 0: never."}
    )
    skip_zero_advantage: bool = field(
        default=True, metadata={"help": "Score completions without a policy term, and leave their backward pass out."}
    )

    def __post_init__(self) -> None:
        # TRL also takes the booleans of its older releases here.
        config: Any = self
        config.scale_rewards = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
        self.check_head_arguments(self.temperature)
        for message in chain(refusals(self), sampler_refusals(self)):
            raise ValueError(message)
        with split_groups_explained(self):
            super().__post_init__()
        # One frame more than it seems: transformers wraps the `__init__` of its arguments.
        warn_of(cautions(self, self.steps_per_generation), stacklevel=4)


class ChunkedGRPOTrainer(ChunkedHeadMixin, LearningRowsTrainer, DynamicSamplingTrainer):
    """`trl.GRPOTrainer` whose per-token log-probs come from the chunked LM head.

    The loss equals TRL's; the logits of a micro-batch never exist at one time. See `ChunkedHeadMixin` for `meter` and
    what can be read, `DynamicSamplingTrainer` for what `dynamic_sampling_rounds` does and `LearningRowsTrainer` for
    `skip_zero_advantage`.
    """

    args: ChunkedGRPOConfig
    config_class = ChunkedGRPOConfig

    def _compares_policies(self) -> bool:
        # Where sampling serves one optimizer step, TRL takes the current log-probs for the old ones.
        uses = self.args.steps_per_generation * self.num_iterations
        return bool(self.beta != 0.0 or self.args.gradient_accumulation_steps % uses)

    def _head_settings(self) -> HeadSettings:
        return replace(
            super()._head_settings(),
            entropies_require_grad=self.args.entropy_coef != 0.0 or self.args.use_adaptive_entropy,
            cast_to_fp32=self.args.cast_lm_head_to_fp32,
        )


@dataclass
class ChunkedRLOOConfig(RLOOConfig, ChunkedHeadArguments):
    """TRL's `RLOOConfig` and how the LM head is scored; the arguments are `ChunkedHeadArguments`'."""

    def __post_init__(self) -> None:
        self.check_head_arguments(self.temperature)
        with split_groups_explained(self):
            super().__post_init__()
        warn_of(reuse_cautions(self, self.steps_per_generation), stacklevel=4)


class ChunkedRLOOTrainer(ChunkedHeadMixin, RLOOTrainer):
    """`trl.RLOOTrainer` whose log-probs come from the chunked LM head; see `ChunkedHeadMixin`."""

    args: ChunkedRLOOConfig
    config_class = ChunkedRLOOConfig
