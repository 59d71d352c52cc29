"""One description of a causal model's LM head: weight, bias, scale, soft-cap, and the adapters on it."""

from grpo_lab.heads.description import LMHead, base_model, read_head
from grpo_lab.heads.probe import check_head

__all__ = ["LMHead", "base_model", "check_head", "read_head"]
