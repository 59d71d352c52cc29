"""No backward pass for completions that cannot move the policy.

Every objective multiplies a completion's policy term by its advantage. Where the advantage is exactly 0 and the loss
has no other term (no KL, no entropy bonus, no router loss), the completion's gradient is 0 whatever its log-probs are:
it is scored without a graph, so its forward pass is not recomputed and its backward pass not taken. It still counts in
every normaliser and metric.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

# What TRL passes beside the tokens that belongs to no single row.
_SCORING_OPTIONS = ("batch_size", "compute_entropy", "compute_aux_loss")


def rows_with_coefficient(advantages: Tensor) -> Tensor:
    """Which sequences have a policy term, (B,) bool; the first one where none has, so that the loss keeps a graph.

    Args:
        advantages: (B,), or (B, T) by token.

    Returns:
        (B,) bool, at least one of them set.

    >>> rows_with_coefficient(torch.tensor([0.0, 1.0, 0.0, -1.0])).tolist()
    [False, True, False, True]
    >>> rows_with_coefficient(torch.zeros(3)).tolist()
    [True, False, False]
    """
    learns = (advantages != 0).view(advantages.size(0), -1).any(-1)
    if not learns.any():
        learns[0] = True
    return learns


class LearningRowsTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` that differentiates only completions with a policy term, where `args.skip_zero_advantage`.

    Loss, gradients and metrics are those of the whole batch. Where a loss has another term, where images or other
    fields come with the tokens, and with several processes, whose backward passes must meet, every row is
    differentiated.
    """

    _learns: Tensor | None = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._learns = rows_with_coefficient(inputs["advantages"]) if self._only_the_policy_term() else None
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._learns = None
        return loss

    def _only_the_policy_term(self) -> bool:
        other_terms = self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        return self.args.skip_zero_advantage and not other_terms and self.accelerator.num_processes == 1

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        learns, score = self._learns, super()._get_per_token_logps_and_entropies
        fields = [name for name, value in options.items() if value is not None and name not in _SCORING_OPTIONS]
        if learns is None or learns.all() or fields or not torch.is_grad_enabled():
            found: tuple[Tensor, Tensor | None, Tensor | None] = score(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
            return found
        logps = input_ids.new_zeros(input_ids.size(0), logits_to_keep, dtype=torch.float32)
        entropies = torch.zeros_like(logps)
        for rows, differentiated in ((~learns, False), (learns, True)):
            with torch.set_grad_enabled(differentiated):
                part, part_entropies, _ = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **options)
            # A copy, since the graph holds what it came from.
            logps = logps.index_put((rows,), part.to(logps.dtype))
            if part_entropies is not None:
                entropies = entropies.index_put((rows,), part_entropies.detach().to(logps.dtype))
        return logps, entropies if options.get("compute_entropy") else None, None
