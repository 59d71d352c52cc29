"""Models (shipped, a folder, a GGUF file, the Hub) and their adapters; transformers loads on first use."""

from grpo_lab.models.adapters import lora_config
from grpo_lab.models.loading import MODEL_PRESETS, load_model

__all__ = ["MODEL_PRESETS", "load_model", "lora_config"]
