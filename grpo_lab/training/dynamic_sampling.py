"""Groups without spread are drawn again: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

A group whose completions all earned the same has advantages of 0 and teaches nothing. So after sampling, such groups
give their places to groups of other prompts, until every group has spread or the rounds are used up.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer


@dataclass(frozen=True)
class _Draw:
    """Some rows of a generation batch, whole groups one after the other.

    Attributes:
        rows: the data set's row of each completion.
        completion_ids: tokens of each completion.
        logprobs: the sampler's log-probs of each completion, where it gives them.
        has_spread: one value a group, whether its completions differ in what they earned.
    """

    rows: list[dict[str, Any]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    has_spread: list[bool]

    def with_groups_of(self, other: "_Draw", places: list[int], size: int) -> "_Draw":
        """This draw with the groups at `places` taken from `other`, in its order."""
        rows, ids, spread = list(self.rows), list(self.completion_ids), list(self.has_spread)
        logprobs = None if self.logprobs is None else list(self.logprobs)
        for new, place in enumerate(places):
            to, start = slice(place * size, (place + 1) * size), new * size
            rows[to], ids[to] = other.rows[start : start + size], other.completion_ids[start : start + size]
            if logprobs is not None and other.logprobs is not None:
                logprobs[to] = other.logprobs[start : start + size]
            spread[place] = other.has_spread[new]
        return replace(self, rows=rows, completion_ids=ids, logprobs=logprobs, has_spread=spread)


def groups_with_spread(rewards: torch.Tensor, weights: torch.Tensor, size: int, *, summed: bool) -> list[bool]:
    """Whether the completions of each group differ in what they earned.

    Args:
        rewards: (B, F) float, value of each reward function; NaN where it gave none.
        weights: (F,) float.
        size: completions of a group; B is a multiple of it.
        summed: compare weighted sums; else each reward function with a weight for itself.

    Returns:
        B / size values.

    >>> earned = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    >>> [groups_with_spread(earned, torch.ones(2), 2, summed=summed) for summed in (True, False)]
    [[False, False], [True, False]]
    """
    unscored = rewards.isnan().all(-1, keepdim=True)
    values = rewards[:, weights != 0]
    if summed:
        values = (rewards * weights).nansum(-1, keepdim=True).masked_fill(unscored, float("nan"))
    groups = values.reshape(-1, size, values.size(-1))
    highest = groups.nan_to_num(nan=-torch.inf).amax(1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(1)
    found: list[bool] = (highest > lowest).any(-1).tolist()
    return found


class DynamicSamplingTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with dynamic sampling where `args.dynamic_sampling_rounds` > 0.

    Candidates are sampled and rewarded first; TRL then scores the batch that was kept as if it had sampled it at once.
    So every metric, logged completion and token count is of the kept batch, the normaliser counts its tokens, and
    reward functions are called once more on it. What was thrown away shows in two metrics: `sampling/redraw_rounds`
    and `sampling/redrawn_groups`. Groups that still have no spread after the last round are kept, and
    `frac_reward_zero_std` counts them.

    New prompts come at random from the training set, beside the epoch's order, which they leave as it is. They depend
    on `seed` and the optimizer step only, so a run resumed from a checkpoint draws what the unbroken run drew.

    Raises:
        ValueError: dynamic sampling is on together with what it does not go with, which the message names.
    """

    _drawn: tuple[list[list[int]], list[list[float]] | None] | None = None
    _redraws: tuple[int, Iterator[int]] | None = None
    _metrics: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse_unsupported_sampling()

    def _refuse_unsupported_sampling(self) -> None:
        if not self.args.dynamic_sampling_rounds:
            return
        reasons = {
            "several processes": self.accelerator.num_processes > 1,
            "rollout_func": self.rollout_func is not None,
            "tools": bool(self.tools),
            "environment_factory": self.environment_factories is not None,
            "images": self._is_vlm,
            "a streamed train_dataset": not isinstance(self.train_dataset, Dataset),
        }
        found = [name for name, present in reasons.items() if present]
        if found:
            raise ValueError(
                f"dynamic_sampling_rounds does not go with {', '.join(found)}; got "
                f"{self.args.dynamic_sampling_rounds}. Set dynamic_sampling_rounds=0."
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not (self.args.dynamic_sampling_rounds and self.model.training):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return output
        size, rounds, redrawn = self.num_generations, 0, 0
        with self._nothing_recorded():
            kept = self._draw(inputs)
            prompts = self._new_prompts()
            while rounds < self.args.dynamic_sampling_rounds and not all(kept.has_spread):
                places = [place for place, spread in enumerate(kept.has_spread) if not spread]
                rows = [self.train_dataset[next(prompts)] for _ in places]
                kept = kept.with_groups_of(self._draw([row for row in rows for _ in range(size)]), places, size)
                rounds, redrawn = rounds + 1, redrawn + len(places)
        self._drawn = kept.completion_ids, kept.logprobs
        output = super()._generate_and_score_completions(kept.rows)
        self._metrics["train"]["sampling/redraw_rounds"].append(float(rounds))
        self._metrics["train"]["sampling/redrawn_groups"].append(float(redrawn))
        return output

    def _draw(self, rows: list[dict[str, Any]]) -> _Draw:
        prompts = [row["prompt"] for row in rows]
        _, completion_ids, _, completions, logprobs, *_ = self._generate(prompts)
        rewards = self._calculate_rewards(rows, prompts, completions, completion_ids)
        spread = groups_with_spread(
            rewards,
            self.reward_weights.to(rewards.device),
            self.num_generations,
            summed=self.multi_objective_aggregation == "sum_then_normalize",
        )
        return _Draw(rows, completion_ids, logprobs, spread)

    def _new_prompts(self) -> Iterator[int]:
        """Endless row numbers of the training set, each pass over it in an order of its own."""
        if self._redraws is None or self._redraws[0] != self.state.global_step:
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
            self._redraws = self.state.global_step, _shuffled(len(self.train_dataset), generator)
        return self._redraws[1]

    @contextmanager
    def _nothing_recorded(self) -> Iterator[None]:
        """Keep metrics, token counts and reward logs of what is drawn in here out of the run's record."""
        metrics, tokens = self._metrics, self.state.num_input_tokens_seen
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            yield
        finally:
            self._metrics, self.state.num_input_tokens_seen = metrics, tokens
            self._pending_extra_logs.clear()
            self._pending_metrics.clear()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._drawn is None:
            return super()._generate_single_turn(*args, **kwargs)
        drawn, self._drawn = self._drawn, None
        return drawn


def _shuffled(length: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(length, generator=generator).tolist()
