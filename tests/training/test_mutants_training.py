"""Mistakes in how settings reach the head, TRL and the sampling, which the tests of them see."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trl import GRPOTrainer

from grpo_lab.training import RunConfig, build, chunked_trainer, dynamic_sampling, guards, learning_rows, trainer
from tests.mutants.harness import RED, mutated
from tests.training import test_config as config_checks
from tests.training import test_dynamic_sampling as sampling_checks
from tests.training import test_learning_rows as row_checks
from tests.training.options import Case
from tests.training.parity import outcome
from tests.training.small import build_trainer
from tests.training.test_every_option import check_case

# Its classes stand on those of the other modules, so they are made again on the mutants.
REMADE = "config_class = ChunkedRLOOConfig"


def parity(*case: Any, **more: Any) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        one = Case(*case, **more)
        check_case(GRPOTrainer, one, outcome(GRPOTrainer, one, folder), folder)

    return check


def sampling(check: Callable[[Any], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> Callable[..., Any]:
        return lambda cls=None, **options: build_trainer(
            cls or sampling_checks.ChunkedGRPOTrainer, folder, around=options.pop("around", None), **options
        )

    return lambda folder: check(make(folder))


def refused(settings: dict[str, Any], message: str) -> Callable[[Path], None]:
    return lambda _: config_checks.test_what_cannot_be_meant_is_refused(RunConfig, settings, message)


def warned(settings: dict[str, Any], message: str) -> Callable[[Path], None]:
    return lambda _: config_checks.test_what_may_not_be_meant_is_warned_of(RunConfig, settings, message)


def reaches(name: str) -> Callable[[Path], None]:
    return lambda _: config_checks.test_a_setting_reaches_trl_under_its_name(name)


def never_moved(settings: dict[str, Any], expected: bool) -> Callable[[Path], None]:
    return lambda folder: config_checks.test_a_reuse_that_never_sees_a_moved_policy_is_warned_of(
        folder, config_checks.ChunkedGRPOConfig, settings, expected
    )


filled = sampling(lambda make: sampling_checks.test_the_batch_fills_with_groups_that_have_spread(make, "torch"))
recorded = sampling(sampling_checks.test_metrics_and_logs_are_of_the_kept_batch_alone)
kept = sampling(sampling_checks.test_what_is_never_spread_is_kept_and_counted)
resumed = sampling_checks.test_a_resumed_run_draws_what_the_unbroken_run_drew


def differentiated(settings: dict[str, Any]) -> Callable[[Path], None]:
    """Every row is differentiated with these settings."""
    return lambda folder: row_checks.test_every_row_is_differentiated_where_the_loss_has_another_term(folder, settings)


MUTANTS: list[tuple[ModuleType, str, str, Callable[[Path], None]]] = [
    (
        trainer,
        "entropies_require_grad=self.args.entropy_coef != 0.0 or self.args.use_adaptive_entropy",
        "entropies_require_grad=False",
        parity("entropy_coef", 0.05),
    ),
    (
        trainer,
        " or self.args.use_adaptive_entropy",
        "",
        parity("use_adaptive_entropy", True, {"entropy_target": 10.0, "entropy_coef_delta": 0.05}, steps=3),
    ),
    (
        trainer,
        "cast_to_fp32=self.args.cast_lm_head_to_fp32",
        "cast_to_fp32=False",
        parity("cast_lm_head_to_fp32", True, {"bf16": True}, tolerance=8e-3),
    ),
    (chunked_trainer, "temperature=self.temperature", "temperature=1.0", parity("temperature", 0.7)),
    (dynamic_sampling, "spread[place] = other.has_spread[new]", "spread[place] = True", filled),
    (dynamic_sampling, "super()._generate_and_score_completions(kept.rows)",
     "super()._generate_and_score_completions(inputs)", filled),
    (dynamic_sampling, "(highest > lowest)", "(highest >= lowest)", filled),
    (dynamic_sampling, "rounds, redrawn = rounds + 1, redrawn + len(places)",
     "rounds, redrawn = rounds + 1, len(places)", kept),
    (dynamic_sampling, "self._metrics, self.state.num_input_tokens_seen = metrics, tokens",
     "self._metrics = metrics", recorded),
    (dynamic_sampling, "self._pending_metrics.clear()", "pass", recorded),
    (dynamic_sampling, "self._drawn = kept.completion_ids, kept.logprobs", "pass", recorded),
    (dynamic_sampling, " or self._redraws[0] != self.state.global_step", "", resumed),
    (guards, "settings.epsilon_high >= 1", "settings.epsilon_high >= 0",
     refused({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high must be >= 1")),
    (guards, "not value > 0", "not value >= 0", refused({"delta": 0.0}, "delta must be > 0")),
    (guards, "elif name in _AT_LEAST_ZERO and", "elif False and", refused({"beta": -0.1}, "beta must be >= 0")),
    (guards, "generations < 2", "generations < 1", refused({"num_generations": 1}, "num_generations must be")),
    (guards, '_TOKEN_SUMS = ("bnpo", "dr_grpo", "dapo", "cispo")', '_TOKEN_SUMS = ("bnpo", "dr_grpo", "cispo")',
     warned({"importance_sampling_level": "sequence", "loss_type": "dapo"}, "by its length")),
    (guards, "settings.delta <= upper", "settings.delta < 1",
     warned({"delta": 1.1}, "delta 1.1 is not above")),
    (guards, "settings.num_iterations > 1 and", "", never_moved(
        {"num_iterations": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, False)),
    (guards, "steps_per_generation * settings.num_iterations", "steps_per_generation", never_moved(
        {"num_iterations": 2, "gradient_accumulation_steps": 4}, False)),
    (build, "            max_grad_norm=config.max_grad_norm,\n", "", reaches("max_grad_norm")),
    (build, "            num_iterations=config.num_iterations,\n", "", reaches("num_iterations")),
    (build, "getattr(config, name) for name in OBJECTIVE_SETTINGS",
     "getattr(config, name) for name in OBJECTIVE_SETTINGS[1:]", reaches("temperature")),
    (learning_rows, "(advantages != 0)", "(advantages > 0)", row_checks.equal_to_the_whole_batch),
    (learning_rows, "((~learns, False), (learns, True))", "((~learns, True), (learns, False))",
     row_checks.equal_to_the_whole_batch),
    (learning_rows, "input_ids[rows], attention_mask[rows]", "input_ids[rows], attention_mask[rows] * 0 + 1",
     row_checks.equal_to_the_whole_batch),
    (learning_rows, "entropies = entropies.index_put((rows,), part_entropies.detach().to(logps.dtype))", "pass",
     row_checks.equal_to_the_whole_batch),
    (learning_rows, "learns[0] = True", "learns[:] = True",
     row_checks.test_a_batch_that_teaches_nothing_still_has_a_backward_pass),
    (learning_rows, "self.beta != 0.0 or ", "", differentiated({"beta": 0.1})),
    (learning_rows, "self._entropy_bonus_enabled or ", "", differentiated({"entropy_coef": 0.1})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(
    module: ModuleType, old: str, new: str, check: Callable[[Path], None], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("first", "second", "mutant", "remade")]
    for folder in folders:
        folder.mkdir()
    check(folders[0])
    with ExitStack() as stack:
        stack.enter_context(mutated(module, old, new, folders[2]))
        if module in (chunked_trainer, dynamic_sampling, learning_rows):
            stack.enter_context(mutated(sys.modules[trainer.__name__], REMADE, REMADE, folders[3]))
        with pytest.raises(RED):
            check(folders[1])
