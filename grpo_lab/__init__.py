"""Memory-efficient RL fine-tuning of language models, seen at every step.

Importing the package is light: torch, transformers and the widgets load on first use of a name that needs them.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Run": "grpo_lab.training.run",
    "RunConfig": "grpo_lab.training.config",
    "Dashboard": "grpo_lab.widgets",
    "load_model": "grpo_lab.models",
    "load_task": "grpo_lab.tasks",
}
__all__ = ["Dashboard", "Run", "RunConfig", "__version__", "load_model", "load_task"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_lab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
