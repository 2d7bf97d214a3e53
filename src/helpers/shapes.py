"""Shapes of decoders: what their sizes follow from, so that a model can be counted where neither it nor a hub is at hand.

The blocks are those of Llama, Qwen2 and Qwen3: attention with grouped keys and values, and a gated MLP. Norms and biases, a
thousandth of the weights, are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What a decoder's size follows from."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @cached_property
    def linear(self) -> int:
        """Weights of all linear layers but the head."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @cached_property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.linear + self.embeddings

    @property
    def read(self) -> int:
        """Weights that a token is multiplied by."""
        return self.linear + self.vocabulary * self.hidden

    @property
    def cache(self) -> int:
        """Numbers a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def kept(self) -> int:
        """Numbers a token for the backward pass."""
        attention = self.head_dim * (3 * self.heads + 4 * self.kv_heads)
        return self.layers * (8 * self.hidden + attention + 4 * self.intermediate)


SHAPES = {
    **{
        name: Shape(hidden, layers, 3 * hidden, 4, 2, hidden // 4, 70, True)
        for name, hidden, layers in (("xs", 64, 3), ("s", 128, 4), ("m", 256, 4), ("l", 384, 7))
    },
    "Qwen3-0.6B": Shape(1024, 28, 3072, 16, 8, 128, 151_936, True),
    "Qwen3-1.7B": Shape(2048, 28, 6144, 16, 8, 128, 151_936, True),
    "Qwen3-4B": Shape(2560, 36, 9728, 32, 8, 128, 151_936, True),
    "Qwen3-8B": Shape(4096, 36, 12_288, 32, 8, 128, 151_936, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": Shape(1536, 28, 8960, 12, 2, 128, 151_936, False),
    "SmolLM2-135M-Instruct": Shape(576, 30, 1536, 9, 3, 64, 49_152, True),
}


def of_config(config: Mapping[str, Any]) -> Shape | None:
    """The shape that a checkpoint's config.json says, or None where it is no such decoder."""
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        numbers = (
            hidden,
            config["num_hidden_layers"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    return Shape(*numbers, bool(config.get("tie_word_embeddings")))
