"""One decoding step of a Hugging Face decoder on memory that stays in place: one new token a row, each row at a length of its own.

    for each layer    n = norm(h);  q, k, v = W_q n, W_k n, W_v n;  rotate, store;  h += W_o attention(q)
                      n = norm(h);  h += W_d (silu(W_g n) * W_u n)
    cache             keys and values (B, kv_heads, width, head_dim) a layer; row b writes at lengths[b], reads 0 .. lengths[b]

The model's linear layers are called as the modules that they are, so they may be plain, fake-quantized, packed or adapted; so is a
norm with a hook, such as those that simulate a low-bit cache. What stands between is `kernels.decode`. A prompt is read by the
model's own forward, padded on the right, where the padding is never seen; equal prompts are read once.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from helpers.kernels import decode

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # rotations by the position alone, not by the text's length
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def obstacle(model: PreTrainedModel) -> str:
    """Why a step of this model cannot be taken here, for the end of a sentence; empty where it can."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return f"its architecture {config.model_type} is none of {', '.join(ARCHITECTURES)}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has sliding attention"
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope not in ROPES:
        return f"its rotation {rope} depends on the length of the text"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        return "it has LLM.int8 layers, which ask the host at each token"
    skipped = [model.model, *(part for layer in model.model.layers for part in (layer, layer.self_attn, layer.mlp))]
    if any(hooked(module) for module in skipped):
        return "there are hooks on modules that a step does not call"
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether more happens than the module's own forward when it is called."""
    return any(getattr(module, name) for name in HOOKS) or "forward" in vars(module)


def norm(module: nn.Module, hidden: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
    """`module(hidden + change)`; the sum is kept in `hidden`."""
    if hasattr(module, "variance_epsilon") and not hooked(module):
        return decode.add_norm(hidden, change, module.weight, module.variance_epsilon)
    if change is not None:
        hidden += change
    return module(hidden)


class Decoder:
    """The cache of `rows` sequences of up to `width` tokens, and steps of the model that it was made for on it."""

    def __init__(self, model: PreTrainedModel, rows: int, width: int) -> None:
        config, like = model.config, model.get_input_embeddings().weight.new_empty(0)
        self.head_dim = model.model.layers[0].self_attn.head_dim
        shape = (2, rows, config.num_key_value_heads, width, self.head_dim)
        self.cache = [like.new_zeros(shape).unbind() for _ in model.model.layers]
        positions = torch.arange(width, device=like.device).unsqueeze(0)
        self.cos, self.sin = (table[0].contiguous() for table in model.model.rotary_emb(like, positions))

    def step(self, model: PreTrainedModel, token: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits `(B, V)` of what follows `token` `(B,)`, which goes into the cache at `lengths` `(B,)`, all below `longest`."""
        hidden, change = model.get_input_embeddings()(token), None
        for layer, cache in zip(model.model.layers, self.cache, strict=True):
            normed = norm(layer.input_layernorm, hidden, change)
            keys, values = (kept[:, :, :longest] for kept in cache)
            change = self._attention(layer.self_attn, normed, lengths, keys, values)
            normed = norm(layer.post_attention_layernorm, hidden, change)
            change = layer.mlp.down_proj(decode.gate(layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed)))
        return model.lm_head(norm(model.model.norm, hidden, change))

    def _attention(
        self, own: nn.Module, normed: torch.Tensor, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_dim)) for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        weights, eps = None, 0.0
        if hasattr(own, "q_norm"):
            if hooked(own.q_norm) or hooked(own.k_norm):
                query, key = own.q_norm(query), own.k_norm(key)
            else:
                weights, eps = (own.q_norm.weight, own.k_norm.weight), own.q_norm.variance_epsilon
        turned = decode.rotate_store(query, key, value, weights, eps, self.cos, self.sin, lengths, keys, values)
        return own.o_proj(decode.attend(turned, keys, values, lengths, own.scaling).flatten(1))

    def read(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], rows: torch.Tensor) -> torch.Tensor:
        """Put the prompts into the cache's `rows` `(n,)`; logits `(n, V)` of what follows each."""
        place = {prompt: n for n, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        width = max(map(len, place))
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in place], device=rows.device)
        which = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=rows.device)
        cache = DynamicCache()
        named = "cache" if "cache" in inspect.signature(type(model.model).forward).parameters else "past_key_values"
        hidden = model.model(input_ids=padded, use_cache=True, **{named: cache})[0]
        for kept, read in zip(self.cache, cache.layers, strict=True):
            for goal, new in zip(kept, (read.keys, read.values), strict=True):
                goal[rows, :, :width] = new[which]
        last = torch.tensor([len(prompt) - 1 for prompt in place], device=rows.device)
        return model.lm_head(hidden[torch.arange(len(place), device=rows.device), last])[which]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep these rows of the cache alone."""
        self.cache = [tuple(kept[rows] for kept in layer) for layer in self.cache]
