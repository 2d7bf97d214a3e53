"""One decoding step of a Hugging Face decoder on memory that stays in place: one new token a row, each row at a length of its own.

    for each layer    n = norm(h);  q, k, v = W_q n, W_k n, W_v n;  rotate, store;  h += W_o attention(q)
                      n = norm(h);  h += W_d (silu(W_g n) * W_u n)
    cache             keys and values (B, kv_heads, width, head_dim) a layer; row b writes at lengths[b], reads 0 .. lengths[b]

The model's linear layers are called as the modules that they are, so they may be plain, fake-quantized, packed or adapted; so is a
norm with a hook, such as those that simulate a low-bit cache. What stands between is `kernels.decode`. Prompts are read the same
way, all their tokens at once, padded on the right, where causal attention never sees the padding.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

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
    layers = (part for layer in model.model.layers for part in (layer, layer.self_attn, layer.mlp, layer.mlp.act_fn))
    skipped = [model.model, model.model.rotary_emb, *layers]  # the rotation is called, but once and for all positions
    # a `forward` of the model's own is no reason: TRL sets one, which does the same
    if needed_hooks(model) or any(hooked(module) for module in skipped):
        return "there are hooks on modules that a step does not call"
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether more than the module's own forward happens when it is called; hooks of an `optional` object may be left out."""
    return needed_hooks(module) or "forward" in vars(module)


def needed_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks that may not be left out."""
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return any(not getattr(getattr(hook, "__self__", None), "optional", False) for hook in hooks)


def norm(module: nn.Module, hidden: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
    """`module(hidden + change)`; the sum is kept in `hidden`."""
    if hasattr(module, "variance_epsilon") and not hooked(module):
        return decode.add_norm(hidden, change, module.weight, module.variance_epsilon)
    if change is not None:
        hidden += change
    return module(hidden)


def cached_bytes(model: PreTrainedModel, width: int) -> int:
    """Bytes of the keys and values of `width` tokens."""
    each = 2 * model.config.num_key_value_heads * model.model.layers[0].self_attn.head_dim
    return width * each * len(model.model.layers) * model.get_input_embeddings().weight.element_size()


class Decoder:
    """The cache of `rows` sequences of up to `width` tokens, and steps of the model that it was made for on it."""

    def __init__(self, model: PreTrainedModel, rows: int, width: int) -> None:
        config, like = model.config, model.get_input_embeddings().weight.new_empty(0)
        self.head_dim = model.model.layers[0].self_attn.head_dim
        shape = (2, rows, config.num_key_value_heads, width, self.head_dim)
        self.cache = [like.new_zeros(shape) for _ in model.model.layers]
        self.rows = torch.arange(rows, device=like.device)
        positions = torch.arange(width, device=like.device).unsqueeze(0)
        self.cos, self.sin = (table[0].contiguous() for table in model.model.rotary_emb(like, positions))

    def step(self, model: PreTrainedModel, token: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits `(B, V)` of what follows `token` `(B,)`, which goes into the cache at `lengths` `(B,)`, all below `longest`."""

        def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
            return decode.attend(query, keys[:, :, :longest], values[:, :, :longest], lengths, scale)

        return model.lm_head(self._forward(model, token, self.rows, lengths, attention, aside=True))

    def read(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> torch.Tensor:
        """Put the prompts into these rows of the cache; logits `(n, V)` of what follows each. Equal prompts are read once."""
        device, first = self.rows.device, {}
        for prompt, row in zip(map(tuple, prompts), rows, strict=True):
            first.setdefault(prompt, row)
        longest = max(map(len, first))
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in first], device=device)
        places = torch.tensor(list(first.values()), device=device)
        positions = torch.arange(longest, device=device).repeat(len(first))

        def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
            of_prompts = (
                query.unflatten(0, ids.shape).transpose(1, 2),
                *(x[places, :, :longest] for x in (keys, values)),
            )
            found = functional.scaled_dot_product_attention(*of_prompts, is_causal=True, scale=scale, enable_gqa=True)
            return found.transpose(1, 2).flatten(0, 1)

        hidden = self._forward(model, ids.flatten(), places.repeat_interleave(longest), positions, attention)
        last = torch.tensor([n * longest + len(prompt) - 1 for n, prompt in enumerate(first)], device=device)
        logits = model.lm_head(hidden[last])
        if len(first) < len(prompts):
            goals, sources = torch.tensor([rows, [first[tuple(prompt)] for prompt in prompts]], device=device)
            for kept in self.cache:
                kept[:, goals, :, :longest] = kept[:, sources, :, :longest]
            place = {prompt: n for n, prompt in enumerate(first)}
            logits = logits[torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)]
        return logits

    def _forward(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        attention: Callable[..., torch.Tensor],
        aside: bool = False,
    ) -> torch.Tensor:
        """The last hidden states `(n, width)` of tokens `ids` `(n,)`, whose keys and values go to these rows and positions."""
        hidden, change = model.get_input_embeddings()(ids), None
        for layer, (keys, values) in zip(model.model.layers, self.cache, strict=True):
            own, mlp = layer.self_attn, layer.mlp
            normed = norm(layer.input_layernorm, hidden, change)
            query, key, value = (
                x.unflatten(-1, (-1, self.head_dim))
                for x in together(normed, own.q_proj, own.k_proj, own.v_proj, aside=aside)
            )
            weights, eps = None, 0.0
            if hasattr(own, "q_norm"):
                if hooked(own.q_norm) or hooked(own.k_norm):
                    query, key = own.q_norm(query), own.k_norm(key)
                else:
                    weights, eps = (own.q_norm.weight, own.k_norm.weight), own.q_norm.variance_epsilon
            turned = decode.rotate_store(
                query, key, value, weights, eps, self.cos, self.sin, rows, positions, keys, values
            )
            change = own.o_proj(attention(turned, keys, values, own.scaling).flatten(1))
            normed = norm(layer.post_attention_layernorm, hidden, change)
            change = mlp.down_proj(decode.gate(*together(normed, mlp.gate_proj, mlp.up_proj, aside=aside)))
        return norm(model.model.norm, hidden, change)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep these rows of the cache alone."""
        self.cache = [kept[:, rows] for kept in self.cache]
        self.rows = self.rows[: len(rows)]


def together(x: torch.Tensor, *layers: nn.Module, aside: bool) -> list[torch.Tensor]:
    """Each layer's output for `x`; on a GPU, with `aside`, at once: in a captured step these are branches of the graph."""
    if not (aside and x.is_cuda):
        return [layer(x) for layer in layers]
    current, outputs = torch.cuda.current_stream(), []
    for layer, stream in zip(layers[1:], streams(), strict=False):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outputs.append(layer(x))
    outputs.insert(0, layers[0](x))
    for stream in streams()[: len(layers) - 1]:
        current.wait_stream(stream)
    return outputs


@cache
def streams() -> list[Any]:
    """Two streams beside the one that a step is captured on."""
    return [torch.cuda.Stream() for _ in range(2)]
