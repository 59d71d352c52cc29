"""Images beside the tokens: the chunked head sees the hidden states that the model's own logits come from."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from grpo_lab.heads import check_head
from grpo_lab.training.chunked_head import HeadSettings, attach_chunked_head
from tests.heads.models import SIZES

IMAGE, START, END = 120, 121, 122
IDS = torch.tensor([[5, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 7, 8, 9, 10, 11]])
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}


def qwen() -> tuple[Any, dict[str, Tensor]]:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}
    config = Qwen2_5_VLConfig(
        text_config=SIZES | {"rope_scaling": rope},
        vision_config=VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "window_size": 28},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    images = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen2_5_VLForConditionalGeneration(config), images | {"mm_token_type_ids": (IDS == IMAGE).int()}


def gemma(**text: Any) -> tuple[Any, dict[str, Tensor]]:
    config = Gemma3Config(
        text_config=SIZES | {"head_dim": 16} | text,
        vision_config=VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    images = {"pixel_values": torch.randn(1, 3, 56, 56), "token_type_ids": (IDS == IMAGE).int()}
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # 0 in a new model
    return model, images


@pytest.mark.parametrize("make", [qwen, gemma])
def test_log_probs_are_those_of_the_models_own_logits(make: Any):
    torch.manual_seed(0)
    model, images = make()
    check_head(model.eval())
    call = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    own = model(**call, **images).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    attach_chunked_head(model, lambda: HeadSettings(temperature=1.0, chunk_size=3, implementation="torch"))
    labels = IDS.clone()
    labels[:, :8] = -100
    ours = model(**call, **images, labels=labels, fused_lm_head=True).log_probs
    assert torch.allclose(ours[:, 7:], own[:, 7:], atol=1e-5)
    assert not ours[:, :7].any()
    other = {**images, "pixel_values": torch.randn_like(images["pixel_values"])}
    assert (model(**call, **other, labels=labels, fused_lm_head=True).log_probs - ours).abs().max() > 1e-3


def test_a_soft_cap_in_the_config_that_the_model_does_not_apply_is_refused():
    torch.manual_seed(0)
    model, _ = gemma(final_logit_softcapping=5.0)
    with pytest.raises(ValueError, match="log-probs of Gemma3ForConditionalGeneration differ by"):
        check_head(model.eval())
