"""`lowbit bench gptq`: GPTQ of a whole model, all in: calibration, Hessians, factors, rounding, packing.

On a GPU the model has Qwen3-0.6B's shape and random bfloat16 weights, and the texts are random tokens: what is measured is speed,
and that no contender rounds worse. Every contender calibrates on the same texts. Ours is given a quarter more, since it holds a
fifth back to report each layer's error on, in the time measured. The error of a contender is the mean over layers of
|(W' - W) x| / |W x| for inputs x of the full-precision model on these texts: what rounding costs. That of the block update is the
share of codes that differ from the plain loop's and the relative difference of the rest.

Contenders run one after another, on a GPU each first on one layer, which compiles; the package runs once.

The peer is gptqmodel where it can be imported, at the same settings (asymmetric, groups fixed beforehand, columns by falling
activations, damping 0.01, no search of ranges) and with what is fastest there: 16 texts a batch, packing on the GPU.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers import models
from helpers.bench import measure
from helpers.bench.random_models import build
from helpers.kernels import gptq_block, unpack
from helpers.quant import Scheme, calibration, quantize
from helpers.quant.awq import output_error
from helpers.quant.layers import linear_layers
from helpers.shapes import SHAPES

OF_GPTQMODEL = 0.5  # of its time is the target
NO_WORSE = 1.001  # times its error: sums in another order and scales of another type change the fifth digit
CALLS = 20  # of the block update between two looks at the clock
SCHEME = Scheme(4, "group", 128)
MOST = 3  # repeats
Texts = list[list[int]]
Found = tuple[float, dict[str, torch.Tensor]]  # seconds, the float32 weights that the layers stand for


def rows(
    layers: int = 28, texts: int | None = None, length: int | None = None, repeats: int = 1
) -> list[dict[str, Any]]:
    """GPTQ at w4g128, calibrated on `texts` texts of `length` tokens: seconds and output errors of each contender.

    On a GPU the model has `layers` of Qwen3-0.6B's, and 128 texts have 2,048 tokens; elsewhere it is the micro model base-s, and 32
    have 64. Without a target where gptqmodel is not installed, which runs once; ours at most `MOST` times.
    """
    device = models.seed_everything(0)
    on_gpu = device.type == "cuda"
    texts, length = texts or (128 if on_gpu else 32), length or (2_048 if on_gpu else 64)
    model = random_model(layers) if on_gpu else models.load("base-s")[0]
    ids = torch.randint(10, model.config.vocab_size, (texts + texts // 4, length)).tolist()
    contenders: dict[str, Callable[[PreTrainedModel, Texts], Found]] = {
        "ours": partial(by_us, clip=False),
        "ours with the clip search": partial(by_us, clip=True),
    }
    if on_gpu and find_spec("gptqmodel"):
        contenders["gptqmodel"] = by_gptqmodel
    seconds, errors = {}, {}
    judge = Judge(model, calibration.split(ids)[1])
    for name, work in contenders.items():
        if on_gpu:
            work(random_model(1), ids[:20])  # compiles
        found = [work(model, ids) for _ in range(1 if name == "gptqmodel" else min(repeats, MOST))]
        seconds[name], errors[name] = [taken for taken, _ in found], judge.error(found[-1][1])

    shape = f"{model.config.num_hidden_layers} layers of width {model.config.hidden_size:,}, {texts} x {length:,} tokens, {SCHEME}"
    theirs = {name: seconds[name] for name in contenders if name == "gptqmodel"}
    goal = OF_GPTQMODEL * median(theirs["gptqmodel"]) if theirs else None
    made = [
        measure.row(
            f"GPTQ{name.removeprefix('ours')}", shape, "s", {name: seconds[name]} | theirs, name,
            target=goal, error=errors[name],
        )
        for name in contenders if name not in theirs
    ]  # fmt: skip
    if theirs:
        values = {name: [errors[name]] for name in ("ours", "gptqmodel")}
        goal = NO_WORSE * errors["gptqmodel"]
        made.append(measure.row("GPTQ output error", shape, "of the output", values, "ours", target=goal))
    return [*made, update(device, repeats)]


def update(device: torch.device, repeats: int, rows: int = 4_096) -> dict[str, Any]:
    """One block of 128 columns: the kernel, where there is one, against the loop over columns."""
    w, other = torch.randn(2, rows, 128, device=device)
    upper = torch.linalg.cholesky(other.T @ other / rows + torch.eye(128, device=device)).T.contiguous()
    group = torch.zeros(128, dtype=torch.long, device=device)
    grids = torch.full((rows, 1), 0.3, device=device).half(), torch.full((rows, 1), 8, device=device).to(torch.uint8)

    arguments = *grids, group, upper, 0, 15
    contenders = {"ours": gptq_block.compensate, "plain PyTorch loop": gptq_block.reference}
    (codes, errors), (theirs, reference) = (work(w.clone(), *arguments) for work in contenders.values())
    off = float((codes != theirs).float().mean()) + float((errors - reference).norm() / reference.norm())

    def often(work: Callable[..., Any]) -> None:
        for _ in range(CALLS):
            work(w, *arguments)

    seconds = measure.timed({name: partial(often, work) for name, work in contenders.items()}, min(repeats, MOST))
    values = {name: [1e6 * each / CALLS for each in found] for name, found in seconds.items()}
    moved = sum(t.nbytes for t in (w, codes, errors, upper, *grids))
    limit = 1e6 * moved / measure.bandwidth()
    return measure.row(
        "GPTQ block update", f"{rows:,} rows x 128 columns", "us", values, "ours", limit=limit, error=off
    )


def random_model(layers: int) -> PreTrainedModel:
    """`layers` of Qwen3-0.6B's, of random bfloat16 weights."""
    return build(replace(SHAPES["Qwen3-0.6B"], layers=layers), max_position_embeddings=40_960)


class Judge:
    """What each layer of the full-precision model reads on held-out texts, and the weights that are right."""

    def __init__(self, model: PreTrainedModel, held_out: Texts) -> None:
        self.weights = {name: layer.weight for name, layer in linear_layers(model).items()}
        self.second: dict[str, torch.Tensor] = {}
        stream = calibration.Stream(model, held_out)
        for prefix, block in calibration.decoder_blocks(model):
            own: dict[str, nn.Module] = {
                name: model.get_submodule(name) for name in self.weights if name.startswith(f"{prefix}.")
            }
            self.second |= {name: m.second for name, m in stream.moments(block, own, onward=True).items()}

    def error(self, weights: dict[str, torch.Tensor]) -> float:
        """The mean over layers of the relative output error of other `weights`."""
        found = []
        for name, right in self.weights.items():
            right = right.detach().float()
            off, all_of_it = (output_error(w, self.second[name]) for w in (weights[name].to(right) - right, right))
            found.append((off / all_of_it) ** 0.5)
        return sum(found) / len(found)


def by_us(model: PreTrainedModel, texts: Texts, clip: bool) -> Found:
    """Ours, on a copy of `model`."""
    copied = copy.deepcopy(model)
    seconds = measure.once(lambda: quantize(copied, "gptq", SCHEME, texts, clip=clip))
    return seconds, {name: layer.dequantize() for name, layer in linear_layers(copied).items()}


def by_gptqmodel(model: PreTrainedModel, texts: Texts) -> Found:
    """The package's, which reads the model from files; it gets the texts that ours calibrates on."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=4, group_size=128, sym=False, desc_act=True, static_groups=True, act_group_aware=False, damp_percent=0.01,
        format="gptq_v2", device=model.device.type, pack_impl="gpu", offload_to_disk=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        models.build_tokenizer().save_pretrained(folder)  # it wants one, for its padding
        wrapped = GPTQModel.load(folder, config, dtype=model.dtype)
        examples = [{"input_ids": [ids], "attention_mask": [[1] * len(ids)]} for ids in calibration.split(texts)[0]]
        seconds = measure.once(
            lambda: wrapped.quantize(examples, batch_size=calibration.BATCH, calibration_data_min_length=1)
        )
    return seconds, {n: of_gptqmodel(m) for n, m in wrapped.model.named_modules() if hasattr(m, "qweight")}


def of_gptqmodel(layer: nn.Module) -> torch.Tensor:
    """The float32 weight `(rows, columns)` of one of its packed layers (its second format: zero points as they are)."""
    columns, group = len(layer.g_idx), layer.g_idx.long()
    codes = unpack(layer.qweight.T.contiguous(), 4, columns).float()
    zero = unpack(layer.qzeros.contiguous(), 4, layer.scales.shape[1]).float().T
    return layer.scales.float().T[:, group] * (codes - zero[:, group])
