"""Values and gradients of the chunked head against the specification, on every path a caller can take."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from grpo_lab import kernels
from tests.kernels.cases import (
    IMPLEMENTATIONS,
    Case,
    make_case,
    of_logps_alone,
    plain,
    relative_error,
    scores,
    specification,
    worst_error,
)
from tests.kernels.cases import LEAVES as ALL_LEAVES

LEAVES = ALL_LEAVES[:3]
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(LEAVES, size)]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def one_token(hidden: list[float], weight: list[list[float]], token: int = 0, **options: Any) -> float:
    """Log-prob of one token, from lists."""
    logps, _ = kernels.per_token_logps(
        torch.tensor([hidden]),
        torch.tensor(weight),
        torch.tensor([token]),
        **({"temperature": 1.0, "chunk_size": 1, "implementation": "torch"} | options),
    )
    return logps.item()


@each_implementation
@pytest.mark.parametrize("requires_grad", SUBSETS, ids="+".join)
def test_each_gradient_that_is_asked_for_and_no_other(implementation: str, requires_grad: tuple[str, ...]):
    case = make_case(requires_grad=requires_grad)
    result = scores(case, implementation)
    assert tuple(result.grads) == requires_grad
    assert worst_error(result, specification(case)) < 2e-6


ADAPTER_SUBSETS = [subset for size in range(7) for subset in itertools.combinations(ALL_LEAVES, size)]


@pytest.mark.parametrize("requires_grad", ADAPTER_SUBSETS, ids="+".join)
def test_an_adapter_on_the_head_has_each_gradient_that_is_asked_for(requires_grad: tuple[str, ...]):
    case = make_case(rank=2, scaled=True, requires_grad=requires_grad)
    result = scores(case, "torch")
    assert tuple(result.grads) == requires_grad
    assert worst_error(result, specification(case)) < 3e-6


@pytest.mark.parametrize("requires_grad", [ALL_LEAVES[:1], ALL_LEAVES[3:4], ALL_LEAVES[4:5], ALL_LEAVES], ids="+".join)
def test_an_adapter_on_the_head_in_triton(requires_grad: tuple[str, ...]):
    case = make_case(rank=2, scaled=True, requires_grad=requires_grad)
    assert worst_error(scores(case, "triton"), specification(case)) < 3e-6


@each_implementation
@pytest.mark.parametrize("scaled", [False, True])
def test_low_rank_and_scale_stand_alone(implementation: str, scaled: bool):
    case = make_case(rank=0 if scaled else 3, scaled=scaled, bias=False, requires_grad=ALL_LEAVES)
    assert worst_error(scores(case, implementation), specification(case)) < 3e-6


def test_an_adapter_makes_no_tensor_of_the_size_of_the_head():
    leaves = ("hidden_states", "low_rank_states", "low_rank_weight")
    case = make_case((20,), hidden=64, vocabulary=500, bias=False, rank=2, requires_grad=leaves)
    sizes = allocations(case, chunk_size=4)
    assert max(sizes) == 4 * 500


@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"soft_cap": None},
        {"logit_scale": 1.0, "soft_cap": None, "temperature": 1.0},
        {"temperature": 3.0},
    ],
)
def test_float64_agrees_to_rounding(requires_grad: tuple[str, ...], options: dict[str, Any]):
    case = make_case(dtype=torch.float64, requires_grad=requires_grad, **options)
    assert worst_error(scores(case, "torch"), specification(case)) < 1e-13


@each_implementation
@pytest.mark.parametrize(
    "options", [{"soft_cap": None}, {"bias": False}, {"vocabulary": 1}, {"vocabulary": 2500, "hidden": 3}]
)
def test_each_option_alone(implementation: str, options: dict[str, Any]):
    case = make_case(**options)
    if case.weight.size(0) > 1:
        assert worst_error(scores(case, implementation), specification(case)) < 3e-6
    else:
        assert scores(case, implementation).logps.abs().max() == 0


@each_implementation
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_gradients_are_off(implementation: str, context: Any):
    case = make_case()
    expected = specification(case)
    with context():
        logps, entropies = kernels.per_token_logps(
            case.hidden_states,
            case.weight,
            case.completion_ids,
            bias=case.bias,
            completion_mask=case.completion_mask,
            return_entropies=True,
            chunk_size=4,
            implementation=implementation,
            **case.options,
        )
    assert not logps.requires_grad
    assert not entropies.requires_grad
    assert relative_error(logps, expected.logps) < 1e-6
    assert relative_error(entropies, expected.entropies) < 1e-6


@pytest.mark.parametrize(("implementation", "chunk_sizes"), [("torch", (1, 2, 3, 5, 7, 16, 64)), ("triton", (3, 64))])
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_no_chunk_size_changes_the_result(
    implementation: str, chunk_sizes: tuple[int, ...], requires_grad: tuple[str, ...]
):
    case = make_case((5, 7), requires_grad=requires_grad)
    expected = scores(case, "torch", chunk_size=35)
    for chunk_size in chunk_sizes:
        assert worst_error(scores(case, implementation, chunk_size), expected) < 1e-6, chunk_size


FROZEN = (("hidden_states",), ("hidden_states", "low_rank_states"), ())


@each_implementation
@pytest.mark.parametrize("vocabulary_tile", [1, 7, 16, 36, 37, 100])
@pytest.mark.parametrize("requires_grad", FROZEN, ids="+".join)
@pytest.mark.parametrize("options", [{}, {"soft_cap": None, "rank": 0, "scaled": False}], ids=str)
def test_no_vocabulary_tile_changes_the_result(
    implementation: str, vocabulary_tile: int, requires_grad: tuple[str, ...], options: dict[str, Any]
):
    if implementation == "triton" and vocabulary_tile in (1, 36, 100):
        pytest.skip("the interpreter is slow; torch covers the edges of the tiles")
    case = make_case(**({"rank": 2, "scaled": True, "requires_grad": requires_grad} | options))
    result = scores(case, implementation, vocabulary_tile=vocabulary_tile)
    assert worst_error(result, specification(of_logps_alone(case))) < 3e-6


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lift", [-500.0, 40.0, 100.0, 1000.0])
def test_a_logit_far_above_the_first_tile_loses_nothing(implementation: str, dtype: torch.dtype, lift: float):
    case = make_case(
        (2, 4), vocabulary=24, requires_grad=("hidden_states",), soft_cap=None, temperature=1.0, logit_scale=1.0
    ).to(dtype)
    with torch.no_grad():
        case.bias[20] += lift
        case.completion_ids[0] = 20
    expected, result = specification(of_logps_alone(case)), scores(case, implementation, vocabulary_tile=8)
    for name in ("logps", "entropies"):
        assert torch.allclose(getattr(result, name).double(), getattr(expected, name), rtol=1e-4, atol=1e-3), name
    ours, theirs = result.grads["hidden_states"].double(), expected.grads["hidden_states"]
    assert (ours - theirs).abs().max() < (2e-5 if dtype == torch.float32 else 0.05)


def test_an_entry_that_cannot_be_adds_nothing():
    case = make_case(requires_grad=("hidden_states",), soft_cap=None)
    case.bias[30:] = -torch.inf
    case.completion_ids.clamp_(max=29)
    cut = replace(case, weight=case.weight[:30].detach(), bias=case.bias[:30].detach())
    expected = specification(of_logps_alone(cut))
    for implementation in IMPLEMENTATIONS:
        assert worst_error(scores(case, implementation, vocabulary_tile=8), expected) < 3e-6
        assert worst_error(scores(of_logps_alone(case), implementation), expected) < 3e-6
    assert worst_error(specification(of_logps_alone(case)), expected) < 1e-12


@each_implementation
@pytest.mark.parametrize("probability", [0.9, 0.999, 0.9999])
def test_a_confident_token_keeps_its_small_derivative_in_low_precision(implementation: str, probability: float):
    weight = torch.tensor([[1.0, 0.5], [-0.5, 1.0], [0.25, -1.0]], dtype=torch.bfloat16)
    bias = torch.tensor([0.0, 0.0, math.log(2 * probability / (1 - probability))])  # hidden 0: p = bias alone
    hidden_states = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    for vocabulary_tile in (None, 2):
        logps, _ = kernels.per_token_logps(
            hidden_states, weight, torch.tensor([2]), bias=bias, temperature=1.0, chunk_size=1,
            implementation=implementation, vocabulary_tile=vocabulary_tile,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(logps.sum(), hidden_states)
        expected = (1 - probability) * (weight[2] - (weight[0] + weight[1]) / 2)
        assert relative_error(grad[0], expected) < 1e-2, vocabulary_tile


def test_tiles_of_the_vocabulary_bound_the_memory():
    case = make_case((64,), hidden=8, vocabulary=1000, requires_grad=("hidden_states",))
    assert max(allocations(case, chunk_size=4, vocabulary_tile=100)) == 64 * 8
    assert max(allocations(case, chunk_size=8, vocabulary_tile=100)) == 8 * 100


def test_tiles_of_the_vocabulary_are_for_a_frozen_head_and_log_probs():
    with pytest.raises(ValueError, match=r"vocabulary_tile is for a frozen head .* got a tensor of the head"):
        scores(make_case(), "torch", vocabulary_tile=8)
    frozen = make_case(requires_grad=("hidden_states",))
    with pytest.raises(ValueError, match="got entropies_require_grad=True"):
        kernels.per_token_logps(
            frozen.hidden_states, frozen.weight, frozen.completion_ids, temperature=1.0, chunk_size=4,
            implementation="torch", entropies_require_grad=True, vocabulary_tile=8,
        )  # fmt: skip


def test_permuting_rows_permutes_the_result():
    case = make_case((5, 7))
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = replace(
        case,
        hidden_states=case.hidden_states.detach()[order].requires_grad_(),
        completion_ids=case.completion_ids[order],
        completion_mask=case.completion_mask[order],
        upstream=tuple(u[order] for u in case.upstream),
    )
    result, expected = scores(permuted, "torch"), scores(case, "torch")
    assert relative_error(result.logps, expected.logps[order]) < 1e-6
    assert relative_error(result.grads["hidden_states"], expected.grads["hidden_states"][order]) < 1e-6
    assert relative_error(result.grads["weight"], expected.grads["weight"]) < 1e-6


@each_implementation
def test_strided_inputs(implementation: str):
    case = make_case((4, 6))
    expected = specification(case)
    buffer = torch.full((4, 8, 20), torch.nan)
    hidden_states = buffer[:, 1:7, 2:18].copy_(case.hidden_states.detach())
    weight = case.weight.detach().T.contiguous().T
    bias = torch.stack([case.bias.detach(), torch.full((37,), torch.nan)], 1)[:, 0]
    strided = replace(
        case,
        hidden_states=hidden_states.detach().requires_grad_(),
        weight=weight.requires_grad_(),
        bias=bias.requires_grad_(),
        completion_ids=case.completion_ids.T.contiguous().T,
        completion_mask=case.completion_mask.T.contiguous().T,
    )
    assert not strided.hidden_states.is_contiguous()
    assert worst_error(scores(strided, implementation), expected) < 2e-6


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_dtypes_of_ids_and_mask(ids_dtype: torch.dtype, mask_dtype: torch.dtype):
    case = make_case()
    other = replace(
        case,
        completion_ids=case.completion_ids.to(ids_dtype),
        completion_mask=case.completion_mask.to(mask_dtype),
    )
    assert worst_error(scores(other, "torch"), scores(case, "torch")) == 0


@each_implementation
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_inputs_are_not_changed(implementation: str, requires_grad: tuple[str, ...]):
    case = make_case(requires_grad=requires_grad)
    tensors = (case.hidden_states, case.weight, case.bias, case.completion_ids, case.completion_mask)
    before = [tensor.detach().clone() for tensor in tensors]
    scores(case, implementation)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), copy)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    list(itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=2)),
    ids=str,
)
@pytest.mark.parametrize(
    ("implementation", "requires_grad"),
    [("torch", LEAVES[:1]), ("torch", LEAVES), ("triton", LEAVES[:1])],
    ids=str,
)
def test_low_precision_is_at_least_as_exact_as_plain_pytorch(
    implementation: str,
    autocast: torch.dtype | None,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    requires_grad: tuple[str, ...],
):
    case = make_case((4, 8), hidden=32, vocabulary=130, requires_grad=requires_grad)
    case = replace(
        case,
        hidden_states=case.hidden_states.detach().to(hidden_dtype).requires_grad_(),
        weight=case.weight.detach().to(weight_dtype).requires_grad_("weight" in requires_grad),
    )
    compute_dtype = autocast or torch.promote_types(hidden_dtype, weight_dtype)
    expected, by_hand = specification(case), plain(case, compute_dtype)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        result = scores(case, implementation, chunk_size=5)
    assert result.logps.dtype == result.entropies.dtype == torch.float32
    for name, grad in result.grads.items():
        assert grad.dtype == getattr(case, name).dtype
        # Both round the same derivatives and weights; their luck differs.
        allowed = 1.25 * relative_error(by_hand.grads[name], expected.grads[name]) + 1e-6
        assert relative_error(grad, expected.grads[name]) < allowed, name
    for name in ("logps", "entropies"):
        ours, theirs = getattr(result, name), getattr(by_hand, name)
        allowed = relative_error(theirs, getattr(expected, name)) + 1e-6
        assert relative_error(ours, getattr(expected, name)) < allowed, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("requires_grad", [ALL_LEAVES[:1] + ALL_LEAVES[3:4], ALL_LEAVES], ids="+".join)
def test_an_adapter_in_low_precision_is_as_exact_as_plain_pytorch(dtype: torch.dtype, requires_grad: tuple[str, ...]):
    case = make_case((4, 8), hidden=32, vocabulary=130, rank=4, scaled=True, requires_grad=requires_grad).to(dtype)
    expected, by_hand, result = specification(case), plain(case, dtype), scores(case, "torch", chunk_size=5)
    assert result.logps.dtype == torch.float32
    assert relative_error(result.logps, expected.logps) < relative_error(by_hand.logps, expected.logps)
    for name, grad in result.grads.items():
        assert grad.dtype == dtype
        allowed = 1.5 * relative_error(by_hand.grads[name], expected.grads[name])
        assert relative_error(grad, expected.grads[name]) < allowed, name


def test_autocast_leaves_float64_alone():
    case = make_case(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = scores(case, "torch")
    assert result.logps.dtype == torch.float64
    assert worst_error(result, specification(case)) < 1e-13


@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_the_upstream_gradient_scales_every_gradient(requires_grad: tuple[str, ...]):
    case = make_case(requires_grad=requires_grad)
    expected = scores(case, "torch").grads
    for scale in (0.25, 1024.0):
        scaled = replace(case, upstream=tuple(u * scale for u in case.upstream))
        for name, grad in scores(scaled, "torch").grads.items():
            assert torch.equal(grad, expected[name] * scale), (scale, name)


@each_implementation
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_two_losses_and_two_backward_passes(implementation: str, requires_grad: tuple[str, ...]):
    case = make_case(requires_grad=requires_grad)
    logps, _ = kernels.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        bias=case.bias,
        completion_mask=case.completion_mask,
        chunk_size=4,
        implementation=implementation,
        **case.options,
    )
    first, second = (logps * case.upstream[0]).sum(), logps.square().sum()
    leaves = list(case.leaves.values())
    first_grads = torch.autograd.grad(first, leaves, retain_graph=True)
    again = torch.autograd.grad(first, leaves, retain_graph=True)
    second_grads = torch.autograd.grad(second, leaves, retain_graph=True)
    (first + 2 * second).backward()
    for leaf, one, same, two in zip(leaves, first_grads, again, second_grads, strict=True):
        assert torch.equal(one, same)
        assert relative_error(leaf.grad, one + 2 * two) < 1e-6


def test_second_derivatives_are_refused():
    case = make_case(requires_grad=("hidden_states",))
    logps, _ = kernels.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        temperature=1.0,
        chunk_size=4,
        implementation="torch",
    )
    (grad,) = torch.autograd.grad(logps.square().sum(), case.hidden_states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@each_implementation
def test_entropies_carry_no_gradient_unless_asked(implementation: str):
    case = make_case()
    logps, entropies = kernels.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        return_entropies=True,
        chunk_size=4,
        implementation=implementation,
        **case.options,
    )
    assert logps.requires_grad
    assert not entropies.requires_grad
    assert (
        kernels.per_token_logps(
            case.hidden_states,
            case.weight,
            case.completion_ids,
            chunk_size=4,
            implementation=implementation,
            **case.options,
        )[1]
        is None
    )


@each_implementation
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_masked_places_may_hold_any_id(implementation: str, ids_dtype: torch.dtype, requires_grad: tuple[str, ...]):
    case = make_case((2, 5), vocabulary=130, requires_grad=requires_grad)
    masked = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 1]], dtype=torch.bool)
    ids = torch.full((2, 5), 129)
    junk = ids.masked_scatter(masked, torch.tensor([-100, -1, 130, 137, 2**31 - 1]))
    expected = scores(replace(case, completion_ids=ids, completion_mask=~masked), implementation)
    result = scores(replace(case, completion_ids=junk.to(ids_dtype), completion_mask=~masked), implementation)
    assert worst_error(result, expected) == 0
    assert result.logps[masked].abs().max() == result.entropies[masked].abs().max() == 0
    assert result.grads["hidden_states"][masked].abs().max() == 0
    assert result.logps[~masked].abs().min() > 0


@pytest.mark.parametrize("bad", [130, 137, -1, -100])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(bad: int):
    case = make_case((4, 8), vocabulary=130)
    position = tuple(case.completion_mask.nonzero()[7].tolist())
    case.completion_ids[position] = bad
    with pytest.raises(
        ValueError,
        match=rf"completion_ids.*\[0, 130\).*got {bad} at position \({position[0]}, {position[1]}\)",
    ):
        scores(case, "torch")


@each_implementation
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_no_token_that_counts_gives_zeros_attached_to_the_graph(
    implementation: str, shape: tuple[int, ...], requires_grad: tuple[str, ...]
):
    case = make_case(shape, requires_grad=requires_grad)
    case = replace(case, completion_mask=torch.zeros(shape, dtype=torch.bool))
    result = scores(case, implementation)
    assert result.logps.shape == shape
    for tensor in (result.logps, result.entropies, *result.grads.values()):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@each_implementation
def test_worked_numbers(implementation: str):
    options = {"implementation": implementation}
    identity = [[1.0, 0.0], [0.0, 1.0]]
    # Logits [2, 0] at temperature 0.5; -0.126928 would be no temperature, -0.000335 the temperature twice.
    assert one_token([2.0, 0.0], identity, temperature=0.5, **options) == pytest.approx(-0.018150, abs=1e-6)
    # Hidden 0, bias [1, 0, 0]; -1.098612 would be no bias.
    three = [[0.0], [0.0], [0.0]]
    bias = torch.tensor([1.0, 0.0, 0.0])
    assert one_token([0.0], three, bias=bias, **options) == pytest.approx(-0.551445, abs=1e-6)
    # Logit 60 under a soft-cap of 30 is 28.920827.
    capped = one_token([60.0, 0.0], identity, 1, soft_cap=30.0, **options)
    assert capped == pytest.approx(-28.920827, abs=2e-5)
    # Logit 8 divided by 8, as Granite does.
    assert one_token([8.0, 0.0], identity, logit_scale=1 / 8, **options) == pytest.approx(-0.313262, abs=1e-6)
    # A rank-1 adapter of scaling 2 on a zero head, merged: logits [2, 0].
    merged = (2 * torch.tensor([[1.0], [0.0]]) @ torch.tensor([[1.0, 0.0]])).tolist()
    assert one_token([1.0, 0.0], merged, **options) == pytest.approx(-0.126928, abs=1e-6)
    # The same beside the zero head; -0.693147 would be no adapter.
    zero, beside = [[0.0, 0.0], [0.0, 0.0]], (torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]]))
    assert one_token([1.0, 0.0], zero, low_rank=beside, **options) == pytest.approx(-0.126928, abs=1e-6)
    # A scale of the vocabulary leaves the bias alone: logits [2 x 1 + 1, 0].
    scaled = {"vocabulary_scale": torch.tensor([2.0, 5.0]), "bias": torch.tensor([1.0, 0.0])}
    assert one_token([1.0, 0.0], identity, **scaled, **options) == pytest.approx(-0.048587, abs=1e-6)


@each_implementation
def test_bias_gradient_of_one_token(implementation: str):
    bias = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
    logps, _ = kernels.per_token_logps(
        torch.zeros(1, 1),
        torch.zeros(3, 1),
        torch.tensor([0]),
        bias=bias,
        temperature=1.0,
        chunk_size=1,
        implementation=implementation,
    )
    (-logps.sum()).backward()
    assert bias.grad.tolist() == pytest.approx([-0.423883, 0.211942, 0.211942], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"chunk_size": 0}, "chunk_size must be a number of tokens, an int >= 1; got 0"),
        ({"chunk_size": True}, "chunk_size"),
        ({"chunk_size": 2.0}, "chunk_size"),
        ({"implementation": "auto"}, "implementation must be one of"),
        ({"vocabulary_tile": 0}, "vocabulary_tile must be None or a number of entries, an int >= 1; got 0"),
        ({"vocabulary_tile": 8.0}, "vocabulary_tile"),
        ({"logit_scale": float("inf")}, "logit_scale"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"bias": torch.zeros(2)}, r"bias must be \(3,\); got \(2,\)"),
        ({"completion_mask": torch.ones(4)}, "completion_mask must have the shape of completion_ids"),
        ({"completion_ids": torch.zeros(4, dtype=torch.int64)}, "hidden_states must be"),
        ({"completion_ids": torch.tensor(0), "hidden_states": torch.zeros(2)}, "at least one axis"),
        ({"weight": torch.zeros(3, 4)}, "hidden_states must be"),
        ({"completion_ids": torch.zeros(5)}, "completion_ids must be integers; got torch.float32"),
        ({"low_rank": (torch.zeros(5, 2), torch.zeros(4, 2))}, r"low_rank must be .* weight \(3, r\); got \(5, 2\)"),
        ({"low_rank": (torch.zeros(5, 1), torch.zeros(3, 2))}, r"got \(5, 1\) and \(3, 2\)"),
        ({"vocabulary_scale": torch.zeros(2)}, r"vocabulary_scale must be \(3,\); got \(2,\)"),
        ({"weight": torch.zeros(0, 2)}, "sharded weight is gathered"),
        ({"weight": torch.zeros(6)}, "sharded weight is gathered"),
        ({"weight": torch.zeros(3, 1, dtype=torch.uint8)}, "quantised one dequantised"),
        (
            {"weight": torch.zeros(3, 2).double(), "implementation": "triton"},
            "for fp64 inputs use implementation='torch'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "hidden_states": torch.zeros(5, 2),
        "weight": torch.zeros(3, 2),
        "completion_ids": torch.zeros(5, dtype=torch.int64),
        "temperature": 1.0,
        "chunk_size": 4,
        "implementation": "torch",
    }
    with pytest.raises(ValueError, match=message):
        kernels.per_token_logps(**(arguments | options))


class _Allocations(TorchDispatchMode):
    """Shapes of the tensors that operations return in storage of their own."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(tensor.numel())
        return result


def allocations(case: Case, chunk_size: int, **options: Any) -> list[int]:
    tensors = tuple(tensor for name in ALL_LEAVES if (tensor := getattr(case, name)) is not None)
    with _Allocations(tensors) as mode:
        scores(case, "torch", chunk_size, **options)
    return mode.sizes


def test_no_tensor_is_larger_than_a_tile_or_the_kept_rows():
    case = make_case((64,), hidden=8, vocabulary=1000, requires_grad=("hidden_states",))
    assert max(allocations(case, chunk_size=4)) == 4 * 1000
    # The test sees what it forbids: a trainable weight has its (V, H) gradient.
    trainable = make_case((64,), hidden=8, vocabulary=1000)
    assert max(allocations(trainable, chunk_size=4)) == 8 * 1000


def _addmm_operations(_: Any, a: Any, b: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def products(case: Case, implementation: str) -> float:
    """Operations in matrix products of a forward pass, and of a backward pass where one is due, over N H V."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_operations})
    with counter:
        logps, _ = kernels.per_token_logps(
            case.hidden_states,
            case.weight,
            case.completion_ids,
            completion_mask=case.completion_mask,
            chunk_size=4,
            implementation=implementation,
            **case.options,
        )
        if logps.requires_grad:
            logps.sum().backward()
    return counter.get_total_flops() / (int(case.completion_mask.sum()) * case.weight.numel())


@each_implementation
def test_no_product_is_made_that_nobody_asked_for(implementation: str):
    assert products(make_case(bias=False), implementation) == 8
    assert products(make_case(bias=False, requires_grad=("weight",)), implementation) == 6
    assert products(make_case(bias=False, requires_grad=("hidden_states",)), implementation) == 4
    assert products(make_case(bias=False, requires_grad=()), implementation) == 2
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert products(make_case(bias=False), implementation) == 2


class _NoGradient(torch.autograd.Function):
    """A loss that tells its input nothing."""

    @staticmethod
    def forward(_ctx: Any, logps: Tensor) -> Tensor:
        return logps.sum()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_no_upstream_gradient_gives_no_gradient(requires_grad: tuple[str, ...]):
    case = make_case(requires_grad=requires_grad)
    logps, _ = kernels.per_token_logps(
        case.hidden_states,
        case.weight,
        case.completion_ids,
        bias=case.bias,
        completion_mask=case.completion_mask,
        chunk_size=4,
        implementation="torch",
        **case.options,
    )
    _NoGradient.apply(logps).backward()
    assert all(leaf.grad is None for leaf in case.leaves.values())


@settings(max_examples=100)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(2, 70),
    chunk_size=st.integers(1, 25),
    requires_grad=st.sampled_from(SUBSETS[1:]),
    soft_cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_mask_and_chunk(
    shape: tuple[int, int],
    hidden: int,
    vocabulary: int,
    chunk_size: int,
    requires_grad: tuple[str, ...],
    soft_cap: float | None,
    seed: int,
):
    case = make_case(
        shape, hidden=hidden, vocabulary=vocabulary, requires_grad=requires_grad, soft_cap=soft_cap, seed=seed
    )
    result, expected = scores(case, "torch", chunk_size), specification(case)
    for name, tensor in {"logps": result.logps, "entropies": result.entropies, **result.grads}.items():
        reference = expected.grads[name] if name in expected.grads else getattr(expected, name)
        assert torch.allclose(tensor.double(), reference, rtol=1e-4, atol=1e-4), name
