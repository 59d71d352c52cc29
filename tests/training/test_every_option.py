"""Every option of TRL's trainers that touches the loss gives the same loss, metrics and gradients here."""

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from grpo_lab.training import ChunkedGRPOConfig, ChunkedRLOOConfig
from tests.training.options import GRPO_CASES, LOSS_TYPES, NOT_LOSS, RLOO_AS_GRPO, RLOO_CASES, TRITON_CASES, Case
from tests.training.parity import Outcome, differences, ours, outcome
from tests.training.small import PROMPTS

OfTrl = Callable[..., Outcome]
ALL = [(GRPOTrainer, case) for case in GRPO_CASES] + [(RLOOTrainer, case) for case in RLOO_CASES]
FIXED = [(cls, case) for cls, case in ALL if not case.run]
RUNS = [(cls, case) for cls, case in ALL if case.run]


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> Iterator[None]:
    """Each training run ends in a garbage collection, which need not walk all the imported libraries again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def named(cases: list[tuple[type, Case]]) -> list[Any]:
    return [pytest.param(cls, case, id=f"{cls.__name__[:4]}-{case.name}") for cls, case in cases]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> OfTrl:
    """What TRL makes of a case, once for all tests."""
    known: dict[str, Outcome] = {}

    def get(cls: type, case: Case, without_option: bool = False) -> Outcome:
        settings = case.needs if without_option else case.settings
        key = f"{cls.__name__} {sorted(settings.items(), key=str)} {case.run} {case.steps} {case.world}"
        if key not in known:
            known[key] = outcome(cls, case, tmp_path_factory.mktemp("trl"), without_option=without_option)
        return known[key]

    return get


@pytest.mark.parametrize(("config", "cases"), [(GRPOConfig, GRPO_CASES), (RLOOConfig, RLOO_CASES)])
def test_every_field_of_trl_is_classified(config: type, cases: list[Case]) -> None:
    fields = {field.name for field in dataclasses.fields(config)}
    with_loss = {case.option for case in cases}
    without = [name for names in NOT_LOSS.values() for name in names.split()]
    if config is RLOOConfig:
        assert set(RLOO_AS_GRPO.split()) <= {case.option for case in GRPO_CASES}
        with_loss |= set(RLOO_AS_GRPO.split())
    twice = [name for name, count in Counter([*with_loss, *without]).items() if count > 1]
    assert not twice, f"both with and without effect on the loss: {twice}"
    unknown = fields - with_loss - set(without)
    assert not unknown, f"classify {sorted(unknown)} of {config.__name__} in tests/training/options.py"
    gone = with_loss - fields
    assert not gone, f"{config.__name__} has no {sorted(gone)} any more; take them out of tests/training/options.py"


def test_no_field_without_effect_is_left_over() -> None:
    fields = {field.name for config in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(config)}
    gone = {name for names in NOT_LOSS.values() for name in names.split()} - fields
    assert not gone, f"TRL has no {sorted(gone)} any more; take them out of tests/training/options.py"


@pytest.mark.parametrize(("ours", "theirs"), [(ChunkedGRPOConfig, GRPOConfig), (ChunkedRLOOConfig, RLOOConfig)])
def test_every_default_is_trls(ours: type, theirs: type, tmp_path: Path) -> None:
    a, b = ours(output_dir=str(tmp_path), use_cpu=True), theirs(output_dir=str(tmp_path), use_cpu=True)
    for field in dataclasses.fields(theirs):
        assert str(getattr(a, field.name)) == str(getattr(b, field.name)), field.name


@pytest.mark.parametrize(("cls", "case"), named(FIXED))
def test_loss_gradients_and_metrics_equal_trl(cls: type, case: Case, trl: OfTrl, tmp_path: Path) -> None:
    theirs = trl(cls, case)
    for implementation, chunk_size in (("torch", 5), ("reference", 1)):
        check_case(cls, case, theirs, tmp_path, implementation=implementation, chunk_size=chunk_size)
    check_that_it_acts(case, theirs, trl(cls, case, without_option=True))


@pytest.mark.parametrize(
    "case", [case for cls, case in FIXED if cls is GRPOTrainer and case.world == "lora"][::3], ids=lambda c: c.name
)
def test_a_trained_head_gets_the_gradients_of_trl(case: Case, tmp_path: Path) -> None:
    theirs = outcome(GRPOTrainer, case, tmp_path, trained_head=True)
    assert any("lm_head" in name for name in theirs.gradients)
    check_case(GRPOTrainer, case, theirs, tmp_path, trained_head=True)


@pytest.mark.parametrize("case", TRITON_CASES, ids=lambda case: case.name)
def test_triton_equals_trl(case: Case, trl: OfTrl, tmp_path: Path) -> None:
    check_case(GRPOTrainer, case, trl(GRPOTrainer, case), tmp_path, implementation="triton", chunk_size=16)


@pytest.mark.parametrize(("cls", "case"), named(RUNS))
def test_whole_runs_equal_trl(cls: type, case: Case, trl: OfTrl, tmp_path: Path) -> None:
    theirs = trl(cls, case)
    check_case(cls, case, theirs, tmp_path)
    check_that_it_acts(case, theirs, trl(cls, case, without_option=True))


def check_case(cls: type, case: Case, theirs: Outcome, folder: Path, **arguments: Any) -> None:
    """Ours equals `theirs`, TRL's outcome of the same case."""
    settings = {"implementation": "torch", "chunk_size": 5} | arguments
    apart = differences(outcome(ours(cls), case, folder, **settings), theirs)
    assert apart.within(case.tolerance), (settings, apart)


def check_that_it_acts(case: Case, theirs: Outcome, baseline: Outcome) -> None:
    """A case whose value changed nothing would compare nothing."""
    moved = differences(theirs, baseline)
    assert moved.within(1e-5) != case.acts, moved


TIMES = ("_runtime", "_per_second", "_time")
INPUTS = {
    "tool mask": {"tool_mask": torch.tensor([[1, 0, 1, 1, 0, 1, 1]]).expand(8, 7).contiguous()},
    "an advantage a token": {"advantages": torch.randn(8, 7, generator=torch.Generator().manual_seed(4))},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("case", LOSS_TYPES, ids=lambda case: case.name)
def test_tool_masks_and_token_advantages_equal_trl(
    case: Case, inputs: dict[str, torch.Tensor], trl: OfTrl, tmp_path: Path
) -> None:
    theirs = outcome(GRPOTrainer, case, tmp_path, inputs=inputs)
    check_case(GRPOTrainer, case, theirs, tmp_path, inputs=inputs)
    moved = differences(theirs, trl(GRPOTrainer, case))
    assert moved.gradient > 1e-3


@pytest.mark.parametrize("cls", [GRPOTrainer, RLOOTrainer])
def test_evaluation_equals_trl(make_trainer: Callable[..., Any], lora: Callable[..., Any], cls: type) -> None:
    logs = []
    for one in (cls, ours(cls)):
        trainer = make_trainer(
            one, lora=lora(), beta=0.1, per_device_eval_batch_size=4, num_generations_eval=2,
            around={"eval_dataset": Dataset.from_dict({"prompt": list(PROMPTS)})},
        )  # fmt: skip
        torch.manual_seed(5)
        logs.append(trainer.evaluate())
    theirs, found = logs
    assert found.keys() == theirs.keys()
    assert {"eval_loss", "eval_reward", "eval_kl", "eval_entropy"} <= found.keys()
    for name in {name for name in found if not name.endswith(TIMES)}:
        assert found[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5, nan_ok=True), name
