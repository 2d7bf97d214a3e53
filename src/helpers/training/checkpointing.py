"""Activation checkpointing: a layer keeps its input alone for the backward pass, and is then computed again for all the rest.

A micro-batch keeps 1/L of what its L layers make, and L inputs; a step takes one forward pass more. Sampling is not
touched, as layers keep nothing outside training. Source: Chen et al., Training deep nets with sublinear memory cost (1604.06174).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from helpers.models import adapters

HOW = {"use_reentrant": False}  # the way that PyTorch recommends, which also works below frozen layers


@contextmanager
def checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """Checkpoint the layers of `model` as long as this is open, if it is `on`."""
    if not on:
        yield
        return
    base = adapters.base_of(model)
    # transformers, which is called by TRL at each step, would hook the embeddings each time for the sake of the other way; and
    # a model with hooks is not sampled by the engine
    base.enable_input_require_grads = lambda: None
    base.gradient_checkpointing_enable(HOW)
    try:
        yield
    finally:
        base.gradient_checkpointing_disable()
        base.__dict__.pop("enable_input_require_grads", None)
