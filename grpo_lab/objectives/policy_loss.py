"""The policy-gradient losses of the GRPO family, from log-probs, in TRL 1.16's order of operations.

    loss_t = (term_t x off-policy keep x top-entropy keep x sampler ratio) + beta KL_t
    loss   = aggregate(loss_t) - entropy_coef x mean entropy

The terms stand in `terms`, the ratios in `ratios`, the divisors in `aggregation`, the entropies in `entropy`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lab.objectives.aggregation import aggregate_token_losses
from grpo_lab.objectives.entropy import entropy_bonus, top_entropy_mask
from grpo_lab.objectives.options import CLIPPED_LOSS_TYPES, PolicyLossOptions
from grpo_lab.objectives.ratios import gamma_weights, log_importance_ratio, off_policy_keep
from grpo_lab.objectives.terms import cispo_term, clipped_term, sapo_term


class PolicyLoss(NamedTuple):
    """A loss to differentiate, and TRL's metrics by name (none where no token counts)."""

    loss: Tensor
    metrics: dict[str, float]


def k3_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) by token: `exp(d) - d - 1` with `d = ref - logp`; never negative.

    Args:
        per_token_logps: (B, T) float; gradient flows.
        ref_per_token_logps: (B, T) float.

    Returns:
        (B, T).

    Source: k3 of J. Schulman, "Approximating KL Divergence" (2020).
    """
    difference = ref_per_token_logps - per_token_logps
    return torch.exp(difference) - difference - 1


def policy_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    options: PolicyLossOptions,
    *,
    ref_per_token_logps: Tensor | None = None,
    entropies: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
    gradient_accumulation_steps: int = 1,
) -> PolicyLoss:
    """The policy term of `options.loss_type`, plus `beta` times the KL to the reference, minus the entropy bonus.

    Args:
        per_token_logps: (B, T) float, of the current policy; gradient flows; anything where masked.
        old_per_token_logps: (B, T) float, of the policy that sampled; anything where masked.
        advantages: (B,), or (B, T) by token; anything where masked.
        completion_mask: (B, T), 1 counts.
        options: which loss.
        ref_per_token_logps: (B, T) float, of the reference; needed where `beta > 0`; anything where masked.
        entropies: (B, T) float, nats; needed for `top_entropy_quantile < 1` (no gradient flows) and for
            `entropy_coef` other than 0 (gradient flows); anything where masked.
        sampling_per_token_logps: (B, T) float, by the engine that sampled, for `off_policy_mask_threshold`; `None`
            takes `old_per_token_logps`; NaN counts as no drift.
        importance_sampling_ratio: (B, T) or (B, 1), from `sampler_ratio`; `None` for no correction.
        max_completion_length: see `aggregate_token_losses`.
        num_items_in_batch: see `aggregate_token_losses`.
        gradient_accumulation_steps: see `aggregate_token_losses`; the entropy bonus is divided by it too.

    Returns:
        The scalar loss, and TRL's metrics: `clip_ratio/...` where there is a clip range (shares of counted tokens,
        or of sequences where the ratio is by sequence, that the clip cuts off from the gradient: low where the
        advantage is negative, high where it is positive), `cispo_clip_ratio`, `vespo/phi_seq_mean`, `kl` where
        `beta > 0`, `entropy` where entropies are given, `policy_loss` where there is an entropy bonus.

    Raises:
        ValueError: something that the options need is missing, a shape does not fit the mask's, or VESPO gets a ratio
            by sequence.

    Source: DeepSeekMath (arXiv 2402.03300), equation 3; each part where it is defined. Formulas as TRL 1.16's.
    """
    _check_needs(options, ref_per_token_logps, entropies)
    by_token = {
        "per_token_logps": per_token_logps,
        "old_per_token_logps": old_per_token_logps,
        "ref_per_token_logps": ref_per_token_logps,
        "entropies": entropies,
        "sampling_per_token_logps": sampling_per_token_logps,
    }
    _check_shapes(options, completion_mask, advantages, importance_sampling_ratio, by_token)
    mask = completion_mask != 0
    # Before any exp: 0 times its infinity would be NaN.
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages.masked_fill(~mask, 0)
    logps, old_logps = (x.masked_fill(~mask, 0) for x in (per_token_logps, old_per_token_logps))
    log_ratio = logps - old_logps
    ratio = log_importance_ratio(log_ratio, mask, options.importance_sampling_level).exp()
    if importance_sampling_ratio is not None and importance_sampling_ratio.shape == mask.shape:
        importance_sampling_ratio = importance_sampling_ratio.masked_fill(~mask, 1)

    per_token_loss, counted = _policy_term(options, ratio, log_ratio, logps, advantages, importance_sampling_ratio)
    if options.off_policy_mask_threshold is not None:
        sampling_logps = old_per_token_logps if sampling_per_token_logps is None else sampling_per_token_logps
        keep = off_policy_keep(advantages, logps, sampling_logps, mask, options.off_policy_mask_threshold)
        per_token_loss = per_token_loss * keep
    bonus_mask = mask
    if options.top_entropy_quantile < 1:
        assert entropies is not None, "checked above"
        bonus_mask = top_entropy_mask(entropies.detach(), mask, options.top_entropy_quantile)
        per_token_loss = per_token_loss * bonus_mask
    if importance_sampling_ratio is not None and options.loss_type != "vespo":
        per_token_loss = per_token_loss * importance_sampling_ratio
    if options.beta > 0:
        assert ref_per_token_logps is not None, "checked above"
        per_token_kl = k3_kl(logps, ref_per_token_logps.masked_fill(~mask, 0))
        if options.use_bias_correction_kl:
            per_token_kl = per_token_kl * ratio
        per_token_loss = per_token_loss + options.beta * per_token_kl
        counted["kl"] = per_token_kl.detach()
    if entropies is not None:
        counted["entropy"] = entropies.detach()

    loss = aggregate_token_losses(
        per_token_loss,
        mask,
        options.loss_type,
        max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    metrics = _metrics(counted, mask) if mask.any() else {}
    if options.entropy_coef != 0:
        assert entropies is not None, "checked above"
        if metrics:
            whole = options.loss_type in ("dapo", "cispo", "vespo")
            metrics["policy_loss"] = loss.item() * (1 if whole else gradient_accumulation_steps)
        loss = loss - options.entropy_coef * entropy_bonus(entropies, bonus_mask) / gradient_accumulation_steps
    return PolicyLoss(loss, metrics)


def _check_needs(options: PolicyLossOptions, ref_per_token_logps: Tensor | None, entropies: Tensor | None) -> None:
    if options.beta > 0 and ref_per_token_logps is None:
        raise ValueError(f"ref_per_token_logps is needed where beta > 0; got None, beta {options.beta}.")
    if entropies is None and (options.entropy_coef != 0 or options.top_entropy_quantile < 1):
        raise ValueError(
            "entropies are needed for an entropy_coef other than 0 or a top_entropy_quantile below 1; got None, "
            f"entropy_coef {options.entropy_coef}, top_entropy_quantile {options.top_entropy_quantile}."
        )


def _check_shapes(
    options: PolicyLossOptions,
    completion_mask: Tensor,
    advantages: Tensor,
    ratio: Tensor | None,
    by_token: dict[str, Tensor | None],
) -> None:
    """What would broadcast in silence, as a (B,) ratio along T where T equals B, is refused."""
    shape, batch = tuple(completion_mask.shape), completion_mask.size(0)
    for name, tensor in by_token.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have completion_mask's shape {shape}; got {tuple(tensor.shape)}.")
    if advantages.shape not in ((batch,), shape):
        raise ValueError(f"advantages must be {(batch,)}, or by token {shape}; got {tuple(advantages.shape)}.")
    if ratio is None or ratio.shape == shape:
        return
    if options.loss_type == "vespo":
        raise ValueError(
            f"importance_sampling_ratio must be by token, {shape}, with loss_type 'vespo', which multiplies it over "
            f"the tokens; got {tuple(ratio.shape)}. Use a mode of sampler_ratio that begins with 'token'."
        )
    if ratio.shape != (batch, 1):
        raise ValueError(f"importance_sampling_ratio must be {shape} or {(batch, 1)}; got {tuple(ratio.shape)}.")


def _policy_term(
    options: PolicyLossOptions,
    ratio: Tensor,
    log_ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    importance_sampling_ratio: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The term of the loss type, and what its metrics are means of."""
    if options.loss_type in CLIPPED_LOSS_TYPES:
        low = (ratio < 1 - options.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + options.epsilon_high) & (advantages > 0)
        counted = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        return clipped_term(ratio, advantages, options), counted
    if options.loss_type == "cispo":
        capped = (ratio > options.epsilon_high) & (advantages > 0)
        return cispo_term(ratio, advantages, logps, options.epsilon_high), {"cispo_clip_ratio": capped}
    if options.loss_type == "sapo":
        return sapo_term(ratio, advantages, options), {}
    phi = gamma_weights(
        advantages,
        log_ratio,
        importance_sampling_ratio,
        k=(options.vespo_k_pos, options.vespo_k_neg),
        decay=(options.vespo_lambda_pos, options.vespo_lambda_neg),
    )
    return -phi * advantages * logps, {"vespo/phi_seq_mean": phi}


def _metrics(counted: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Means over counted tokens of (B, T) values and over sequences of (B, 1) values, and the extremes of the clip."""
    metrics = {}
    for name, values in counted.items():
        by_token = values.shape == mask.shape
        metrics[name] = (values[mask] if by_token else values).double().mean().item()
        extreme = {"clip_ratio/low_mean": "clip_ratio/low_min", "clip_ratio/high_mean": "clip_ratio/high_max"}.get(name)
        if extreme is not None:
            shares = values.float().flatten()
            if by_token:
                has_tokens = mask.any(-1)
                shares = (values & mask).sum(-1)[has_tokens] / mask.sum(-1)[has_tokens]
            metrics[extreme] = (shares.min() if extreme.endswith("min") else shares.max()).item()
    return metrics
