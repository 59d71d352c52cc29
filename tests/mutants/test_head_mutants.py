"""Mistakes in the description of the LM head, which the models' own logits see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_lab import heads
from tests import test_heads as checks
from tests.mutants.harness import assert_caught


def family(name: str) -> None:
    """Log-probs through the described head are those of the family's model."""
    torch.manual_seed(0)
    model = checks.FAMILIES[name]().eval()
    assert torch.allclose(checks.head_logps(model), checks.own_logps(model), atol=1e-5)


saved_copy = checks.test_a_head_in_modules_to_save_is_the_copy_while_adapters_are_on
active_copy = checks.test_the_adapter_that_is_active_chooses_the_copy
adapter = partial(checks.test_an_adapter_on_the_head_is_refused_by_name, ["q_proj", "lm_head"])

MUTANTS: list[tuple[str, str, Callable[[], None]]] = [
    ("1 / config.logits_scaling", "config.logits_scaling", partial(family, "Granite")),
    ('_MULTIPLIERS = ("logit_scale", ', "_MULTIPLIERS = (", partial(family, "Cohere")),
    ('getattr(config, "final_logit_softcapping", None)', "None", partial(family, "Gemma2")),
    ('LMHead(weight, getattr(module, "bias", None),', "LMHead(weight, None,", partial(family, "Phi")),
    ("if module.disable_adapters or not active:", "if not active:", saved_copy),
    ("return module.modules_to_save[active[0]]", "return module.original_module", active_copy),
    ("if isinstance(module, BaseTunerLayer):", "if False:", adapter),
    ("if not difference < _PROBE_TOLERANCE:", "if False:", checks.test_an_unknown_transform_of_the_logits_is_refused),
    (
        "_LARGEST_PROBE_LOGIT = 50.0",
        "_LARGEST_PROBE_LOGIT = 0.5",
        checks.test_a_cap_is_seen_though_the_model_is_young_and_its_logits_small,
    ),
    (
        "float(torch.maximum(*differences))",
        "max(map(float, differences))",
        checks.test_logits_that_are_not_numbers_are_refused,
    ),
    ("module.training = True", "pass", checks.test_the_probe_keeps_each_module_in_its_mode),
]


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS, ids=range(len(MUTANTS)))
def test_each_mutant_is_caught(old: str, new: str, check: Callable[[], None], tmp_path: Path):
    assert_caught(heads, old, new, check, tmp_path)
