"""Random cases for the LM-head kernels, scored by the kernels, the specification and plain PyTorch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo_lab import kernels, objectives

IMPLEMENTATIONS = ("torch", "triton")
LEAVES = ("hidden_states", "weight", "bias", "low_rank_states", "low_rank_weight", "vocabulary_scale")


@dataclass(frozen=True)
class Case:
    """One scoring problem: leaves, ids, mask, upstream gradients, options."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    completion_ids: Tensor
    completion_mask: Tensor | None
    upstream: tuple[Tensor, Tensor]
    options: dict[str, Any]
    low_rank_states: Tensor | None = None
    low_rank_weight: Tensor | None = None
    vocabulary_scale: Tensor | None = None

    @property
    def adapter(self) -> dict[str, Any]:
        """An adapter on the head, as the functions take it."""
        low_rank = None if self.low_rank_states is None else (self.low_rank_states, self.low_rank_weight)
        return {"low_rank": low_rank, "vocabulary_scale": self.vocabulary_scale}

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in LEAVES}
        return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.requires_grad}

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers as fresh leaves in another dtype."""

        def convert(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        return replace(
            self,
            **{name: convert(getattr(self, name)) for name in LEAVES},
            upstream=tuple(u.to(dtype) for u in self.upstream),
        )

    def loss(self, logps: Tensor, entropies: Tensor) -> Tensor:
        return (logps * self.upstream[0]).sum() + (entropies * self.upstream[1]).sum()


@dataclass(frozen=True)
class Scores:
    logps: Tensor
    entropies: Tensor
    grads: dict[str, Tensor]


def make_case(
    shape: tuple[int, ...] = (3, 5),
    *,
    hidden: int = 16,
    vocabulary: int = 37,
    bias: bool = True,
    rank: int = 0,
    scaled: bool = False,
    requires_grad: tuple[str, ...] = ("hidden_states", "weight", "bias"),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random leaves and a ragged mask; temperature, scale and cap away from 1 unless they are given.

    An adapter of `rank` > 0 and a scale of the vocabulary stand on the head where they are asked for.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).to(device, dtype)

    sizes: dict[str, tuple[int, ...]] = {"hidden_states": (*shape, hidden), "weight": (vocabulary, hidden)}
    if bias:
        sizes["bias"] = (vocabulary,)
    if rank:
        sizes |= {"low_rank_states": (*shape, rank), "low_rank_weight": (vocabulary, rank)}
    if scaled:
        sizes["vocabulary_scale"] = (vocabulary,)
    leaves = {name: normal(*size).requires_grad_(name in requires_grad) for name, size in sizes.items()}
    return Case(
        **({"bias": None} | leaves),
        completion_ids=torch.randint(vocabulary, shape, generator=random).to(device),
        completion_mask=(torch.rand(shape, generator=random) > 0.3).to(device),
        upstream=(normal(*shape), normal(*shape)),
        options={"temperature": 0.7, "logit_scale": 0.6, "soft_cap": 4.0} | options,
    )


def _scores(case: Case, logps: Tensor, entropies: Tensor) -> Scores:
    leaves = case.leaves
    grads = torch.autograd.grad(case.loss(logps, entropies), list(leaves.values())) if leaves else ()
    return Scores(logps.detach(), entropies.detach(), dict(zip(leaves, grads, strict=True)))


def of_logps_alone(case: Case) -> Case:
    """The case with a loss that leaves the entropies out."""
    return replace(case, upstream=(case.upstream[0], torch.zeros_like(case.upstream[1])))


def specification(case: Case) -> Scores:
    """What `objectives.per_token_logps` gives for the case's numbers in fp64."""
    case = case.to(torch.float64)
    logps, entropies = objectives.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        bias=case.bias,
        completion_mask=case.completion_mask,
        return_entropies=True,
        **case.adapter,
        **case.options,
    )
    return _scores(case, logps, entropies)


def scores(case: Case, implementation: str, chunk_size: int = 4, **options: Any) -> Scores:
    """What the kernels give, gradient through log-probs and, but for tiles of the vocabulary, entropies."""
    logps, entropies = kernels.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        bias=case.bias,
        completion_mask=case.completion_mask,
        return_entropies=True,
        **case.adapter,
        entropies_require_grad="vocabulary_tile" not in options,
        chunk_size=chunk_size,
        implementation=implementation,
        **(case.options | options),
    )
    return _scores(case, logps, entropies)


def plain(case: Case, dtype: torch.dtype) -> Scores:
    """What users write by hand: `F.linear` and the transforms in `dtype`, then `log_softmax` in fp32."""
    logits = functional.linear(case.hidden_states.to(dtype), case.weight.to(dtype))
    if case.low_rank_states is not None and case.low_rank_weight is not None:
        logits = logits + functional.linear(case.low_rank_states.to(dtype), case.low_rank_weight.to(dtype))
    if case.vocabulary_scale is not None:
        logits = logits * case.vocabulary_scale.to(dtype)
    if case.bias is not None:
        logits = logits + case.bias.to(dtype)
    logits = logits * case.options["logit_scale"]
    cap = case.options["soft_cap"]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    all_logps = (logits / case.options["temperature"]).float().log_softmax(-1)
    mask = case.completion_mask
    logps = all_logps.gather(-1, case.completion_ids[..., None]).squeeze(-1) * mask
    return _scores(case, logps, -(all_logps.exp() * all_logps).sum(-1) * mask)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """`|result - expected| / |expected|`, in fp64."""
    expected = expected.double()
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-12))


def worst_error(result: Scores, expected: Scores) -> float:
    """The largest relative error among log-probs, entropies and the gradients, which must be the same set."""
    assert result.grads.keys() == expected.grads.keys()
    pairs = [(result.logps, expected.logps), (result.entropies, expected.entropies)]
    pairs += [(result.grads[name], expected.grads[name]) for name in expected.grads]
    errors = [relative_error(*pair) for pair in pairs]
    assert all(error == error for error in errors), f"NaN: {errors}"
    return max(errors)
