"""Memory of a training step, predicted from a model's config: by component, before anything is loaded."""

from grpo_lab.planning.shape import LoraSettings
from grpo_lab.planning.step import COMPONENTS, StepPlan, StepSettings, predict_step

__all__ = ["COMPONENTS", "LoraSettings", "StepPlan", "StepSettings", "predict_step"]
