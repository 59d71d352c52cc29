"""What the loss is: TRL's names and meaning, checked once."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LEVELS = ("token", "sequence")
# Losses that divide a sum over tokens by something other than each sequence's own length.
_TOKEN_SUMS = ("bnpo", "dr_grpo", "dapo", "cispo")


@dataclass(frozen=True)
class PolicyLossOptions:
    """What the loss is; names and meaning are TRL's.

    Attributes:
        loss_type: the term of a token and what the sum over tokens is divided by, see `policy_terms` and
            `aggregate_token_losses`.
        epsilon_low: ratios below `1 - epsilon_low` are clipped; >= 0.
        epsilon_high: ratios above `1 + epsilon_high` are clipped; >= 0. For `"cispo"` the largest ratio itself, >= 1.
        delta: bounds the ratio where the advantage is negative; > 1 + epsilon_high, or `None` for no bound. As in TRL
            only the clipped losses (`CLIPPED_LOSS_TYPES`) read `epsilon_low` and `delta`.
        beta: weight of the KL to the reference; >= 0.
        use_bias_correction_kl: whether the KL is multiplied by the ratio, which makes its gradient that of
            the reverse KL (DeepSeek-V3.2, arXiv 2512.02556).
        importance_sampling_level: `"token"`, or `"sequence"` for one ratio a sequence (GSPO, arXiv
            2507.18071).
        top_entropy_quantile: share of counted tokens, those of highest entropy, whose policy term is kept; in
            (0, 1].
        entropy_coef: weight of the entropy bonus; below 0 it lowers the entropy.
        off_policy_mask_threshold: > 0; sequences of negative advantage that drifted further (mean
            log-ratio, nats) are dropped. `None` keeps all.
        sapo_temperature_pos: steepness of SAPO's gate where the advantage is positive; > 0.
        sapo_temperature_neg: the same elsewhere; > 0.
        vespo_k_pos: exponent of VESPO's weight where the advantage is >= 0; >= 0.
        vespo_lambda_pos: its decay there; > 0.
        vespo_k_neg: exponent elsewhere; >= 0.
        vespo_lambda_neg: decay elsewhere; > 0.

    Raises:
        ValueError: a value is out of its range; the message names it.

    Warns:
        UserWarning: ratios by sequence with a loss that sums over tokens weight each sequence by its length.
    """

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: Literal["token", "sequence"] = "token"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {self.loss_type!r}.")
        if self.importance_sampling_level not in LEVELS:
            raise ValueError(
                f"importance_sampling_level must be token or sequence; got {self.importance_sampling_level!r}."
            )
        for name in ("epsilon_low", "epsilon_high", "beta", "vespo_k_pos", "vespo_k_neg"):
            self._require(name, "a finite number >= 0", getattr(self, name) >= 0)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            self._require(name, "a finite number > 0", getattr(self, name) > 0)
        self._require("entropy_coef", "a finite number", True)
        self._require("top_entropy_quantile", "in (0, 1]", 0 < self.top_entropy_quantile <= 1)
        if self.off_policy_mask_threshold is not None:
            positive = self.off_policy_mask_threshold > 0
            self._require("off_policy_mask_threshold", "None or a finite number > 0", positive)
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise ValueError(
                "epsilon_high must be >= 1 with loss_type 'cispo', where it is the largest ratio itself and not a "
                f"distance from 1; got {self.epsilon_high!r}. ScaleRL uses 5.0."
            )
        if self.delta is not None and not self.delta > 1 + self.epsilon_high:
            raise ValueError(f"delta must be None or > 1 + epsilon_high; got {self.delta!r}.")
        if self.importance_sampling_level == "sequence" and self.loss_type in _TOKEN_SUMS:
            warnings.warn(
                f"importance_sampling_level 'sequence' with loss_type {self.loss_type!r} weights each sequence by its "
                "length; loss_type 'grpo' gives GSPO.",
                stacklevel=3,
            )

    def _require(self, name: str, expected: str, holds: bool) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and holds):
            raise ValueError(f"{name} must be {expected}; got {value!r}.")
