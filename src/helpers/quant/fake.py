"""Fake quantization: layers that compute with the weights of a low-bit grid and train the full-precision ones behind it.

A layer keeps its latent weight W and computes with what W's codes stand for, W' = s (q - z). Rounding has no slope, so the gradient
is taken straight through it (STE), with the scale and the zero point as constants; how, and its mask, says `kernels.fake_quant`.
The mask takes the gradient from weights that left the grid's range: they would go on moving and W' would not. Grids are found once
(`fixed`), again from W at each forward (`step`), or their scales are trained along with the weights (`learned`, LSQ), zero points
staying as they are:

    s = s_0 exp(u)          dL/du = s dL/ds

LSQ trains s itself, with its gradient scaled down, and masks W's; here it is u, which keeps a scale positive and makes an
optimizer's step a relative one, so weights and scales can share a learning rate, and the mask is `masked`. Sources: Bengio et
al. (1308.3432); mask: Hubara et al. (1609.07061); LSQ: Esser et al. (1902.08153). Grids, codes and W' are those of `grid`,
scales rounded to float16, so a packed layer of the same codes computes the same, bit for bit.

While replies are sampled weights stand still: `materialized` computes each W' once for all the tokens of a rollout, always in the
same place, so that a CUDA graph that was captured in one rollout reads the weights of the next. In training, `together` does the
same for each forward pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.kernels import LowBitLinear, backend
from helpers.kernels.fake_quant import fake_quantize, fill
from helpers.models import adapters, lowbit
from helpers.quant.fit import layers_to_quantize, scheme_of_each
from helpers.quant.grid import Quantized, encode, find_grids
from helpers.quant.layers import is_low_bit, weight_of
from helpers.quant.scheme import Scheme, SchemeError
from helpers.quant.together import Together

GRIDS = ("fixed", "step", "learned")
WHERE = ("nowhere", "rollouts", "everywhere")  # which forwards are quantized; `rollouts`: those inside `materialized`


class FakeQuantLinear(nn.Linear):
    """A linear layer that shares `linear`'s parameters and computes with their fake-quantized weight where `where` says so."""

    def __init__(self, linear: nn.Linear, scheme: Scheme, grids: str = "fixed", masked: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme, self.grids, self.masked, self.where = scheme, grids, masked, "everywhere"
        self.low, self.high = int(scheme.symmetric), 2**scheme.bits - 1  # a symmetric grid's lowest code stays unused
        self.held: torch.Tensor | None = None  # W' while it is known
        self.place: torch.Tensor | None = None  # where it is then, each time
        self.capturable = grids != "step" or scheme.granularity != "tensor"  # no kernel finds a whole matrix's grid
        scale, zero = find_grids(self.weight, scheme)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("zero", zero, persistent=False)
        self.log_scale = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32)) if grids == "learned" else None

    def _apply(self, fn, recurse=True):
        """Move between devices, but never let `.to(bfloat16)` or `.half()` round a grid: other codes would come of it."""
        log = self.log_scale
        grids = [self.scale, self.zero, *(() if log is None else (log, log.grad))]

        def move(t: torch.Tensor) -> torch.Tensor:
            moved = fn(t)
            kept = moved.dtype != t.dtype and any(t is each for each in grids)
            return t.to(moved.device) if kept else moved

        return super()._apply(move, recurse)

    def find(self) -> None:
        """Find the grids again, from the weights as they are now; what was learned of the old ones is forgotten."""
        self.scale, self.zero = find_grids(self.weight, self.scheme)
        if self.log_scale is not None:
            self.log_scale.data.zero_()

    def scales(self) -> torch.Tensor:
        """The scales `(rows or 1, G)` as they are now, rounded to float16."""
        return self.trained_scales().detach().half()

    def trained_scales(self) -> torch.Tensor:
        """The scales before they are rounded; with a gradient if they are learned."""
        return self.scale if self.log_scale is None else self.scale * self.log_scale.exp()

    def quantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W' `(rows, columns)`, through which gradients reach W."""
        if self.grids == "step":
            self.follow()
        return fake_quantize(self.weight, self.trained_scales(), self.zero, self.low, self.high, self.masked, dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow(self) -> None:
        """`find` for each step: a kernel where it can, which does not stop to say that a weight is not finite (the loss will)."""
        if backend.usable(self.weight, self.scale) and self.capturable:
            from helpers.kernels.fused import fake_quant

            fake_quant.find(self.weight, self.scale, self.zero, self.scheme.bits, self.scheme.symmetric)
        else:
            self.find()

    @torch.inference_mode(False)  # what is first computed for a reply may be trained with later
    @torch.no_grad()
    def fill(self) -> torch.Tensor:
        """Compute W' into `place`, in the type of W; gives the scales, not yet rounded."""
        if self.place is None or (self.place.device, self.place.dtype) != (self.weight.device, self.weight.dtype):
            self.place = torch.empty_like(self.weight)
        if self.grids == "step":
            self.follow()
        scale = self.trained_scales()
        fill(self.place.data, self.weight, scale, self.zero, self.low, self.high)
        return scale

    @torch.no_grad()
    def quantized(self) -> Quantized:
        """The codes and grids that the layer computes with."""
        if self.grids == "step":
            self.follow()
        scale = self.scales()
        weight = self.weight.float().unflatten(1, (scale.shape[1], -1))
        codes = encode(weight, scale.unsqueeze(-1), self.zero.unsqueeze(-1), self.scheme)
        return Quantized(codes.flatten(1).to(torch.uint8), scale, self.zero, self.scheme)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.held is None else self.held
        if self.held is None and self.where == "everywhere":
            weight = self.quantized_weight(x.dtype)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme}, grids={self.grids}, masked={self.masked}, where={self.where}"


def layers(model: nn.Module) -> dict[str, FakeQuantLinear]:
    """The fake-quantized layers of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantLinear)}


def insert(
    model: PreTrainedModel,
    scheme: Scheme | Mapping[str, Scheme],
    grids: str = "fixed",
    masked: bool = False,
    latents: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Make linear layers fake-quantized, in place: those of `scheme.targets`, or each named one by the scheme given for it.

    A packed layer on a grid of the same scheme keeps this grid (unless `grids` is `step`), so training starts from its very codes.
    `latents` are weights `(rows, columns)`, by layer, that such a layer's codes were rounded from: training goes on from them, and
    without them from the grid's points.

    Errors: `SchemeError` for an unknown `grids`, for a scheme without a uniform grid, for latent weights that are not those of the
    layer's codes, and for all that speaks against quantizing the model (see `fit`); the model is then unchanged.
    """
    if grids not in GRIDS:
        raise SchemeError(f"grids = {grids!r} is unknown: choose one of {', '.join(GRIDS)}.")
    for each in scheme.values() if isinstance(scheme, Mapping) else (scheme,):
        if each.numbers != "uniform":
            raise SchemeError(f"scheme = {each} cannot be trained through: fake quantization has uniform grids.")
    with as_before_on_error(model):
        packed = lowbit.low_bit_layers(model)
        restore(model)
        schemes = scheme_of_each(model, "rtn", scheme)
        made = {}
        for name, linear in layers_to_quantize(model, "rtn", schemes, ()).items():
            made[name] = layer = FakeQuantLinear(linear, schemes[name], grids, masked)
            if name in packed and same_grids(packed[name], layer):
                codes, layer.scale, layer.zero = packed[name].unpacked()
                if latents and name in latents:
                    layer.weight.data = latents[name].to(layer.weight)
                    if not torch.equal(layer.quantized().codes, codes) and grids != "step":
                        raise SchemeError(
                            f"layer {name}: its latent weights do not round to its codes; make the run again."
                        )
    part(model)
    for name, layer in made.items():
        model.set_submodule(name, layer)
    decoder = model.get_decoder()
    decoder.together = Together(decoder, list(layers(decoder).values()))


@contextmanager
def as_before_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Should anything go wrong inside, the model gets back the layers it had and what was said on it about them."""
    before = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | LowBitLinear)}
    said = [(owner, dict(vars(owner))) for owner in (model, model.config)]
    try:
        yield
    except BaseException:
        for name, layer in before.items():
            model.set_submodule(name, layer)
        for owner, values in said:
            vars(owner).update(values)
        raise


def part(model: PreTrainedModel) -> None:
    """Let the fake-quantized layers no longer be computed together, before they are replaced."""
    if together := model.get_decoder().__dict__.pop("together", None):
        together.remove()


def same_grids(packed: LowBitLinear, fake: FakeQuantLinear) -> bool:
    """Whether both have as many codes, and grids of one kind and number."""
    scheme = fake.scheme
    return (packed.bits, packed.symmetric, packed.scale.shape) == (scheme.bits, scheme.symmetric, fake.scale.shape)


def restore(model: PreTrainedModel) -> None:
    """Replace every low-bit layer by a plain one of the weights that it stands for, so that all can be trained."""
    low_bit = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | LowBitLinear) and is_low_bit(m)}
    for name, layer in low_bit.items():
        model.set_submodule(name, plain(weight_of(layer), layer.bias))
    if low_bit:
        adapters.unmark(model)


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """An `nn.Linear` of these values."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    linear.bias = None if bias is None else nn.Parameter(bias.detach())
    return linear


def switch(model: nn.Module, where: str) -> None:
    """Say which forwards of the model are quantized: one of `WHERE`. Grids are found anew when they come into use again."""
    for layer in layers(model).values():
        if layer.where == "nowhere" != where:
            layer.find()
        layer.where = where


def where(model: nn.Module) -> str:
    """Which forwards of the model are quantized."""
    return next((layer.where for layer in layers(model).values()), "nowhere")


@contextmanager
def materialized(model: nn.Module) -> Iterator[None]:
    """Compute W' once for each layer, and with it in every forward inside; weights must not change meanwhile.

    Layers that are quantized `nowhere` compute with W.
    """
    found = [layer for layer in layers(model).values() if layer.where != "nowhere"]
    try:
        for layer in found:
            layer.fill()
            layer.held = layer.place
        yield
    finally:
        for layer in found:
            layer.held = None


def codes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The codes `(rows, columns)` uint8 of each fake-quantized layer."""
    return {name: layer.quantized().codes for name, layer in layers(model).items()}


def differing(codes: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The share of all codes that are not the same in both."""
    different = sum(int((codes[name] != others[name]).sum()) for name in codes)
    return different / sum(c.numel() for c in codes.values())


@torch.no_grad()
def pack(model: PreTrainedModel) -> None:
    """Replace fake-quantized layers by packed ones that compute the same, which keep what they were rounded from as `latent`."""
    part(model)
    for name, layer in layers(model).items():
        packed = layer.quantized().pack(layer.bias)
        packed.latent = layer.weight.detach()
        model.set_submodule(name, packed)
    lowbit.mark(model)


def remove(model: PreTrainedModel) -> None:
    """Replace fake-quantized layers by plain ones of their latent weights."""
    part(model)
    for name, layer in layers(model).items():
        model.set_submodule(name, plain(layer.weight, layer.bias))
