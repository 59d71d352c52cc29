"""What PEFT's adapters make of the module they sit on, without a second (V, H) matrix.

    LoRA              h W^T + s (h A^T) B^T                       r more columns: u = s h A^T beside h, B beside W
    several adapters  h W^T + sum_i s_i (h A_i^T) B_i^T           their columns side by side
    DoRA              m / |W + s B A| (h W^T + s (h A^T) B^T)     one scale for each vocabulary entry, |.| by row
    trainable tokens  h W^T with some rows R of W replaced by D   u = h (D - R)^T, and B selects those rows

The bias of the module is added last; LoRA's own bias joins it.

Source: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353, section 4.3: no gradient flows through the norm), and the
forward passes of PEFT's layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

_NORM_ROWS = 1024


@dataclass(frozen=True)
class LowRank:
    """A product beside that of hidden states and weight: `down(h) @ weight.T`.

    Attributes:
        down: from (..., H) hidden states to (..., r); gradient flows into both.
        weight: (V, r) float.
    """

    down: Callable[[Tensor], Tensor]
    weight: Tensor


@dataclass(frozen=True)
class AdaptedModule:
    """A linear module and what the adapters that are active now add to it.

    Attributes:
        base: holds the (V, H) weight and, maybe, a bias.
        bias: (V,) to add to the base's, or `None`.
        low_rank: a product to add to the base's, or `None`.
        vocabulary_scale: (V,) to multiply both products by, or `None`.
    """

    base: Any
    bias: Tensor | None = None
    low_rank: LowRank | None = None
    vocabulary_scale: Tensor | None = None


def read_adapters(module: nn.Module) -> AdaptedModule:
    """The base module and the adapters that a forward pass of `module` would use now.

    Args:
        module: the LM head of a model, plain or wrapped by PEFT. Adapters that are merged and switched off are
            unmerged, as PEFT's own forward pass does.

    Returns:
        The description.

    Raises:
        ValueError: an adapter of a kind that is not described here; the message names module and reason.
    """
    if isinstance(module, ModulesToSaveWrapper):
        return AdaptedModule(_saved_copy(module))
    if isinstance(module, TrainableTokensWrapper):
        return _trainable_tokens(module.token_adapter)
    if isinstance(module, TrainableTokensLayer):
        return _trainable_tokens(module)
    if type(module) is lora.Linear:
        return _lora(module)
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise ValueError(
            f"model: {type(module).__module__}.{type(module).__name__} puts an adapter on the LM head that the "
            "chunked head does not know. It knows LoRA and DoRA on a Linear, modules_to_save and "
            "trainable_token_indices. Leave the head out of target_modules, or use one of these."
        )
    return AdaptedModule(module)


def _saved_copy(module: Any) -> Any:
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not active:
        return module.original_module
    return module.modules_to_save[active[0]]


def _active(module: Any, known: Any) -> list[str]:
    """Names of the adapters that add to the base now; none where they are off or merged into it."""
    if module.disable_adapters and module.merged:
        module.unmerge()
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in known]


def _trainable_tokens(layer: Any) -> AdaptedModule:
    names = _active(layer, layer.token_indices)
    base = layer.get_base_layer()
    if not names:
        return AdaptedModule(base)
    rows = torch.tensor([row for name in names for row in layer.token_indices[name]], device=base.weight.device)
    if rows.unique().numel() < rows.numel():
        raise ValueError(f"model: the adapters {', '.join(names)} train the same tokens of the LM head.")
    trained = torch.cat([layer.trainable_tokens_delta[name] for name in names]).to(base.weight)
    selection = torch.zeros(base.weight.size(0), rows.numel(), dtype=base.weight.dtype, device=rows.device)
    selection[rows, torch.arange(rows.numel(), device=rows.device)] = 1

    def down(hidden_states: Tensor) -> Tensor:
        difference: Tensor = trained - base.weight[rows]
        return hidden_states @ difference.to(hidden_states.dtype).T

    return AdaptedModule(base, low_rank=LowRank(down, selection))


def _lora(module: Any) -> AdaptedModule:
    names = _active(module, module.lora_A)
    base = module.get_base_layer()
    if not names:
        return AdaptedModule(base)
    scale = None
    for name in names:
        variant = module.lora_variant.get(name)
        if variant is not None:
            scale = _dora_scale(module, name, names)
    biases = [module.scaling[name] * module.lora_B[name].bias for name in names if module.lora_bias[name]]
    bias = sum(biases[1:], biases[0]) if biases else None

    def down(hidden_states: Tensor) -> Tensor:
        parts = []
        for name in names:
            states = module.lora_dropout[name](hidden_states.to(module.lora_A[name].weight.dtype))
            parts.append(module.lora_A[name](states) * module.scaling[name])
        return torch.cat(parts, -1)

    return AdaptedModule(
        base, bias, LowRank(down, torch.cat([module.lora_B[name].weight for name in names], -1)), scale
    )


def _dora_scale(module: Any, name: str, names: list[str]) -> Tensor:
    variant = type(module.lora_variant[name]).__name__
    if not module.use_dora.get(name, False):
        raise ValueError(
            f"model: adapter {name!r} is a LoRA variant ({variant}) on the LM head that the chunked head does not "
            "know. It knows plain LoRA, rsLoRA and DoRA there; leave the head out of target_modules."
        )
    if len(names) > 1:
        raise ValueError(
            f"model: DoRA adapter {name!r} shares the LM head with {', '.join(n for n in names if n != name)}; one "
            "adapter alone can be active there. Set one with set_adapter."
        )
    if getattr(module.lora_dropout[name], "p", 0.0) > 0:
        raise ValueError(
            f"model: DoRA adapter {name!r} drops inputs of the LM head (lora_dropout {module.lora_dropout[name].p}), "
            "which needs a second product with the whole weight. Set lora_dropout=0.0, or leave the head out of "
            "target_modules."
        )
    weight, a, b = module.get_base_layer().weight, module.lora_A[name].weight, module.lora_B[name].weight
    with torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)
        norms = [
            (rows.to(wide) + module.scaling[name] * (b_rows.to(wide) @ a.to(wide))).norm(dim=1)
            for rows, b_rows in zip(weight.split(_NORM_ROWS), b.split(_NORM_ROWS), strict=True)
        ]
    magnitude: Tensor = module.lora_magnitude_vector[name].weight
    return magnitude / torch.cat(norms)
