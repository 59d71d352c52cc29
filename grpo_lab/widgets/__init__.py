"""What the notebooks show: the live view of a run, tables of answers, figures, and a field to try a reward in."""

from grpo_lab.widgets.answer_tester import AnswerTester, ScoredCases
from grpo_lab.widgets.dashboard import Dashboard
from grpo_lab.widgets.figures import METHOD_COLORS, Picture, one_panel
from grpo_lab.widgets.tables import compare_answers

__all__ = ["METHOD_COLORS", "AnswerTester", "Dashboard", "Picture", "ScoredCases", "compare_answers", "one_panel"]
