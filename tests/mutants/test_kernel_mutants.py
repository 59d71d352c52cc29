"""Mistakes in the LM-head kernels, each of which one of their checks sees."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from grpo_lab.kernels import arguments, tiles, token_logprobs, torch_rows, triton_rows, vocabulary_tiles
from tests.kernels import test_token_logprobs as checks
from tests.kernels.cases import LEAVES as ALL_LEAVES
from tests.kernels.cases import make_case, of_logps_alone, scores, specification, worst_error
from tests.mutants.harness import assert_caught

LEAVES = ("hidden_states", "weight", "bias")


def agreement(implementation: str, requires_grad: tuple[str, ...] = LEAVES, **settings: object) -> None:
    """Value and gradients agree with the specification on a small case."""
    case = make_case((2, 3), hidden=5, requires_grad=requires_grad, **settings)
    assert worst_error(scores(case, implementation, chunk_size=2), specification(case)) < 1e-5


def square_tile() -> None:
    """As many rows as columns, where a wrong axis has the right shape."""
    case = make_case((12,), hidden=5, vocabulary=12)
    case.completion_mask.fill_(True)
    assert worst_error(scores(case, "torch", chunk_size=12), specification(case)) < 1e-5


def without_entropy() -> None:
    """The gradient of log-probs alone, where the head is frozen."""
    checks.test_bias_gradient_of_one_token("torch")
    agreement("torch", ("hidden_states",))


def adapted_head() -> None:
    """Value and every gradient with an adapter and a scale on the head."""
    agreement("torch", ALL_LEAVES, rank=2, scaled=True)


def scale_alone() -> None:
    """The scale's gradient where nothing else of the head is trained."""
    agreement("torch", ("vocabulary_scale",), rank=2, scaled=True)


def low_rank_alone() -> None:
    """The adapter's gradient where nothing else of the head is trained."""
    agreement("torch", ("low_rank_weight",), rank=2)


def tiled(implementation: str, vocabulary_tile: int) -> None:
    """Value and gradients with the vocabulary in tiles, an adapter on the head, a scale, a cap and a bias."""
    case = make_case(rank=2, scaled=True, requires_grad=("hidden_states", "low_rank_states"))
    expected = specification(of_logps_alone(case))
    assert worst_error(scores(case, implementation, vocabulary_tile=vocabulary_tile), expected) < 1e-5


def far(dtype: torch.dtype, lift: float) -> None:
    """A logit far above those of the first tile."""
    checks.test_a_logit_far_above_the_first_tile_loses_nothing("torch", dtype, lift)


vocabulary_walk = partial(tiled, "torch", 16)
vocabulary_walk_triton = partial(tiled, "triton", 16)
far_logit = partial(far, torch.float32, 1000.0)
far_logit_in_half = partial(far, torch.float16, 40.0)
impossible_entry = checks.test_an_entry_that_cannot_be_adds_nothing
torch_head = partial(agreement, "torch")
torch_frozen = partial(agreement, "torch", ("hidden_states",))
triton_head = partial(agreement, "triton")
two_blocks = partial(agreement, "triton", vocabulary=2500)
no_idle_product = partial(checks.test_no_product_is_made_that_nobody_asked_for, "torch")
no_upstream = partial(checks.test_no_upstream_gradient_gives_no_gradient, LEAVES)
bad_ids = partial(checks.test_an_id_outside_the_vocabulary_is_named_with_its_position, -1)

MUTANTS: list[tuple[ModuleType, str, str, Callable[[], None]]] = [
    # scale, temperature, cap
    (torch_rows, "z = tile * options.logit_scale", "z = tile * 1.0", torch_head),
    (torch_rows, "return z.div_(options.temperature)", "return z", torch_head),
    (torch_rows, ".tanh_().mul_(options.soft_cap)", ".tanh_()", torch_head),
    (torch_rows, "gradient *= cap_slope", "pass", torch_head),
    (torch_rows, "gradient *= options.logit_scale / ", "gradient *= options.logit_scale * ", torch_head),
    (torch_rows, "gradient *= options.logit_scale / ", "gradient *= 1 / ", torch_head),
    # signs, one-hot, axis
    (torch_rows, "gradient *= -logp_coefficients", "gradient *= logp_coefficients", without_entropy),
    (torch_rows, "factor.sub_(logp_coefficients", "factor.add_(logp_coefficients", torch_head),
    (torch_rows, "mul_(-entropy_coefficients", "mul_(entropy_coefficients", torch_head),
    (torch_rows, "entropies = -p.mul_(", "entropies = p.mul_(", torch_head),
    (torch_rows, "z.masked_fill_(p == 0, 0)", "z", impossible_entry),
    (torch_rows, "log_p.masked_fill_(gradient == 0, 0).add_", "log_p.add_", impossible_entry),
    (torch_rows, "gradient.scatter_add_(-1, targets[:, None], logp_coefficients[:, None])", "pass", torch_head),
    (torch_rows, "z.logsumexp(-1)", "z.logsumexp(0)", square_tile),
    # the same in Triton
    (triton_rows, "z = x * logit_scale", "z = x * 1.0", triton_head),
    (triton_rows, "return z * inv_temperature", "return z", triton_head),
    (triton_rows, "b_gradient *= 1 - b_tanh * b_tanh", "b_gradient *= 1.0", triton_head),
    (triton_rows, "b_gradient *= logit_scale * inv_temperature", "b_gradient *= inv_temperature", triton_head),
    (triton_rows, "b_gradient *= logit_scale * inv_temperature", "b_gradient *= logit_scale", triton_head),
    (triton_rows, "tl.where(o_v == target, 1.0, 0.0) - b_p", "0.0 - b_p", triton_head),
    (triton_rows, "b_gradient += c_logp", "b_gradient -= c_logp", triton_head),
    (triton_rows, "b_gradient -= c_entropy", "b_gradient += c_entropy", triton_head),
    (triton_rows, "log_normalizer - w / s", "log_normalizer + w / s", triton_head),
    (triton_rows, "tl.where(m_v, tl.exp(b_z - m_new), 0.0)", "tl.exp(b_z - m_new)", triton_head),
    (triton_rows, "s = s * rescale", "s = s * 1.0", two_blocks),
    (triton_rows, "w = w * rescale", "w = w * 1.0", two_blocks),
    # around the rows
    (tiles, "tile += self.head.bias.to(tile.dtype)", "pass", torch_head),
    (tiles, "hidden_product_(out, derivative, weight)", "pass", torch_head),
    (token_logprobs, "part[rows] * grad[index][:, None]", "part[rows] * 1.0", torch_frozen),
    (
        token_logprobs,
        "zip(parts, (grad_logps, grad_entropies), strict=True)",
        "zip(parts, (grad_entropies, grad_logps), strict=True)",
        torch_frozen,
    ),
    (
        token_logprobs,
        "g[index] for g in (grad_logps, grad_entropies)",
        "g[index] for g in (grad_entropies, grad_logps)",
        torch_head,
    ),
    (
        token_logprobs,
        "add_product_(grad, derivative.T, state)",
        "add_product_(grad, -derivative.T, state)",
        torch_head,
    ),
    (token_logprobs, "grad_bias += derivative", "grad_bias = derivative", torch_head),
    (token_logprobs, "completion_mask != 0", "completion_mask >= 0", torch_head),
    (
        token_logprobs,
        "kept[:count], kept[count:], strict",
        "kept[count:], kept[:count], strict",
        torch_frozen,
    ),
    (token_logprobs, "states = tuple(state.detach() for state in states)", "pass", no_idle_product),
    (token_logprobs, "list(ctx.needs_input_grad[-len(states) :])", "[True for _ in states]", no_idle_product),
    (
        token_logprobs,
        "zeros_like(t) if n else None for t, n in zip(states",
        "zeros_like(t) for t, n in zip(states",
        no_idle_product,
    ),
    (token_logprobs, "if grad_logps is None and grad_entropies is None:", "if False:", no_upstream),
    # tiles of the vocabulary
    (vocabulary_tiles, "sums.target_slope * sums.others / sums.total", "sums.target_slope", vocabulary_walk),
    (vocabulary_tiles, "[:, None] - o / sums.total", "[:, None] + o / sums.total", vocabulary_walk),
    (vocabulary_tiles, "[:, None] - o / sums.total[:, None]", "[:, None] - o", vocabulary_walk),
    (
        vocabulary_tiles,
        "of_target * self.head.vocabulary_scale[targets].to(of_target.dtype)",
        "of_target",
        vocabulary_walk,
    ),
    (vocabulary_tiles, "weights *= self.head.vocabulary_scale[columns].to(weights.dtype)", "pass", vocabulary_walk),
    (vocabulary_tiles, "tile += self.head.bias[columns].to(tile.dtype)", "pass", vocabulary_walk),
    (vocabulary_tiles, "targets - start", "targets", vocabulary_walk),
    (vocabulary_tiles, "factor[columns].to(self.dtype)", "factor[: tile.size(1)].to(self.dtype)", vocabulary_walk),
    (vocabulary_tiles, "if not (sums.total < _LARGEST_SUM).all():", "if False:", far_logit),
    (vocabulary_tiles, "if self.dtype == torch.float16", "if False", far_logit_in_half),
    (torch_rows, "held = (targets >= 0) & (targets < tile.size(1))", "held = targets >= 0", vocabulary_walk),
    (torch_rows, "e.scatter_(-1, place, e.gather(-1, place) * ~held[:, None])", "pass", vocabulary_walk),
    (torch_rows, "weights.copy_(e * slope)", "weights.copy_(e)", vocabulary_walk),
    (torch_rows, "torch.where(e > 0, e * difference, 0)", "(e * difference)", impossible_entry),
    (triton_rows, "b_weights *= 1 - b_tanh * b_tanh", "pass", vocabulary_walk_triton),
    (triton_rows, "b_e = tl.where(o_v == target, 0.0, b_e)", "pass", vocabulary_walk_triton),
    (triton_rows, "slope *= 1 - target_tanh * target_tanh", "pass", vocabulary_walk_triton),
    (triton_rows, "tl.store(p_target + i_row, tl.exp(z - reference))", "pass", vocabulary_walk_triton),
    (triton_rows, "tl.load(p_others + i_row) + s", "s", vocabulary_walk_triton),
    # an adapter on the head
    (tiles, "add_product_(tile, u, b.to(self.dtype).T)", "pass", adapted_head),
    (tiles, "tile *= self.head.vocabulary_scale.to(tile.dtype)", "pass", adapted_head),
    (tiles, "derivative *= self.head.vocabulary_scale.to(derivative.dtype)", "pass", adapted_head),
    (tiles, "self.unscaled[: targets.size(0)] = tile", "self.unscaled[: targets.size(0)] = 1", adapted_head),
    (
        token_logprobs,
        "if grad_bias is not None:\n                grad_bias += derivative",
        "tiles.scale_(derivative)\n            if grad_bias is not None:\n                grad_bias += derivative",
        adapted_head,
    ),
    (arguments, "(*self.weights, self.bias, self.vocabulary_scale)", "(*self.weights, self.bias)", scale_alone),
    (arguments, "(*self.weights, self.bias, self.vocabulary_scale)", "(self.weights[0],)", low_rank_alone),
    (arguments, "(completion_ids < 0) | ", "", bad_ids),
    (arguments, " and widest != torch.float64", "", checks.test_autocast_leaves_float64_alone),
]


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}-{n}" for n, (m, *_) in enumerate(MUTANTS)],
)
def test_each_mutant_is_caught(module: ModuleType, old: str, new: str, check: Callable[[], None], tmp_path: Path):
    torch.manual_seed(0)
    assert_caught(module, old, new, check, tmp_path)
