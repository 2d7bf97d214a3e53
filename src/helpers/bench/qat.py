"""`lowbit bench qat`: a training step through fake-quantized weights, against the plain one and what others make of it."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from helpers import models
from helpers.bench import measure, random_models
from helpers.kernels.backend import SWITCH
from helpers.quant import Scheme, fake, linear_layers
from helpers.quant.grid import find_grids
from helpers.shapes import SHAPES, Shape

TARGET = 1.05  # times the plain step
CASES = {  # shape, texts, tokens of each: Qwen3-0.6B with a small vocabulary, and something for a CPU
    "cuda": (replace(SHAPES["Qwen3-0.6B"], vocabulary=4096), 8, 1024),
    "cpu": (Shape(128, 2, 256, 2, 1, 128, 256, True), 2, 64),
}


def rows(
    scheme: str = "w4g128", layers: int | None = None, length: int | None = None, repeats: int = 9
) -> list[dict[str, Any]]:
    """Forward, backward and AdamW of a random model of `CASES`; a row for each kind of grids.

    `layers` and `length` override the case's. Loss and gradients are compared with those of the references before anything is
    timed. The limit is the plain step and one read and one write of each weight.
    """
    device = models.seed_everything(0)
    shape, texts, usual = CASES[device.type]
    shape, length = replace(shape, layers=layers or shape.layers), length or usual
    ids = torch.randint(shape.vocabulary, (texts, length), device=device)
    parsed, base = Scheme.parse(scheme), "bf16" if device.type == "cuda" else "float32"
    contenders, errors = {base: stepped(build(shape), ids)}, {}
    for grids in fake.GRIDS:
        model = build(shape)
        fake.insert(model, parsed, grids)
        errors[grids] = difference(model, ids)
        contenders[grids] = stepped(model, ids)
    model = build(shape)
    weights = sum(layer.weight.numel() for layer in linear_layers(model).values())
    for layer in linear_layers(model).values():
        parametrize.register_parametrization(layer, "weight", Plain(layer.weight, parsed))
    contenders["plain PyTorch parametrization"] = stepped(model, ids)
    if find_spec("torchao"):
        contenders["torchao QAT"] = stepped(with_torchao(build(shape), parsed), ids)
    times = {name: [1e3 * s for s in found] for name, found in measure.timed(contenders, repeats).items()}
    plain = median(times[base])
    peers = {name: found for name, found in times.items() if name not in fake.GRIDS}
    text = f"{shape.layers} layers, width {shape.hidden}, {texts} x {length} tokens, {scheme}, {{}} grids"
    limit = plain + 1e3 * 2 * weights * next(model.parameters()).element_size() / measure.bandwidth()
    return [
        measure.row(
            "QAT step", text.format(grids), "ms", peers | {grids: times[grids]}, grids,
            target=TARGET * plain if device.type == "cuda" else None, limit=limit, error=errors[grids],
        )
        for grids in fake.GRIDS
    ]  # fmt: skip


def build(shape: Shape) -> PreTrainedModel:
    """The same random model each time, in bfloat16 on a GPU."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if models.device().type == "cuda" else torch.float32
    return random_models.build(shape, kind).train()


def stepped(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    """What makes one step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=ids.is_cuda)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def difference(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """How far loss and gradients are from those by the references, relative to them; the largest over the parameters."""
    found = []
    for switch in ("", "torch"):
        with patch.dict("os.environ", {SWITCH: switch}):
            loss = model(input_ids=ids[:1], labels=ids[:1], use_cache=False).loss
            found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    pairs = zip(*found, strict=True)
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


class Plain(nn.Module):
    """Fake quantization on fixed grids as PyTorch users write it."""

    def __init__(self, weight: torch.Tensor, scheme: Scheme) -> None:
        super().__init__()
        scale, zero = find_grids(weight, scheme)
        self.top, self.scale, self.zero = (
            2**scheme.bits - 1,
            scale.unsqueeze(-1).to(weight),
            zero.unsqueeze(-1).to(weight),
        )

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        grouped = weight.unflatten(1, (self.scale.shape[1], -1))
        codes = (torch.round(grouped / self.scale) + self.zero).clamp(0, self.top)
        return weight + (((codes - self.zero) * self.scale).flatten(1) - weight).detach()


def with_torchao(model: PreTrainedModel, scheme: Scheme) -> PreTrainedModel:
    """The model with torchao's weight-only fake quantization, its head left as it is."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    config = IntxFakeQuantizeConfig(getattr(torch, f"int{scheme.bits}"), group_size=scheme.group_size)
    quantize_(
        model, QATConfig(weight_config=config, step="prepare"),
        filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and "lm_head" not in name,
    )  # fmt: skip
    return model
