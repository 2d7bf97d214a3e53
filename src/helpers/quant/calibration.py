"""Calibration: what the layers of a model see when it reads text.

Texts go through the decoder one block at a time, so only one block's inputs are held. A block may be quantized before the texts
go on through it: the next block then sees what it will see in use, the outputs of the quantized ones before it. Of a layer's
inputs x two sums are kept, over tokens and not over padding:

    H = mean of x x^T  (columns, columns)        m = mean of |x|  (columns,)

Texts are padded on the right; attention is causal, so no token ever sees padding. What a block is called with beside the hidden
states (a mask, the rotations of its positions) is noted in one pass of the whole model, since blocks may differ in it. Sources:
GPTQ (2210.17323), AWQ (2306.00978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.quant.scheme import SchemeError

BATCH = 16  # texts
HELD_OUT = 5  # one text in five


@dataclass
class Moments:
    """Of the inputs of one layer: `second` H `(columns, columns)`, `magnitude` m `(columns,)`, over `tokens` tokens."""

    second: torch.Tensor
    magnitude: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, columns: int, device: torch.device) -> "Moments":
        """Those of no token yet."""
        return cls(torch.zeros(columns, columns, device=device), torch.zeros(columns, device=device))

    def add(self, x: torch.Tensor) -> None:
        """Take in inputs `(tokens, columns)`."""
        x = x.float()
        self.tokens += len(x)
        share = len(x) / self.tokens
        self.second += share * (x.T @ x / len(x) - self.second)
        self.magnitude += share * (x.abs().mean(0) - self.magnitude)


class Stream:
    """Texts on their way through the decoder: the hidden states `(B, T, width)` before its next block, batch by batch."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
        """`texts`: token ids of each text.

        Errors: `SchemeError` where there is no text, or one is longer than the model's positions or holds an id it does not know.
        """
        refuse_bad_texts(model, texts)
        self.hidden: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []  # (B, T), true on tokens
        # what else each block is called with, batch by batch: positions, their rotations, a mask; blocks may differ in it
        self.others: list[dict[nn.Module, dict[str, Any]]] = []
        ordered = sorted(texts, key=len)
        blocks = [block for _, block in decoder_blocks(model)]

        def note(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if block is blocks[0]:
                self.hidden.append(args[0] if args else kwargs["hidden_states"])
            self.others[-1][block] = {k: v for k, v in kwargs.items() if k != "hidden_states"}

        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        try:
            for start in range(0, len(ordered), BATCH):
                batch = [torch.as_tensor(list(ids)) for ids in ordered[start : start + BATCH]]
                ids = nn.utils.rnn.pad_sequence(batch, batch_first=True).to(model.device)
                lengths = torch.tensor([len(x) for x in batch], device=model.device)
                self.masks.append(torch.arange(ids.shape[1], device=model.device) < lengths[:, None])
                self.others.append({})
                model.get_decoder()(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def moments(self, block: nn.Module, layers: dict[str, nn.Module], onward: bool = False) -> dict[str, Moments]:
        """The moments of each of `layers` (parts of `block`), in order of use; with `onward` the texts also go through the block.

        Layers that read the same tensor (q, k and v) share one `Moments` object.
        """
        found: dict[str, Moments] = {}
        read: dict[int, tuple[Moments, torch.Tensor]] = {}  # by the tensor's id, which its being here keeps unique

        def collect(name: str, mask: torch.Tensor):
            def hook(module: nn.Module, args: tuple) -> None:
                x = args[0]
                if id(x) not in read:
                    moments = found.setdefault(name, Moments.zeros(x.shape[-1], x.device))
                    moments.add(x[mask])
                    read[id(x)] = moments, x
                found[name] = read[id(x)][0]

            return hook

        for index, mask in enumerate(self.masks):
            hooks = [layer.register_forward_pre_hook(collect(name, mask)) for name, layer in layers.items()]
            try:
                output = self.call(block, index)
            finally:
                for hook in hooks:
                    hook.remove()
            read.clear()
            if onward:
                self.hidden[index] = output
        for name, moments in found.items():
            if not torch.isfinite(moments.second).all():
                raise SchemeError(
                    f"the inputs of layer {name} are not finite on the calibration texts: the model overflows."
                )
        return found

    @torch.no_grad()
    def go_through(self, block: nn.Module) -> None:
        """Let the texts go on through `block` as it is now."""
        self.hidden = [self.call(block, index) for index in range(len(self.hidden))]

    def call(self, block: nn.Module, index: int, copy: nn.Module | None = None) -> torch.Tensor:
        """The block's output `(B, T, width)` for one batch, or that of a float32 `copy` of it."""
        hidden, others = self.hidden[index], self.others[index][block]
        if copy is not None:
            hidden, others = in_float32(hidden), {k: in_float32(v) for k, v in others.items()}
        output = (copy or block)(hidden, **others)
        return output[0] if isinstance(output, tuple) else output


def in_float32(value: Any) -> Any:
    """Tensors of floating-point numbers, alone or in a tuple, as float32; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(in_float32, value))
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


def decoder_blocks(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """(name, block) of each decoder block, in order.

    Errors: `SchemeError` for a model whose decoder has no `layers`.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise SchemeError(
            f"{type(model).__name__} has no list of decoder layers, so it cannot be calibrated layer by layer."
        )
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(block)], block) for block in layers]


def refuse_bad_texts(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
    """Raise `SchemeError` on the first text that the model cannot read."""
    if not texts or not all(len(ids) for ids in texts):
        raise SchemeError("calibration holds no text, or an empty one: give token ids of at least one text.")
    most, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    for index, ids in enumerate(texts):
        if len(ids) > most:
            raise SchemeError(f"calibration text {index} has {len(ids)} tokens, and the model has {most} positions.")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise SchemeError(f"calibration text {index} holds a token id outside 0..{vocabulary - 1}.")


def split(texts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """(texts to calibrate on, texts held out): every fifth is held out."""
    return [t for i, t in enumerate(texts) if (i + 1) % HELD_OUT], list(texts[HELD_OUT - 1 :: HELD_OUT])
