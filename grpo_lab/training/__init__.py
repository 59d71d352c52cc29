"""Training: TRL's GRPO and RLOO trainers on the chunked head, and the run that owns its thread and folder.

The settings load without torch; the trainers and the run load on first use.
"""

from grpo_lab._lazy import lazy_names
from grpo_lab.training.config import RunConfig
from grpo_lab.training.errors import RunConfigError, RunFailedError

__all__ = [  # noqa: F822 - loaded on first use
    "ChunkedGRPOConfig",
    "ChunkedGRPOTrainer",
    "ChunkedRLOOConfig",
    "ChunkedRLOOTrainer",
    "Run",
    "RunConfig",
    "RunConfigError",
    "RunFailedError",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Run": "grpo_lab.training.run",
        "ChunkedGRPOConfig": "grpo_lab.training.trainer",
        "ChunkedGRPOTrainer": "grpo_lab.training.trainer",
        "ChunkedRLOOConfig": "grpo_lab.training.trainer",
        "ChunkedRLOOTrainer": "grpo_lab.training.trainer",
    },
)
