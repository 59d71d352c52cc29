"""Memory-efficient RL fine-tuning of language models, seen at every step.

Importing the package is light: torch, transformers and the widgets load on first use of a name that needs them.
"""

from grpo_lab._lazy import lazy_names

__version__ = "0.1.0"
__all__ = ["Dashboard", "Run", "RunConfig", "__version__", "load_model", "load_task"]  # noqa: F822 - loaded on first use

__getattr__ = lazy_names(
    __name__,
    {
        "Run": "grpo_lab.training.run",
        "RunConfig": "grpo_lab.training.config",
        "Dashboard": "grpo_lab.widgets",
        "load_model": "grpo_lab.models",
        "load_task": "grpo_lab.tasks",
    },
)
