"""Calibration: what the layers of a model see when it reads text.

Texts go through the decoder one block at a time, so only one block's inputs are held. A block may be quantized before the texts
go on through it: the next block then sees what it will see in use, the outputs of the quantized ones before it. Inside a block it
is the same: each group of layers that read one tensor is quantized before the texts go on to the next group. Of a layer's inputs
x two sums are kept, over tokens and not over padding:

    H = mean of x x^T  (columns, columns)        m = mean of |x|  (columns,)

Texts are padded on the right; attention is causal, so no token ever sees padding. What a block is called with beside the hidden
states (a mask, the rotations of its positions) is noted while the model is called once with each batch, all its blocks but the
first handing on what they get: blocks may differ in it. Sources: GPTQ (2210.17323), AWQ (2306.00978).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
        """Take in inputs `(tokens, columns)`.

        Products of two 16-bit numbers are exact in float32, so a GPU's tensor cores may make them, and add them up in float32.
        """
        self.tokens += len(x)
        share = len(x) / self.tokens
        means = {"beta": 1 - share, "alpha": share / len(x)}
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            self.second = torch.addmm(self.second, x.T, x, out_dtype=torch.float32, **means)
        else:
            x = x.float()
            self.second.addmm_(x.T, x, **means)
        self.magnitude.lerp_(torch.linalg.vector_norm(x, 1, dim=0, dtype=torch.float32) / len(x), share)


class Stream:
    """Texts on their way through the decoder: the hidden states `(B, T, width)` before its next block, batch by batch."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
        """`texts`: token ids of each text.

        Errors: `SchemeError` where there is no text, or one is longer than the model's positions or holds an id it does not know.
        """
        refuse_bad_texts(model, texts)
        self.hidden: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor | slice] = []  # which of a batch's positions, in one row, are no padding
        # what else each block is called with, batch by batch: positions, their rotations, a mask; blocks may differ in it
        self.others: list[dict[nn.Module, dict[str, Any]]] = []
        # of the block being quantized, batch by batch: what those of its parts give that will not change any more
        self.kept: dict[int, dict[nn.Module, Any]] = {}
        ordered = sorted(texts, key=len)
        blocks = [block for _, block in decoder_blocks(model)]

        def note(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if block is blocks[0]:
                self.hidden.append(args[0] if args else kwargs["hidden_states"])
            self.others[-1][block] = {k: v for k, v in kwargs.items() if k != "hidden_states"}

        def pass_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            return (hidden_states,) if in_tuples else hidden_states

        def see(block: nn.Module, args: tuple, output: Any) -> None:
            nonlocal in_tuples
            in_tuples = isinstance(output, tuple)

        in_tuples = False
        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        hooks.append(blocks[0].register_forward_hook(see))
        try:
            with instead(dict.fromkeys(blocks[1:], pass_on)):
                for start in range(0, len(ordered), BATCH):
                    batch = [torch.as_tensor(list(ids)) for ids in ordered[start : start + BATCH]]
                    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
                    real = torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in batch])[:, None]
                    where = slice(None) if real.all() else real.flatten().nonzero()[:, 0].to(model.device)
                    self.tokens.append(where)
                    self.others.append({})
                    model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
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

        def collect(name: str, x: torch.Tensor, index: int) -> None:
            if id(x) not in read:
                moments = found.setdefault(name, Moments.zeros(x.shape[-1], x.device))
                moments.add(x.flatten(0, -2)[self.tokens[index]])
                read[id(x)] = moments, x
            found[name] = read[id(x)][0]

        for index in range(len(self.hidden)):
            with reading(layers, lambda name, x, index=index: collect(name, x, index)):
                output = self.call(block, index)
            read.clear()
            if onward:
                self.hidden[index] = output
        refuse_overflow(found)
        return found

    @torch.no_grad()
    def next_moments(self, block: nn.Module, layers: dict[str, nn.Module]) -> tuple[list[str], Moments]:
        """Those of `layers` that `block` uses first, all reading one tensor, and the moments of it.

        The texts go no further into the block than that, so what its parts (the attention, say) give before is as it will be when
        the block is done: it is kept until then.

        Errors: `SchemeError` where the block uses none of them.
        """
        names: list[str] = []
        found: dict[str, Moments] = {}

        def collect(name: str, x: torch.Tensor) -> None:
            if not read:
                moments = found.setdefault(name, Moments.zeros(x.shape[-1], x.device))
                moments.add(x.flatten(0, -2)[self.tokens[index]])
                read.append(x)
            elif x is not read[0]:
                raise FarEnough
            if index:  # only the first batch goes on to see who else reads this
                raise FarEnough
            names.append(name)

        def keep(part: nn.Module, args: tuple, output: Any) -> None:
            if not read:
                self.kept.setdefault(index, {})[part] = output

        parts = [part for part in block.children() if any(part.children())]  # a norm is as soon computed again
        hooks = [part.register_forward_hook(keep) for part in parts]
        try:
            for index in range(len(self.hidden)):
                read: list[torch.Tensor] = []
                with suppress(FarEnough), reading(layers, collect):
                    self.call(block, index)
        finally:
            for hook in hooks:
                hook.remove()
        if not names:
            refuse_unused(list(layers))
        refuse_overflow(found)
        return names, found[names[0]]

    @torch.no_grad()
    def go_through(self, block: nn.Module) -> None:
        """Let the texts go on through `block` as it is now."""
        for index in range(len(self.hidden)):
            self.hidden[index] = self.call(block, index)
            self.kept.pop(index, None)

    def call(self, block: nn.Module, index: int, copy: nn.Module | None = None) -> torch.Tensor:
        """The block's output `(B, T, width)` for one batch, or that of a float32 `copy` of it."""
        hidden, others = self.hidden[index], self.others[index][block]
        if copy is not None:
            hidden, others = in_float32(hidden), {k: in_float32(v) for k, v in others.items()}
        kept = self.kept.get(index, {})
        with instead({part: lambda *_, known=known, **__: known for part, known in kept.items()}):
            output = (copy or block)(hidden, **others)
        return output[0] if isinstance(output, tuple) else output


class FarEnough(Exception):
    """All that a block was called for has been seen."""


@contextmanager
def reading(layers: dict[str, nn.Module], action: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Whenever one of `layers` is about to compute, `action` gets its name and its input."""
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, name=name: action(name, args[0]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def instead(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules compute something else for a while."""
    before = {module: module.__dict__.get("forward") for module in forwards}  # mostly None: it is the class's method
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def in_float32(value: Any) -> Any:
    """Tensors of floating-point numbers, alone or in a tuple, as float32; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(in_float32, value))
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


def refuse_overflow(found: Mapping[str, Moments]) -> None:
    """Raise `SchemeError` where inputs were not finite; their squares, the diagonal of H, tell."""
    for name, moments in found.items():
        if not torch.isfinite(moments.second.diagonal()).all():
            raise SchemeError(
                f"the inputs of layer {name} are not finite on the calibration texts: the model overflows."
            )


def refuse_unused(names: Sequence[str]) -> None:
    raise SchemeError(
        f"the model never calls {', '.join(names)}, so no inputs tell how to round: take method = rtn, or leave them out."
    )


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
