"""Mistakes in the specification itself, which worked numbers and TRL's own loss see."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from grpo_lab.objectives import advantages, aggregation, entropy, ratios, rloo, terms
from tests.mutants.harness import assert_caught
from tests.objectives import test_advantages as group_checks
from tests.objectives import test_entropy as entropy_checks
from tests.objectives import test_parity_with_trl as parity_checks
from tests.objectives import test_policy_loss as loss_checks
from tests.objectives import test_ratios as ratio_checks

# The package has functions of these modules' names in the modules' places.
loss = sys.modules["grpo_lab.objectives.policy_loss"]
options = sys.modules["grpo_lab.objectives.options"]
scopes = {
    scale: partial(group_checks.test_worked_numbers_of_each_scope, scale, size)
    for scale, size in (("group", 0.865875), ("batch", 1.079890))
}
sign = loss_checks.test_clip_by_the_sign_of_the_advantage
extremes = loss_checks.test_the_extremes_of_the_clip_are_over_sequences
normalisers = loss_checks.test_normalisers_by_hand
sequence = loss_checks.test_one_ratio_a_sequence_is_the_geometric_mean
cispo = loss_checks.test_cispo_bounds_the_weight_and_keeps_every_gradient
sapo = loss_checks.test_sapo_is_a_soft_gate_with_slope_one_on_policy
vespo = partial(loss_checks.test_vespo_weights_a_sequence_by_its_whole_ratio, -1.0, 64 * 2.718281828459045**-6)
vespo_sampler = loss_checks.test_vespo_multiplies_the_samplers_ratio_into_the_weight
sampler = loss_checks.test_the_samplers_ratio_multiplies_the_policy_term_and_not_the_kl
off_policy = loss_checks.test_off_policy_sequences_of_negative_advantage_are_dropped
masked = partial(loss_checks.test_masked_places_may_hold_anything, "bnpo", "sequence", True, float("nan"))
truncate = partial(ratio_checks.test_worked_numbers, "token_truncate", (0.8, 2.5), [2, 0.8, 2.5, 1, 2.5, 1])
mask_low = partial(ratio_checks.test_worked_numbers, "sequence_mask", (1.5, 9.0), [0, 8, 2.718281828459045])
mask_high = partial(ratio_checks.test_worked_numbers, "sequence_mask", (None, 3.0), [1, 0, 2.718281828459045])
bonus = partial(
    entropy_checks.test_the_bonus_is_taken_off_the_loss_whatever_divides_it, "dapo", {"num_items_in_batch": 5}, 4
)
high_entropy = entropy_checks.test_the_mask_of_high_entropy_spares_the_kl_and_narrows_the_bonus
controller = entropy_checks.test_the_controller_raises_the_coefficient_at_or_below_the_target


def parity(loss_type: str, level: str, **settings: object) -> None:
    """The objective equals TRL's."""
    parity_checks.test_loss_gradients_and_metrics(loss_type, level, settings)


MUTANTS: list[tuple[ModuleType, str, str, Callable[[], None]]] = [
    # advantages
    (advantages, "(count - 1).clamp", "count.clamp", scopes["group"]),
    (advantages, "(spread(rewards) + epsilon)", "(spread(groups)[:, None] + epsilon)", scopes["batch"]),
    (advantages, "advantages = groups - groups.nanmean(-1, keepdim=True)", "advantages = groups - groups.nanmean()",
     scopes["group"]),
    (advantages, ".masked_fill(rewards.isnan(), 0)", "",
     partial(group_checks.test_a_completion_without_a_reward_is_left_out_of_its_group, "group")),
    (advantages, 'scale_rewards: Literal["group", "batch", "none"] = "group",\n    epsilon: float = 1e-4',
     'scale_rewards: Literal["group", "batch", "none"] = "group",\n    epsilon: float = 1e-8',
     partial(group_checks.test_the_rounding_of_equal_rewards_is_not_amplified, "group", 0.7)),
    (advantages, "(rewards_per_func * weights)", "rewards_per_func",
     group_checks.test_rewards_that_a_function_did_not_give_are_left_out_of_the_sum),
    (advantages, ".masked_fill(rewards_per_func.isnan().all(-1), torch.nan)", "",
     group_checks.test_rewards_that_a_function_did_not_give_are_left_out_of_the_sum),
    (advantages, "(centred / (spread(groups)[:, None] + epsilon))", "centred",
     group_checks.test_each_reward_has_the_same_say_where_it_is_normalised_first),
    (rloo, "- 1\n", "\n", group_checks.test_the_baseline_of_rloo_is_the_mean_of_the_others),
    (rloo, "rewards - beta * sequence_kl", "rewards + beta * sequence_kl",
     group_checks.test_rloo_takes_the_kl_off_the_reward),
    (rloo, "(spread(advantages) + epsilon)", "1.0", group_checks.test_rloo_may_bring_the_batch_to_one_spread),
    (rloo, "log_ratio.sum(-1).exp()", "log_ratio.mean(-1).exp()", parity_checks.test_rloo_loss_and_gradient),
    (rloo, "return -torch.min", "return torch.min", parity_checks.test_rloo_loss_and_gradient),
    (rloo, "1 + epsilon_high)", "1 + epsilon_low)", parity_checks.test_rloo_loss_and_gradient),
    # terms
    (terms, "return -torch.min(bounded", "return torch.min(bounded", sign),
    (terms, "return -torch.min(bounded", "return -torch.max(bounded", sign),
    (terms, "ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)",
     "ratio.clamp(1 - options.epsilon_high, 1 + options.epsilon_low)",
     loss_checks.test_clip_higher_moves_the_upper_side_only),
    (terms, "ratio.clamp(max=options.delta)", "ratio",
     loss_checks.test_delta_bounds_large_ratios_of_negative_advantages),
    (terms, "return -ratio.clamp(max=epsilon_high).detach()", "return -ratio.clamp(max=epsilon_high)", cispo),
    (terms, "return -ratio.clamp(max=epsilon_high)", "return -ratio.clamp(max=1 + epsilon_high)", cispo),
    (terms, "return -ratio.clamp(max=epsilon_high)", "return ratio.clamp(max=epsilon_high)", cispo),
    (terms, "torch.where(advantages > 0,", "torch.where(advantages < 0,", sapo),
    (terms, "-4 / temperature", "-4", sapo),
    (terms, "(ratio - 1)) * advantages", "ratio) * advantages", sapo),
    # ratios
    (ratios, "log_ratio.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True).clamp(min=1)",
     "log_ratio.mean(-1, keepdim=True)", partial(parity, "bnpo", "sequence")),
    (ratios, "log_ratio.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True).clamp(min=1)",
     "log_ratio.sum(-1, keepdim=True)", sequence),
    (ratios, "(advantages >= 0) | (mean_drift <= threshold)", "(mean_drift <= threshold)", off_policy),
    (ratios, "(advantages >= 0) | (mean_drift <= threshold)", "(advantages >= 0)", off_policy),
    (ratios, "drift = (sampling_per_token_logps - per_token_logps.detach())",
     "drift = (per_token_logps.detach() - sampling_per_token_logps)", off_policy),
    (ratios, "drift.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True).clamp(min=1)",
     "drift.sum(-1, keepdim=True)", off_policy),
    (ratios, "torch.where(positive, k[0], k[1])", "torch.where(positive, k[1], k[0])", vespo),
    (ratios, "torch.where(positive, decay[0], decay[1])", "torch.where(positive, decay[1], decay[0])", vespo),
    (ratios, "(rate + exponent * log_weight", "(exponent * log_weight", vespo),
    (ratios, "LARGEST_LOG_RATIO).sum(-1, keepdim=True)\n    if", "LARGEST_LOG_RATIO).mean(-1, keepdim=True)\n    if",
     vespo),
    (ratios, "log_weight = log_weight + log_sampler_ratio.sum(-1, keepdim=True)", "pass", vespo_sampler),
    (ratios, "ratio.clamp(clip_min, clip_max)", "ratio.clamp(max=clip_max)", truncate),
    (ratios, "outside = outside | (ratio < clip_min)", "pass", mask_low),
    (ratios, "outside = outside | (ratio > clip_max)", "pass", mask_high),
    (ratios, "difference = (old_per_token_logps - sampling_per_token_logps)",
     "difference = (sampling_per_token_logps - old_per_token_logps)", truncate),
    (ratios, "difference = difference.nan_to_num(nan=0.0)", "pass", truncate),
    # entropy
    (entropy, "1 - top_entropy_quantile)", "top_entropy_quantile)",
     partial(entropy_checks.test_the_tokens_of_highest_entropy_are_kept, 0.2, [0.9])),
    (entropy, "entropies[mask]", "entropies.nan_to_num(9.0)",
     partial(entropy_checks.test_the_tokens_of_highest_entropy_are_kept, 0.5, [0.9, 0.5, 0.7])),
    (entropy, "/ completion_mask.sum().clamp(min=1)", "/ completion_mask.numel()",
     entropy_checks.test_the_bonus_is_the_mean_entropy_of_the_tokens_that_count),
    (entropy, "low = entropy <= target", "low = entropy >= target", partial(controller, 0.1, 0.19, 0.15, True)),
    (entropy, "min(coefficient + delta, maximum)", "coefficient + delta", partial(controller, 0.28, 0.1, 0.3, True)),
    (entropy, "max(coefficient - delta, minimum)", "coefficient - delta", partial(controller, 0.03, 0.9, 0.01, False)),
    # divisors
    (aggregation, "losses = torch.where(mask, per_token_loss, 0)", "losses = per_token_loss", normalisers),
    (aggregation, "(losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()", "losses.sum() / mask.sum().clamp(min=1)",
     normalisers),
    (aggregation, "return losses.sum() / mask.sum().clamp(min=1)", "return losses.mean()", normalisers),
    (aggregation, "losses.sum(-1).mean()", "losses.mean()", normalisers),
    (aggregation, "(mask.size(0) * max_completion_length)", "(mask.size(0) * mask.size(1))", normalisers),
    (aggregation, "losses.sum() / max(num_items_in_batch, 1)", "losses.sum() / mask.sum()", normalisers),
    *(
        (aggregation, f"{divided} / gradient_accumulation_steps", divided,
         partial(loss_checks.test_one_batch_of_eight_equals_four_of_two, loss_type, "token"))
        for divided, loss_type in (
            ("(mask.size(0) * max_completion_length)", "dr_grpo"),
            ("clamp(min=1)).mean()", "grpo"),
            ("losses.sum(-1).mean()", "luspo"),
        )
    ),
    # the whole
    (loss, "old_logps = (x.masked_fill(~mask, 0) for", "old_logps = (x for", masked),
    (loss, "ref_per_token_logps.masked_fill(~mask, 0)", "ref_per_token_logps", masked),
    (loss, "advantages.masked_fill(~mask, 0)", "advantages", masked),
    (loss, "importance_sampling_ratio.masked_fill(~mask, 1)", "importance_sampling_ratio", masked),
    (loss, "(ratio < 1 - options.epsilon_low) & (advantages < 0)", "ratio < 1 - options.epsilon_low", sign),
    (loss, "(ratio > 1 + options.epsilon_high) & (advantages > 0)", "ratio > 1 + options.epsilon_high", sign),
    (loss, "(ratio > options.epsilon_high) & (advantages > 0)", "ratio > options.epsilon_high", cispo),
    (loss, "return -phi * advantages * logps", "return phi * advantages * logps", vespo),
    (loss, "if by_token:", "if False:", extremes),
    (loss, "[has_tokens] / mask", " / mask", extremes),
    (loss, "per_token_loss = per_token_loss * keep", "pass", off_policy),
    (loss, "old_per_token_logps if sampling_per_token_logps is None else sampling_per_token_logps",
     "old_per_token_logps", off_policy),
    (loss, "per_token_loss = per_token_loss * bonus_mask", "pass", high_entropy),
    (loss, "entropy_bonus(entropies, bonus_mask)", "entropy_bonus(entropies, mask)", high_entropy),
    (loss, "loss = loss - options.entropy_coef", "loss = loss + options.entropy_coef", bonus),
    (loss, "bonus_mask) / gradient_accumulation_steps", "bonus_mask)", bonus),
    (loss, '("dapo", "cispo", "vespo")', "()", bonus),
    (loss, "per_token_loss = per_token_loss * importance_sampling_ratio", "pass", sampler),
    (loss, 'and options.loss_type != "vespo"', "", vespo_sampler),
    (loss, "torch.exp(difference) - difference - 1", "torch.exp(difference) + difference - 1",
     loss_checks.test_kl_by_hand),
    (loss, "difference = ref_per_token_logps - per_token_logps", "difference = per_token_logps - ref_per_token_logps",
     loss_checks.test_kl_by_hand),
    (loss, "per_token_kl = per_token_kl * ratio", "per_token_kl = per_token_kl * ratio.detach()",
     loss_checks.test_kl_by_hand),
    (loss, "if options.use_bias_correction_kl:", "if True:", loss_checks.test_kl_by_hand),
    (loss, "+ options.beta * per_token_kl", "- options.beta * per_token_kl", loss_checks.test_kl_by_hand),
    (loss, "log_ratio = logps - old_logps", "log_ratio = (logps - old_logps).detach()", sign),
    (options, 'if self.loss_type == "cispo" and self.epsilon_high < 1:', "if False:",
     partial(loss_checks.test_options_out_of_range_are_refused_by_name, {"loss_type": "cispo"}, "epsilon_high")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(module: ModuleType, old: str, new: str, check: Callable[[], None], tmp_path: Path):
    assert_caught(module, old, new, check, tmp_path)
