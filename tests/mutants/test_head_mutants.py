"""Mistakes in the description of the LM head, which the models' own logits see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from grpo_lab.heads import adapters, description, probe
from tests.heads import models, test_adapters, test_probe
from tests.mutants.harness import assert_caught


def family(name: str) -> None:
    """Log-probs through the described head are those of the family's model."""
    model = models.FAMILIES[name]()
    assert torch.allclose(models.head_logps(model), models.own_logps(model), atol=1e-5)


def adapter(name: str) -> None:
    """Log-probs and gradients through the described head are those of the adapted model."""
    test_adapters.assert_same_log_probs_and_gradients(test_adapters.ON_THE_HEAD[name]())


def refused(name: str) -> None:
    """The state is refused with its message."""
    test_adapters.test_what_is_not_known_is_refused_by_name(*test_adapters.REFUSED[name])


saved_copy = test_adapters.test_a_head_in_modules_to_save_is_the_copy_while_adapters_are_on
active_copy = test_adapters.test_the_adapter_that_is_active_chooses_the_copy
merged = partial(test_adapters.test_merged_adapters_are_in_the_weight_alone, test_adapters.ON_THE_HEAD["list"])
off = partial(
    test_adapters.test_the_adapter_is_far_from_none_and_off_within_its_context, test_adapters.ON_THE_HEAD["list"]
)

MUTANTS: list[tuple[ModuleType, str, str, Callable[[], None]]] = [
    (description, "else 1 / config.logits_scaling", "else config.logits_scaling", partial(family, "Granite")),
    (description, '("hyperclovax",)', "()", partial(family, "HyperCLOVAX")),
    (description, '_MULTIPLIERS = ("logit_scale", ', "_MULTIPLIERS = (", partial(family, "Cohere")),
    (description, 'getattr(config, "final_logit_softcapping", None)', "None", partial(family, "Gemma2")),
    (description, 'getattr(adapted.base, "bias", None)', "None", partial(family, "Phi")),
    (description, ", adapted.bias) if", ", None) if", partial(adapter, "LoRA with a bias")),
    (description, "adapted.low_rank, ", "None, ", partial(adapter, "list")),
    (description, "adapted.vocabulary_scale)", "None)", partial(adapter, "DoRA")),
    (adapters, "if module.disable_adapters or not active:", "if not active:", saved_copy),
    (adapters, "return module.modules_to_save[active[0]]", "return module.original_module", active_copy),
    (adapters, "parts.append(module.lora_A[name](states) * module.scaling[name])",
     "parts.append(module.lora_A[name](states))", partial(adapter, "rsLoRA")),
    (adapters, "biases = [module.scaling[name] * ", "biases = [", partial(adapter, "LoRA with a bias")),
    (adapters, "return [name for name in module.active_adapters if name in known]",
     "return [name for name in known]", test_adapters.test_the_adapter_that_is_active_is_the_one_that_is_added),
    (adapters, "if module.disable_adapters or module.merged:", "if module.disable_adapters:", merged),
    (adapters, "if module.disable_adapters or module.merged:", "if module.merged:", off),
    (adapters, "        module.unmerge()", "        pass",
     test_adapters.test_merged_adapters_that_are_switched_off_leave_the_weight),
    (adapters, "module.lora_dropout[name](hidden_states.to(module.lora_A[name].weight.dtype))",
     "hidden_states.to(module.lora_A[name].weight.dtype)",
     test_adapters.test_dropout_of_the_adapter_on_the_head_is_applied_in_training),
    (adapters, "(rows.to(wide) + module.scaling[name]", "(rows.to(wide) + 0 * module.scaling[name]",
     partial(adapter, "DoRA")),
    (adapters, "with torch.no_grad():", "with torch.enable_grad():", partial(adapter, "DoRA")),
    (adapters, "difference: Tensor = trained - base.weight[rows]", "difference = trained", partial(adapter, "tokens")),
    (adapters, "if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):", "if False:",
     partial(refused, "IA3")),
    (adapters, 'if getattr(module.lora_dropout[name], "p", 0.0) > 0:', "if False:",
     partial(refused, "DoRA with dropout")),
    (adapters, "if variant is not None:", "if module.use_dora[name]:", partial(refused, "another variant")),
    (adapters, "if len(names) > 1:", "if False:", test_adapters.test_dora_beside_another_adapter_is_refused_by_name),
    (probe, "if not difference < _PROBE_TOLERANCE:", "if False:",
     test_probe.test_an_unknown_transform_of_the_logits_is_refused),
    (probe, "_LARGEST_PROBE_LOGIT = 50.0", "_LARGEST_PROBE_LOGIT = 0.5",
     test_probe.test_a_cap_is_seen_though_the_model_is_young_and_its_logits_small),
    (probe, "float(torch.maximum(*differences))", "max(map(float, differences))",
     test_probe.test_logits_that_are_not_numbers_are_refused),
    (probe, "module.training = True", "pass", test_probe.test_the_probe_keeps_each_module_in_its_mode),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(module: ModuleType, old: str, new: str, check: Callable[[], None], tmp_path: Path):
    assert_caught(module, old, new, check, tmp_path)
