"""Each objective on the same two sequences of three tokens, worked by hand, a masked place among them."""

import math

import pytest
import torch

from grpo_lab.objectives import PolicyLossOptions, policy_loss

# Ratios 0.5, 1, 1.5 at A = 1 and 2, 0.75 at A = -1, in whose row a place is masked. Old log-probs are 0, so that
# log-probs are the logs of the ratios.
RATIOS = [[0.5, 1.0, 1.5], [2.0, 0.75, 9.0]]
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
# Row 1: -0.5, -1, -1.2 (1.5 clipped at 1.2). Row 2: 2 (no clip where A < 0), 0.8 (0.75 clipped at 0.8).
CLIPPED = (-0.5 - 1 - 1.2, 2 + 0.8)
# (0.5 x 1 x 1.5)^(1/3) = 0.9086 and (2 x 0.75)^(1/2) = 1.2247; where A < 0 the upper clip does not act.
BY_SEQUENCE = (-(0.75 ** (1 / 3)), 1.5**0.5)
SHARES = {"low_mean": 1 / 5, "high_mean": 1 / 5, "region_mean": 2 / 5, "low_min": 0, "high_max": 1 / 3}
NO_SHARES = dict.fromkeys(SHARES, 0.0)


def soft(temperature: float, ratio: float) -> float:
    return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


CASES = [
    ("grpo", "token", (CLIPPED[0] / 3 + CLIPPED[1] / 2) / 2, SHARES),
    ("grpo", "sequence", (BY_SEQUENCE[0] + BY_SEQUENCE[1]) / 2, NO_SHARES),
    ("bnpo", "token", (CLIPPED[0] + CLIPPED[1]) / 5, SHARES),
    ("dr_grpo", "token", (CLIPPED[0] + CLIPPED[1]) / (2 * 4), SHARES),
    ("dapo", "token", (CLIPPED[0] + CLIPPED[1]) / 10, SHARES),
    ("luspo", "token", (CLIPPED[0] + CLIPPED[1]) / 2, SHARES),
    ("luspo", "sequence", (3 * BY_SEQUENCE[0] + 2 * BY_SEQUENCE[1]) / 2, NO_SHARES),
    (
        "cispo",
        "token",
        (-(0.5 * math.log(0.5) + 1.2 * math.log(1.5)) + 1.2 * math.log(2) + 0.75 * math.log(0.75)) / 10,
        {},
    ),
    (
        "sapo",
        "token",
        (-(soft(1, 0.5) + soft(1, 1) + soft(1, 1.5)) / 3 + (soft(2, 2) + soft(2, 0.75)) / 2) / 2,
        {},
    ),
    (
        "vespo",  # W is 0.75 and 1.5
        "token",
        (-(0.75**2) * math.exp(3 * 0.25) * math.log(0.75) + 1.5**3 * math.exp(-2 * 0.5) * math.log(1.5)) / 10,
        {},
    ),
]


@pytest.mark.parametrize(("loss_type", "level", "expected", "shares"), CASES)
def test_worked_numbers(loss_type: str, level: str, expected: float, shares: dict[str, float]):
    options = PolicyLossOptions(
        loss_type,
        epsilon_high=1.2 if loss_type == "cispo" else 0.2,
        importance_sampling_level=level,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=2.0,
    )
    loss, metrics = policy_loss(
        torch.tensor(RATIOS, dtype=torch.float64).log(),
        torch.zeros(2, 3),
        torch.tensor([1.0, -1.0]),
        MASK,
        options,
        max_completion_length=4,
        num_items_in_batch=10,
    )
    assert loss.item() == pytest.approx(expected)
    assert {name: value for name, value in metrics.items() if name.startswith("clip_ratio/")} == pytest.approx(
        {f"clip_ratio/{name}": share for name, share in shares.items()}
    )


def test_worked_numbers_with_every_correction():
    # The sampler's ratio is 2 in row 1 and 1 in row 2. Row 2 drifted 0.6 on average and has A < 0: dropped.
    # Of the entropies 0.1, 0.2, 0.3, 0.4, 0.5 the upper half, from the median 0.3 on, keeps its policy term.
    entropies = torch.tensor([[0.1, 0.2, 0.5], [0.3, 0.4, math.inf]])
    logps = torch.tensor(RATIOS, dtype=torch.float64).log()
    options = PolicyLossOptions(
        "bnpo", beta=0.1, use_bias_correction_kl=False, top_entropy_quantile=0.5, entropy_coef=0.01,
        off_policy_mask_threshold=0.5,
    )  # fmt: skip
    loss, metrics = policy_loss(
        logps,
        torch.zeros(2, 3),
        torch.tensor([1.0, -1.0]),
        MASK,
        options,
        ref_per_token_logps=logps.masked_fill(MASK == 0, math.nan),
        entropies=entropies,
        sampling_per_token_logps=logps + torch.tensor([[0.0, 0, 0], [0.6, 0.6, math.nan]]),
        importance_sampling_ratio=torch.tensor([[2.0], [1.0]]),
    )
    # One term is left, -1.2, doubled; the KL to itself is 0; the bonus is 0.01 x (0.3 + 0.4 + 0.5) / 3.
    assert metrics["policy_loss"] == pytest.approx(-2 * 1.2 / 5)
    assert loss.item() == pytest.approx(-2 * 1.2 / 5 - 0.01 * 0.4)
    assert metrics["kl"] == pytest.approx(0)
    assert metrics["entropy"] == pytest.approx(1.5 / 5)
