"""LoRA adapters: the settings that a run gives to PEFT.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import LoraConfig


def lora_config(
    r: int, alpha: float, target_modules: str | Sequence[str] = "all-linear", dropout: float = 0.0
) -> LoraConfig:
    """PEFT's settings of an adapter that adds `alpha / r * B @ A` to each chosen weight.

    Args:
        r: rank of the update, an integer >= 1; an adapted (out, in) weight gets `r * (in + out)` parameters.
        alpha: scale of the update, > 0.
        target_modules: `"all-linear"` (every linear layer but the LM head), another pattern of PEFT, or
            names of modules. PEFT raises a ValueError with the names if a model has none of them.
        dropout: probability, 0 <= dropout < 1, that an input of the adapter is dropped.

    Returns:
        The configuration, for a causal LM.

    Raises:
        ValueError: an argument is outside its range.
    """
    from peft import LoraConfig, TaskType

    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ValueError(f"r (the rank of the adapter) must be an integer >= 1; got {r!r}. Common values are 8 to 64.")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha (the adapter's scale is alpha / r) must be a number > 0; got {alpha!r}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability, 0 <= dropout < 1; got {dropout!r}.")
    if not target_modules:
        raise ValueError(
            f"target_modules must be 'all-linear' or names of modules, such as ['q_proj', 'v_proj']; "
            f"got {target_modules!r}, which adapts nothing."
        )
    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=r, lora_alpha=alpha, target_modules=modules, lora_dropout=dropout)
