"""Models of real shapes with random weights: how long a product takes does not depend on what is multiplied."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from helpers import models
from helpers.shapes import Shape


def build(shape: Shape, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> PreTrainedModel:
    """A Qwen3 of this shape for inference, on the device that is used here; `settings` are any others of its configuration."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, **settings,
    )  # fmt: skip
    with models.device():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
