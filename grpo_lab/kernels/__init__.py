"""Log-probs of tokens under an LM head, chunk by chunk, never holding the logits of all tokens."""

from grpo_lab.kernels.dispatch import resolve_implementation
from grpo_lab.kernels.token_logprobs import per_token_logps

__all__ = ["per_token_logps", "resolve_implementation"]
