"""What happened in a run: its history, its memory, and Weights & Biases.

The history loads without torch; the rest loads on first use.
"""

from grpo_lab._lazy import lazy_names
from grpo_lab.monitoring.history import History

__all__ = ["History", "MemoryMeter", "MemoryRegion", "Tracker", "asked_mode", "open_tracker"]  # noqa: F822 - loaded on first use

__getattr__ = lazy_names(
    __name__,
    {
        "MemoryMeter": "grpo_lab.monitoring.memory",
        "MemoryRegion": "grpo_lab.monitoring.memory",
        "Tracker": "grpo_lab.monitoring.tracking",
        "asked_mode": "grpo_lab.monitoring.tracking",
        "open_tracker": "grpo_lab.monitoring.tracking",
    },
)
