"""All fake-quantized weights of a model at once, at the start of each forward pass.

A layer that is called alone computes its own W' (see `fake`). In a model that makes some hundred kernel launches and autograd nodes
in Python, while a training step on a GPU waits for Python anyway: they cost more time than the reading and writing of the weights.
Weights stand still during a forward pass, so hooks of the decoder compute every W' before it, into the place that each layer keeps
for it, and let go of them behind it. From the second pass on the launches are one CUDA graph; one autograd node hands all gradients
on, straight through where they are neither masked nor asked for by scales. As with any layer, weights must not change between a
forward pass and its backward pass: autograd says so. Where blocks are computed again in the backward pass (checkpointing), when the
decoder's hooks have long run, each layer computes its own W'.
"""

from typing import Any

import torch
from torch import nn

from helpers.kernels import backend
from helpers.kernels.fake_quant import slopes


class Together:
    """The hooks of a `decoder` for its fake-quantized `layers`; a layer that is already `held` or not quantized stays as it is."""

    optional = True  # whoever calls the layers one by one may leave these hooks out

    def __init__(self, decoder: nn.Module, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.held: list[nn.Module] = []  # in the pass that is under way
        self.given: tuple[torch.Tensor, ...] = ()  # W' of each
        self.places: list[int] = []  # addresses that the last pass read and wrote
        self.graph: torch.cuda.CUDAGraph | None = None  # the kernels of a pass over these addresses
        self.scales: list[torch.Tensor] = []
        self.hooks = [
            decoder.register_forward_pre_hook(self.before),
            decoder.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before(self, decoder: nn.Module, args: Any) -> None:
        self.after(decoder, args, None)  # a pass that Ctrl-C broke off: torch calls no hook behind it
        if decoder.training and any(getattr(block, "gradient_checkpointing", False) for block in decoder.layers):
            return
        self.held = [layer for layer in self.layers if layer.held is None and layer.where == "everywhere"]
        if self.held:
            self.fill()
            inputs = [*(layer.weight for layer in self.held), *(layer.log_scale for layer in self.held)]
            self.given = PassOn.apply(self.held, self.scales, *inputs)
            for layer, weight in zip(self.held, self.given, strict=True):
                layer.held = weight

    def after(self, decoder: nn.Module, args: Any, output: Any) -> None:
        for layer, weight in zip(self.held, self.given, strict=False):  # none is given where `fill` failed
            if layer.held is weight:  # and not what a rollout holds since
                layer.held = None
        self.held, self.given = [], ()

    def fill(self) -> None:
        """Compute each W' and its scales; by the graph, if all is where it was in the pass before."""
        capturable = backend.usable(*(layer.weight for layer in self.held)) and all(x.capturable for x in self.held)
        if capturable and self.places == self.addresses():
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.scales = [layer.fill() for layer in self.held]
            self.graph.replay()
        else:
            self.graph, self.scales = None, [layer.fill() for layer in self.held]
            self.places = self.addresses()

    def addresses(self) -> list[int]:
        tensors = ((x.weight, x.scale, x.zero, x.log_scale, x.place) for x in self.held)
        return [0 if t is None else t.data_ptr() for each in tensors for t in each]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model gets: a graph is of one model."""
        return self.__dict__ | {"graph": None, "places": [], "held": [], "given": ()}


class PassOn(torch.autograd.Function):
    """The layers' W', already in their places, as functions of their weights and of their `log_scale` (None: not learned)."""

    @staticmethod
    def forward(ctx: Any, layers: list[nn.Module], scales: list[torch.Tensor], *inputs: torch.Tensor | None) -> Any:
        ctx.layers, ctx.scales = layers, scales
        ctx.save_for_backward(*inputs)  # the places are filled again at each pass: this notes which weights they are of
        ctx.set_materialize_grads(False)
        return tuple(layer.place.data for layer in layers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        of_weights, of_logs = [], []
        weights = ctx.saved_tensors[: len(ctx.layers)]  # an error, if one has changed
        for layer, weight, scale, gradient in zip(ctx.layers, weights, ctx.scales, gradients, strict=True):
            of_weight, of_scale, learned = gradient, None, layer.log_scale is not None
            if gradient is not None and (layer.masked or learned):
                grid = weight, scale, layer.zero, layer.low, layer.high
                of_weight, of_scale = slopes(gradient, *grid, layer.masked, learned)
            of_weights.append(of_weight)
            of_logs.append(None if of_scale is None else of_scale.mul_(scale))
        return None, None, *of_weights, *of_logs
