"""What the notebooks show: the live view of a run and tables of answers."""

from grpo_lab.widgets.dashboard import Dashboard
from grpo_lab.widgets.tables import compare_answers

__all__ = ["Dashboard", "compare_answers"]
