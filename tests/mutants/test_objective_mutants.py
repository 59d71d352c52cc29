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
from tests.objectives import test_properties as property_checks
from tests.objectives import test_ratios as ratio_checks
from tests.objectives import test_rloo as rloo_checks
from tests.objectives import test_rollout_parity_with_trl as rollout_checks
from tests.objectives import test_worked_objectives as worked_checks

# The package has functions of these modules' names in the modules' places.
loss = sys.modules["grpo_lab.objectives.policy_loss"]
options = sys.modules["grpo_lab.objectives.options"]
scopes = {
    scale: partial(group_checks.test_worked_numbers_of_each_scope, scale, size)
    for scale, size in (("group", 0.865875), ("batch", 1.079890))
}
sign = loss_checks.test_clip_by_the_sign_of_the_advantage
extremes = loss_checks.test_the_extremes_of_the_clip_are_over_sequences
broadcast = loss_checks.test_what_would_broadcast_in_silence_is_refused
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
bounds = partial(ratio_checks.test_bounds_that_hold_no_ratio_are_refused, (-0.1, 1.0))
drift = ratio_checks.test_the_drift_of_a_sequence_is_a_mean_over_its_own_tokens
finite = ratio_checks.test_vespos_weight_stays_finite_for_any_ratio
never = loss_checks.test_an_advantage_of_zero_is_never_counted_as_clipped
exact = loss_checks.test_weights_of_sapo_and_vespo_are_as_exact_as_their_ratios
rloo_kl = rloo_checks.test_the_kl_is_taken_off_the_clipped_reward
rloo_loss = rloo_checks.test_the_ratio_is_that_of_the_whole_sequence
rloo_trl = rloo_checks.test_loss_gradient_and_metrics_of_trl
corrections = worked_checks.test_worked_numbers_with_every_correction
# One example, since hypothesis would shrink each failure first.
one_draw = partial(
    property_checks.test_order_padding_and_what_masked_places_hold_change_nothing.hypothesis.inner_test,
    loss_checks.options_of("grpo"), 3, 5, 0, float("nan"),
)  # fmt: skip
high_entropy = entropy_checks.test_the_mask_of_high_entropy_spares_the_kl_and_narrows_the_bonus
controller = entropy_checks.test_the_controller_raises_the_coefficient_at_or_below_the_target


worked = worked_checks.test_worked_numbers
WORKED = worked_checks.CASES


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
    (advantages, "(summed - summed.nanmean()) / (spread(summed) + epsilon)", "summed",
     partial(rollout_checks.test_advantages_normalised_before_they_are_summed, "some")),
    (advantages, "weighted_rewards(torch.stack(normalized, -1), weights)", "torch.stack(normalized, -1).nansum(-1)",
     partial(rollout_checks.test_advantages_normalised_before_they_are_summed, "all")),
    (advantages, ".masked_fill(rewards_per_func.isnan().all(-1), torch.nan)", "",
     partial(rollout_checks.test_group_advantages, "some", "group")),
    # RLOO
    (rloo, "- 1\n", "\n", rloo_checks.test_the_baseline_is_the_mean_of_the_others),
    (rloo, "rewards - beta * sequence_kl", "rewards + beta * sequence_kl", rloo_kl),
    (rloo, "rewards = rewards.clamp(*reward_clip_range)", "pass", rloo_kl),
    (rloo, "(old_per_token_logps - ref_per_token_logps)", "(ref_per_token_logps - old_per_token_logps)",
     partial(rollout_checks.test_rloo_advantages, "some", {"beta": 0.1})),
    (rloo, ".masked_fill(completion_mask == 0, 0)", "",
     rloo_checks.test_the_kl_of_a_sequence_is_summed_over_counted_tokens),
    (rloo, "(spread(advantages) + epsilon)", "1.0", rloo_checks.test_the_batch_may_be_brought_to_one_spread),
    (rloo, "log_ratio.sum(-1).exp()", "log_ratio.mean(-1).exp()", rloo_loss),
    (rloo, "loss = -torch.min", "loss = torch.min", rloo_loss),
    (rloo, "1 + epsilon_high)\n    loss", "1 + epsilon_low)\n    loss", rloo_trl),
    (rloo, "(ratio < 1 - epsilon_low) & (advantages < 0)", "(ratio < 1 - epsilon_low) & (advantages > 0)", rloo_loss),
    (rloo, "(ratio > 1 + epsilon_high) & (advantages > 0)", "ratio > 1 + epsilon_low", rloo_trl),
    (rloo, "per_token_logps.masked_fill(~mask, 0) - ", "per_token_logps - ",
     rloo_checks.test_no_counted_token_gives_no_gradient_whatever_the_places_hold),
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
    (terms, ".masked_fill(advantages > 0,", ".masked_fill(advantages < 0,", sapo),
    (terms, "options.sapo_temperature_neg, dtype=ratio.dtype)", "options.sapo_temperature_neg, dtype=torch.float32)",
     exact),
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
    (ratios, "masked_fill(advantages >= 0, positive)", "masked_fill(advantages < 0, positive)", vespo),
    (ratios, "masked_fill(advantages >= 0, positive)", "masked_fill(advantages > 0, positive)",
     partial(loss_checks.test_vespo_weights_a_sequence_by_its_whole_ratio, 0.0, 16 * 2.718281828459045**-9)),
    (ratios, "for positive, elsewhere in (k, decay)", "for positive, elsewhere in (decay, k)", vespo),
    (ratios, "elsewhere, dtype=log_ratio.dtype)", "elsewhere, dtype=torch.float32)", exact),
    (ratios, "@torch.no_grad()\n", "", vespo),
    (ratios, "(rate + exponent * log_weight", "(exponent * log_weight", vespo),
    (ratios, "LARGEST_LOG_RATIO).sum(-1, keepdim=True)\n    if", "LARGEST_LOG_RATIO).mean(-1, keepdim=True)\n    if",
     vespo),
    (ratios, "log_weight = log_weight + log_sampler_ratio.sum(-1, keepdim=True)", "pass", vespo_sampler),
    (ratios, "ratio.clamp(lowest, highest)", "ratio.clamp(max=highest)", truncate),
    (ratios, "(ratio < lowest) | (ratio > highest)", "ratio > highest", mask_low),
    (ratios, "(ratio < lowest) | (ratio > highest)", "ratio < lowest", mask_high),
    (ratios, "(ratio < lowest)", "(ratio <= lowest)",
     partial(ratio_checks.test_worked_numbers, "token_mask", (1.0, None), [2, 0, 8, 1, 2.718281828459045, 1])),
    (ratios, "mean_drift <= threshold", "mean_drift < threshold", drift),
    (ratios, "drift.sum(-1, keepdim=True) / completion_mask.sum(-1, keepdim=True)",
     "drift.sum(-1, keepdim=True) / completion_mask.sum(-2, keepdim=True)", drift),
    (ratios, "SMALLEST_LOG_WEIGHT = 20.0,", "SMALLEST_LOG_WEIGHT = 21.0,", finite),
    (ratios, "importance_sampling_ratio.log().clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_RATIO)",
     "importance_sampling_ratio.log()", finite),
    (ratios, "if not 0 <= lowest < highest:", "if not lowest < highest:", bounds),
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
    *((loss, "mask = completion_mask != 0", "mask = completion_mask == completion_mask", partial(worked, *case))
      for case in WORKED),
    *((aggregation, "losses = torch.where(mask, per_token_loss, 0)", "losses = -torch.where(mask, per_token_loss, 0)",
       partial(worked, *case)) for case in WORKED),
    (aggregation, "(losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()", "losses.mean()", partial(worked, *WORKED[8])),
    (aggregation, 'if loss_type in ("grpo", "sapo"):', 'if loss_type in ("grpo", "sapo", "luspo"):',
     partial(worked, *WORKED[5])),
    # the whole
    (loss, "old_logps = (x.masked_fill(~mask, 0) for", "old_logps = (x for", masked),
    (loss, "ref_per_token_logps.masked_fill(~mask, 0)", "ref_per_token_logps", masked),
    (loss, "advantages.masked_fill(~mask, 0)", "advantages", masked),
    (loss, "importance_sampling_ratio.masked_fill(~mask, 1)", "importance_sampling_ratio", masked),
    (loss, "(ratio < 1 - options.epsilon_low) & (advantages < 0)", "ratio < 1 - options.epsilon_low", sign),
    (loss, "(ratio > 1 + options.epsilon_high) & (advantages > 0)", "ratio > 1 + options.epsilon_high", sign),
    (loss, "(ratio > options.epsilon_high) & (advantages > 0)", "ratio > options.epsilon_high", cispo),
    (loss, "(ratio < 1 - options.epsilon_low) & (advantages < 0)",
     "(ratio < 1 - options.epsilon_low) & (advantages <= 0)", partial(never, "bnpo")),
    (loss, "(ratio > options.epsilon_high) & (advantages > 0)", "(ratio > options.epsilon_high) & (advantages >= 0)",
     partial(never, "cispo")),
    (loss, "(ratio < 1 - options.epsilon_low)", "(ratio <= 1 - options.epsilon_low)",
     loss_checks.test_nothing_is_clipped_on_policy_where_the_range_is_a_point),
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
    (options, 'self.importance_sampling_level == "sequence" and', "False and",
     partial(loss_checks.test_ratios_by_sequence_in_a_sum_over_tokens_are_told, "dapo")),
    (options, "sapo_temperature_neg: float = 1.05", "sapo_temperature_neg: float = 1.0",
     parity_checks.test_options_left_unsaid_are_those_of_trl),
    (options, "use_bias_correction_kl: bool = True", "use_bias_correction_kl: bool = False",
     parity_checks.test_options_left_unsaid_are_those_of_trl),
    (options, "not self.delta > 1 + self.epsilon_high", "not self.delta > 1",
     partial(loss_checks.test_options_out_of_range_are_refused_by_name, {"delta": 1.2}, "delta")),
    (loss, "if tensor is not None and tensor.shape != shape:", "if False:",
     partial(broadcast, "old_per_token_logps", (2, 1), "old_per_token_logps")),
    (loss, "if advantages.shape not in ((batch,), shape):", "if False:", partial(broadcast, "advantages", (1,), "adv")),
    (loss, "if ratio.shape != (batch, 1):", "if False:",
     partial(broadcast, "importance_sampling_ratio", (2,), "importance_sampling_ratio")),
    (loss, 'if options.loss_type == "vespo":\n        raise', "if False:\n        raise", vespo_sampler),
    # the order of operations
    (loss, "per_token_loss = per_token_loss + options.beta * per_token_kl",
     "per_token_loss = (per_token_loss + options.beta * per_token_kl) * bonus_mask", high_entropy),
    (loss, "per_token_loss = per_token_loss * keep", "pass", corrections),
    (loss, "per_token_loss = per_token_loss * importance_sampling_ratio", "pass", corrections),
    (loss, "entropies.detach(), mask, options.top_entropy_quantile", "entropies.detach(), mask, 1.0", corrections),
    (loss, "(x.masked_fill(~mask, 0) for", "(x for", one_draw),
    (loss, "mask = completion_mask != 0", "mask = completion_mask == completion_mask", one_draw),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(module: ModuleType, old: str, new: str, check: Callable[[], None], tmp_path: Path):
    assert_caught(module, old, new, check, tmp_path)
