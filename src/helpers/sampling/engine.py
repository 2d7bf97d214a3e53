"""Rollouts with everything of a decoding step on the device, so that on a GPU the step is one CUDA graph.

The stock `generate` starts each of a token's several hundred kernels from Python, which takes a small model longer than to compute
them. Here all that a step reads and writes has its place and shape for good: the keys and values of every layer, an attention mask
over their whole length, the last token, its position, which replies have ended, the tokens so far and their log-probabilities.

    step:  token (B, 1) -> logits (B, V) -> z = logits / T -> log p = log_softmax(z) -> token = argmax(log p' - log E),  E ~ Exp(1)

argmax(log p' - log E) is a draw from p', which is p or, with `top_p`, p on its nucleus; temperature 0 takes the argmax of the
logits. The log-probability noted is log p, before `top_p`. A captured step is replayed, one launch a token; the host asks only
every `CHECK` tokens whether all replies have ended. Where a step cannot be captured it runs as it is, as it does on the CPU.
Source of the draw: the Gumbel-max trick (Gumbel, 1954; Maddison et al., 1411.0030).
"""

import inspect
import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache

from helpers.errors import UserError
from helpers.models import adapters

BACKENDS = ("graph", "hf")
SWITCH = "LOWBIT_SAMPLER"  # environment variable that names the back end where `auto` is asked for
CHECK = 8  # tokens between two looks at whether all replies have ended
MULTIPLE = 8  # of the mask's width, for which attention kernels need no padded copy
Drawn = tuple[list[int], list[float]]  # a reply's tokens, end mark included, and their log-probabilities


def backend_of(model: nn.Module, asked: str = "auto") -> str:
    """The back end to sample with: as `asked`, else as the environment says, else `graph` on a GPU and `hf` on the CPU.

    Errors: `UserError` for an unknown name, and for `graph` asked for a model whose attention cannot have a fixed shape.
    """
    base = adapters.base_of(model)
    named = os.environ.get(SWITCH, "auto") if asked == "auto" else asked
    if named not in (*BACKENDS, "auto"):
        raise UserError(f"the sampler {named!r} is unknown: choose one of auto, {', '.join(BACKENDS)}.")
    kind = base.config._attn_implementation
    sliding = "sliding_attention" in (getattr(base.config, "layer_types", None) or ())
    on_host = getattr(
        base, "is_loaded_in_8bit", False
    )  # LLM.int8 asks the host for its outliers, which no graph can hold
    fixed = kind in ("sdpa", "eager") and not sliding and not on_host
    if asked == "graph" and not fixed:
        raise UserError(
            f"backend = 'graph' needs full attention by sdpa or eager, and no LLM.int8: this model has {kind}, use 'hf'."
        )
    return ("graph" if base.device.type == "cuda" else "hf") if named == "auto" else named if fixed else "hf"


class FixedCache(Cache):
    """Keys and values of `width` tokens a layer. A prompt's go to the front; a later token's to `column`, a `(1,)` tensor."""

    def __init__(self, width: int, column: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.width, self.column = width, column
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # (B, heads, width, head_dim), keys and values
        self.prefill = True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens at hand, `(B, heads, T, head_dim)`, attend to: the prompt to itself, a token to all `width`."""
        if layer == len(self.kept):
            shapes = ((*new.shape[:2], self.width, new.shape[3]) for new in (keys, values))
            self.kept.append(tuple(keys.new_zeros(shape) for shape in shapes))
        for kept, new in zip(self.kept[layer], (keys, values), strict=True):
            if self.prefill:
                kept[:, :, : new.shape[2]] = new
            else:
                kept.index_copy_(2, self.column, new)
        return (keys, values) if self.prefill else self.kept[layer]


class Engine:
    """Replies to up to `rows` prompts at a time, each of at most `longest` tokens; `max_new_tokens` a reply."""

    last: ClassVar[Any] = None  # the graph captured last: it keeps the memory that all graphs use in turn

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        longest: int,
        max_new_tokens: int,
        ends: Sequence[int],
        pad: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        self.model = adapters.base_of(model)
        self.temperature, self.top_p, self.pad = temperature, top_p, pad
        self.max_new_tokens = max_new_tokens
        device, self.dtype = self.model.device, self.model.get_input_embeddings().weight.dtype
        width = -(-(longest + max_new_tokens) // MULTIPLE) * MULTIPLE
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.token = torch.full((rows, 1), pad, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, 1, 1, width, dtype=self.dtype, device=device)  # 0, or the lowest number: not seen
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.column, self.count = torch.zeros(2, 1, dtype=torch.long, device=device)
        self.tokens = torch.full((rows, max_new_tokens), pad, device=device)
        self.logprobs = torch.zeros(rows, max_new_tokens, device=device)
        self.cache = FixedCache(width, self.column)
        self.cache_name = (
            "cache" if "cache" in inspect.signature(type(self.model).forward).parameters else "past_key_values"
        )
        self.graph: Any = None
        self.capturable = device.type == "cuda"

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Drawn]:
        """One reply a prompt, in order. The draws come from the device's default random generator."""
        self._read(prompts)
        for n in range(1, self.max_new_tokens):
            if n % CHECK == 0 and self.ended.all():
                break
            if self.graph is not None:
                self.graph.replay()
            elif self.capturable:
                self._step_and_capture()
            else:
                self._step()
        ends = set(self.ends.tolist())
        drawn = []
        for ids, logs in zip(self.tokens[: len(prompts)].tolist(), self.logprobs.tolist(), strict=False):
            length = next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))
            drawn.append((ids[:length], logs[:length]))
        return drawn

    def _read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts, padded on the left, and draw the first tokens. Rows without a prompt have ended."""
        device, rows = self.token.device, len(self.token)
        self.ended.copy_(torch.arange(rows, device=device) >= len(prompts))
        prompts = [*prompts, *[prompts[0]] * (rows - len(prompts))]
        longest = max(map(len, prompts))
        padded = torch.tensor([[self.pad] * (longest - len(ids)) + list(ids) for ids in prompts]).to(device)
        lengths = torch.tensor([len(ids) for ids in prompts]).to(device)
        columns = torch.arange(longest, device=device)
        held = columns >= longest - lengths.unsqueeze(1)  # (B, P)
        seen = (columns <= columns.unsqueeze(1)) & held[:, None, None, :]  # (B, 1, P, P)
        lowest = torch.finfo(self.dtype).min
        self.mask.fill_(lowest)
        self.mask[..., :longest].masked_fill_(held[:, None, None, :], 0.0)
        self.position.copy_(lengths.unsqueeze(1) - 1)
        self.column.fill_(longest - 1)
        self.count.zero_()
        self.tokens.fill_(self.pad)
        self.cache.prefill = True
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(~seen, lowest)
        self._draw(self._logits(padded, (held.cumsum(1) - 1).clamp(min=0), mask))
        self.cache.prefill = False

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`(B, V)` float32, of the token after `ids`."""
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        return output.logits[:, -1].float()

    def _step(self) -> None:
        """Read the last token and draw the next: nothing but work on the device, always in the same places."""
        self.column += 1
        self.position += 1
        self.mask.index_fill_(3, self.column, 0.0)
        self._draw(self._logits(self.token, self.position, self.mask))

    def _draw(self, logits: torch.Tensor) -> None:
        logs = (logits / (self.temperature or 1.0)).log_softmax(-1)
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            noise = torch.empty_like(logs).exponential_().log_()
            token = (nucleus(logs, self.top_p) - noise).argmax(-1, keepdim=True)
        token = token.masked_fill(self.ended.unsqueeze(1), self.pad)
        self.tokens.index_copy_(1, self.count, token)
        self.logprobs.index_copy_(1, self.count, logs.gather(1, token))
        self.ended |= (token == self.ends).any(-1)
        self.token.copy_(token)
        self.count += 1

    def _step_and_capture(self) -> None:
        """Make one step as it is, which loads and tunes its kernels, and capture the next, which the capture does not run."""
        stream, current = side_stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._step()
            graph = torch.cuda.CUDAGraph()
            pool = () if Engine.last is None else (Engine.last.pool(),)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            spare = generator.clone_state()  # a capture that fails leaves the generator unusable
            try:
                # the bare calls: the context manager torch.cuda.graph would also empty the allocator's cache each time
                graph.capture_begin(*pool, capture_error_mode="thread_local")
                try:
                    self._step()
                finally:
                    graph.capture_end()
                self.graph = Engine.last = graph
            except Exception as error:
                self.capturable = False
                generator.graphsafe_set_state(spare)
                reason = (str(error).splitlines() or [""])[0]
                warnings.warn(f"no CUDA graph of a decoding step: {type(error).__name__}: {reason}", stacklevel=2)
        current.wait_stream(stream)


@cache
def side_stream() -> Any:
    """The stream to capture on; one for good, since libraries keep a workspace for each."""
    return torch.cuda.Stream()


def nucleus(logs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probabilities `(B, V)` with -inf outside the smallest set of likeliest tokens that holds `top_p` of the probability."""
    if top_p >= 1:
        return logs
    ordered, order = logs.sort(-1)
    outside = ordered.exp().cumsum(-1) <= 1 - top_p
    outside[..., -1:].fill_(False)  # the likeliest stays
    return logs.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
