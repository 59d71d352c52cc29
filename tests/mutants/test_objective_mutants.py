"""Mistakes in the specification itself, which worked numbers and TRL's own loss see."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from grpo_lab.objectives import advantages
from tests.mutants.harness import assert_caught
from tests.objectives import test_advantages as group_checks
from tests.objectives import test_parity_with_trl as parity_checks
from tests.objectives import test_policy_loss as loss_checks

# The package has a function of the module's name in the module's place.
loss_module = sys.modules["grpo_lab.objectives.policy_loss"]
scopes = {
    scale: partial(group_checks.test_worked_numbers_of_each_scope, scale, size)
    for scale, size in (("group", 0.865875), ("batch", 1.079890))
}
sign = loss_checks.test_clip_by_the_sign_of_the_advantage
normalisers = loss_checks.test_normalisers_by_hand
sequence = loss_checks.test_one_ratio_a_sequence_is_the_geometric_mean
masked = partial(loss_checks.test_masked_places_may_hold_anything, "bnpo", "sequence", True)

MUTANTS: list[tuple[ModuleType, str, str, Callable[[], None]]] = [
    (advantages, "(count - 1).clamp", "count.clamp", scopes["group"]),
    (advantages, "(_spread(rewards) + epsilon)", "(_spread(grouped)[:, None] + epsilon)", scopes["batch"]),
    (advantages, "grouped - grouped.nanmean(-1, keepdim=True)", "grouped - grouped.nanmean()", scopes["group"]),
    (
        advantages,
        ".masked_fill(rewards.isnan(), 0)",
        "",
        partial(group_checks.test_a_completion_without_a_reward_is_left_out_of_its_group, "group"),
    ),
    (
        advantages,
        "epsilon: float = 1e-4",
        "epsilon: float = 1e-8",
        partial(group_checks.test_the_rounding_of_equal_rewards_is_not_amplified, "group", 0.7),
    ),
    (loss_module, "-torch.min(bounded", "torch.min(bounded", sign),
    (loss_module, "-torch.min(bounded", "-torch.max(bounded", sign),
    (
        loss_module,
        "ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)",
        "ratio.clamp(1 - options.epsilon_high, 1 + options.epsilon_low)",
        loss_checks.test_clip_higher_moves_the_upper_side_only,
    ),
    (loss_module, "& (advantages < 0)", "", sign),
    (loss_module, "& (advantages > 0)", "", sign),
    (
        loss_module,
        "ratio.clamp(max=options.delta)",
        "ratio",
        loss_checks.test_delta_bounds_large_ratios_of_negative_advantages,
    ),
    (loss_module, "ratio = log_ratio.exp()", "ratio = log_ratio.detach().exp()", sign),
    (
        loss_module,
        "log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)",
        "log_ratio.mean(-1, keepdim=True)",
        partial(parity_checks.test_loss_gradient_and_metrics, "bnpo", "sequence", {}),
    ),
    (
        loss_module,
        "log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)",
        "log_ratio.sum(-1, keepdim=True)",
        sequence,
    ),
    (
        loss_module,
        "torch.exp(difference) - difference - 1",
        "torch.exp(difference) + difference - 1",
        loss_checks.test_kl_by_hand,
    ),
    (
        loss_module,
        "ref_per_token_logps - per_token_logps",
        "per_token_logps - ref_per_token_logps",
        loss_checks.test_kl_by_hand,
    ),
    (
        loss_module,
        "per_token_kl = per_token_kl * ratio",
        "per_token_kl = per_token_kl * ratio.detach()",
        loss_checks.test_kl_by_hand,
    ),
    (loss_module, "if options.use_bias_correction_kl:", "if True:", loss_checks.test_kl_by_hand),
    (loss_module, "+ options.beta * per_token_kl", "- options.beta * per_token_kl", loss_checks.test_kl_by_hand),
    (loss_module, "losses = torch.where(mask, per_token_loss, 0)", "losses = per_token_loss", normalisers),
    (
        loss_module,
        "(losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()",
        "losses.sum() / mask.sum().clamp(min=1)",
        normalisers,
    ),
    (loss_module, "losses.sum() / mask.sum().clamp(min=1)", "losses.mean()", normalisers),
    (loss_module, "(mask.size(0) * max_completion_length)", "(mask.size(0) * mask.size(1))", normalisers),
    (loss_module, "losses.sum() / max(num_items_in_batch, 1)", "losses.sum() / mask.sum()", normalisers),
    (
        loss_module,
        "(mask.size(0) * max_completion_length) / gradient_accumulation_steps",
        "(mask.size(0) * max_completion_length)",
        partial(loss_checks.test_one_batch_of_eight_equals_four_of_two, "dr_grpo", "token"),
    ),
    (loss_module, "old_per_token_logps.masked_fill(~mask, 0)", "old_per_token_logps", masked),
    (loss_module, "ref_per_token_logps.masked_fill(~mask, 0)", "ref_per_token_logps", masked),
]


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(module: ModuleType, old: str, new: str, check: Callable[[], None], tmp_path: Path):
    assert_caught(module, old, new, check, tmp_path)
