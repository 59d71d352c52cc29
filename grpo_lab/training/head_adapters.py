"""An adapter on the LM head, which TRL's trainers refuse and the chunked head applies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from grpo_lab.heads import base_model


@contextmanager
def adapters_on_the_head_allowed(model: Any) -> Iterator[None]:
    """Let TRL make a trainer for a model with an adapter on its LM head.

    TRL refuses one because its own fused head would ignore it. It asks the model for its output embeddings; within
    this context the answer is the layer below the adapter. `check_head` then refuses, by name, what the chunked head
    does not apply.

    Args:
        model: a causal LM, plain or inside PEFT. One given by name is made inside TRL, where TRL's refusal stands.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    base = base_model(model)
    output_embeddings = base.get_output_embeddings

    def below_the_adapter() -> Any:
        module = output_embeddings()
        return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module

    base.get_output_embeddings = below_the_adapter
    try:
        yield
    finally:
        del base.get_output_embeddings
