"""The specification: one pure function a formula, in plain PyTorch, to read and to test against."""

from grpo_lab.objectives.token_logprobs import per_token_logps

__all__ = ["per_token_logps"]
