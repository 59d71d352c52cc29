"""What holds for any rollouts: order, padding, masked places and the split of a batch change no result."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_lab.objectives import PolicyLossOptions
from tests.objectives.test_policy_loss import LEVELS, LOSS_TYPES, options_of, scored

BY_TOKEN = (
    "per_token_logps", "old_per_token_logps", "ref_per_token_logps", "entropies", "sampling_per_token_logps",
    "importance_sampling_ratio",
)  # fmt: skip
JUNK = (math.nan, math.inf, -math.inf, -100.0)


@st.composite
def objectives(draw: Any) -> PolicyLossOptions:
    """Any loss with any of the parts that act on tokens and sequences."""
    return options_of(
        draw(st.sampled_from(LOSS_TYPES)),
        importance_sampling_level=draw(st.sampled_from(LEVELS)),
        epsilon_high=0.28,
        delta=draw(st.sampled_from([None, 1.5])),
        beta=draw(st.sampled_from([0.0, 0.1])),
        use_bias_correction_kl=draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.1])),
        off_policy_mask_threshold=draw(st.sampled_from([None, 0.3])),
    )


def drawn(batch: int, length: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(batch, length, generator=random, dtype=torch.float64) for name in BY_TOKEN}
    tensors["importance_sampling_ratio"] = tensors["importance_sampling_ratio"].exp()
    tensors["completion_mask"] = (torch.rand(batch, length, generator=random) > 0.4).long()
    tensors["advantages"] = torch.randn(batch, generator=random, dtype=torch.float64)
    return tensors


@given(objectives(), st.integers(1, 5), st.integers(2, 6), st.integers(0, 10**6), st.sampled_from(JUNK))
def test_order_padding_and_what_masked_places_hold_change_nothing(
    options: PolicyLossOptions, batch: int, length: int, seed: int, junk: float
):
    tensors = drawn(batch, length, seed)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    other = {
        name: tensor[order] if tensor.dim() == 1 else torch.nn.functional.pad(tensor[order], (2, 1))
        for name, tensor in tensors.items()
    }
    masked = other["completion_mask"] == 0
    other |= {name: other[name].masked_fill(masked, junk) for name in BY_TOKEN}
    loss, grad, metrics = scored(tensors, options)
    other_loss, other_grad, other_metrics = scored(other, options)
    assert torch.allclose(other_loss, loss)
    assert torch.allclose(other_grad[:, 2:-1], grad[order])
    assert not other_grad[masked].any()
    assert other_metrics == pytest.approx(metrics)


@given(objectives(), st.integers(0, 10**6))
def test_four_micro_batches_of_two_equal_a_batch_of_eight(options: PolicyLossOptions, seed: int):
    tensors = drawn(8, 5, seed)
    if options.loss_type == "bnpo" or options.entropy_coef:
        # Means over the tokens of a micro-batch: equal to the batch's where each has as many tokens.
        tensors["completion_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).repeat(4, 1)
    loss, grad, _ = scored(tensors, options)
    parts = [
        scored({k: v[start : start + 2] for k, v in tensors.items()}, options, gradient_accumulation_steps=4)
        for start in range(0, 8, 2)
    ]
    assert torch.allclose(sum(part[0] for part in parts), loss)
    assert torch.allclose(torch.cat([part[1] for part in parts]), grad)
