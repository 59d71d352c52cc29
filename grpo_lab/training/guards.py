"""Which objectives a setting may ask for: what is refused, and what runs but deserves a word first.

The settings of a run and the trainer's own arguments both name their fields as TRL does, so both ask here.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
_AT_LEAST_ZERO = (
    "beta",
    "epsilon",
    "epsilon_high",
    "vespo_k_pos",
    "vespo_k_neg",
    "entropy_coef_delta",
    "entropy_target",
)
_ABOVE_ZERO = (
    "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_lambda_pos", "vespo_lambda_neg",
    "off_policy_mask_threshold",
)  # fmt: skip
_FINITE = ("entropy_coef", "entropy_coef_min", "entropy_coef_max")
_MAY_BE_UNSET = ("epsilon_high", "delta", "off_policy_mask_threshold")
# The losses whose sum over tokens is divided by something other than each sequence's own length.
_TOKEN_SUMS = ("bnpo", "dr_grpo", "dapo", "cispo")
_WITHOUT_CLIP_RANGE = ("cispo", "sapo", "vespo")
_TOKEN_MODES = ("token_truncate", "token_mask")


class ObjectiveWarning(UserWarning):
    """Settings that run, and may not mean what they seem to."""


def refusals(settings: Any) -> Iterator[str]:
    """What makes these settings unusable.

    Args:
        settings: an object with TRL's names for the objective's fields.

    Yields:
        One message a fault, naming the field, what came and what is possible.
    """
    for name, choices in _CHOICES.items():
        if getattr(settings, name) not in choices:
            yield f"{name} must be one of {', '.join(choices)}; got {getattr(settings, name)!r}."
    yield from _out_of_range(settings)
    if settings.loss_type == "cispo" and not (_is_number(settings.epsilon_high) and settings.epsilon_high >= 1):
        yield (
            "epsilon_high must be >= 1 with loss_type 'cispo', where it is the largest ratio itself and not a distance "
            f"from 1; got {settings.epsilon_high!r}"
            + (f", which stands for epsilon ({settings.epsilon:g})" if settings.epsilon_high is None else "")
            + ". Its paper's value is 5.0."
        )


def _out_of_range(settings: Any) -> Iterator[str]:
    generations = settings.num_generations
    if isinstance(generations, bool) or not isinstance(generations, int) or generations < 2:
        yield (
            "num_generations must be an int >= 2, since a group of one has no spread to learn from; "
            f"got {generations!r}."
        )
    rounds = settings.dynamic_sampling_rounds
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        yield f"dynamic_sampling_rounds must be an int >= 0 (0: off); got {rounds!r}."
    for name in _AT_LEAST_ZERO + _ABOVE_ZERO + _FINITE:
        value = getattr(settings, name)
        if value is None and name in _MAY_BE_UNSET:
            continue
        if not _is_number(value):
            yield f"{name} must be a finite number; got {value!r}."
        elif name in _ABOVE_ZERO and not value > 0:
            yield f"{name} must be > 0; got {value!r}."
        elif name in _AT_LEAST_ZERO and not value >= 0:
            yield f"{name} must be >= 0; got {value!r}."
    quantile = settings.top_entropy_quantile
    if not (_is_number(quantile) and 0 <= quantile <= 1):
        yield f"top_entropy_quantile must be the share of tokens to keep, from 0 to 1; got {quantile!r}."
    low, high = settings.entropy_coef_min, settings.entropy_coef_max
    if _is_number(low) and _is_number(high) and low > high:
        yield f"entropy_coef_min must be <= entropy_coef_max ({high!r}); got {low!r}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def sampler_refusals(settings: Any) -> Iterator[str]:
    """What makes an objective unusable with completions from vLLM.

    Args:
        settings: an object with TRL's names, those of its vLLM correction among them.

    Yields:
        One message a fault.
    """
    corrected = settings.use_vllm and settings.vllm_importance_sampling_correction
    if settings.loss_type == "vespo" and corrected and settings.vllm_importance_sampling_mode not in _TOKEN_MODES:
        yield (
            "vllm_importance_sampling_mode must be one of "
            f"{', '.join(_TOKEN_MODES)} with loss_type 'vespo', which multiplies the correction over the tokens of a "
            f"sequence; got {settings.vllm_importance_sampling_mode!r}."
        )


def cautions(settings: Any, steps_per_generation: int) -> Iterator[str]:
    """What runs, but may not be what was meant.

    Args:
        settings: usable settings, with TRL's names.
        steps_per_generation: micro-batches that one sampling serves.

    Yields:
        One sentence or two each.
    """
    sequence = settings.importance_sampling_level == "sequence"
    if sequence and settings.loss_type in _TOKEN_SUMS:
        yield (
            f"importance_sampling_level 'sequence' with loss_type {settings.loss_type!r} weights each sequence by its "
            "length, since that loss sums over tokens. loss_type 'grpo' gives GSPO."
        )
    if settings.loss_type == "luspo" and not sequence:
        yield "loss_type 'luspo' is meant with importance_sampling_level 'sequence'; it got 'token'."
    if settings.loss_type == "vespo" and sequence:
        yield "loss_type 'vespo' makes its own sequence ratio; importance_sampling_level 'sequence' moves only the KL."
    yield from _delta_cautions(settings)
    yield from reuse_cautions(settings, steps_per_generation)


def reuse_cautions(settings: Any, steps_per_generation: int) -> Iterator[str]:
    """What makes using completions several times pointless.

    Args:
        settings: with TRL's names.
        steps_per_generation: micro-batches that one sampling serves.

    Yields:
        One sentence or two, where all uses fall between two optimizer steps.
    """
    uses = steps_per_generation * settings.num_iterations
    if settings.num_iterations > 1 and settings.gradient_accumulation_steps % uses == 0:
        yield (
            f"num_iterations {settings.num_iterations} with gradient_accumulation_steps "
            f"{settings.gradient_accumulation_steps} and steps_per_generation {steps_per_generation} uses each batch "
            "of completions up before the optimizer steps, so no pass sees a policy that moved. Set "
            f"steps_per_generation to {settings.gradient_accumulation_steps}, or num_iterations to 1."
        )


def _delta_cautions(settings: Any) -> Iterator[str]:
    if settings.delta is None:
        return
    upper = 1 + (settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    if settings.loss_type in _WITHOUT_CLIP_RANGE:
        yield f"delta does nothing with loss_type {settings.loss_type!r}."
    elif settings.delta <= upper:
        yield (
            f"delta {settings.delta:g} is not above the clip range, which ends at {upper:g}, so it also bounds ratios "
            "inside that range."
        )


def warn_of(messages: Iterator[str], stacklevel: int) -> None:
    """Show each message as an `ObjectiveWarning` of the caller `stacklevel` frames up."""
    for message in messages:
        warnings.warn(message, ObjectiveWarning, stacklevel=stacklevel + 1)


def dropout_caution(rate: float, compares_policies: bool) -> Iterator[str]:
    """What dropout does to ratios and KL.

    Args:
        rate: the highest dropout probability in the model.
        compares_policies: log-probs of two passes through the model meet in the loss.

    Yields:
        One sentence or two, where both apply.
    """
    if rate > 0 and compares_policies:
        yield (
            f"dropout of {rate:g} is on, so old, reference and current log-probs come from different networks and "
            "ratios are not 1 before the first update. Set disable_dropout=True."
        )
