"""AutoAWQ: activation-aware quantization by its own package, read out as codes, so that our layers can compute from them.

A few input channels carry most of the activation. A channel multiplied by s before rounding and divided by s afterwards errs
about s times less, and the division can be hidden in what comes before: a norm n, or another linear layer V.

    y = W x = Q(W diag(s)) diag(1/s) x,          n <- n / s   or   V <- diag(1/s) V
    s = x_mean^a / (w_mean^(1-a) + 1e-4), then s / sqrt(max s * min s);   a = 0, 0.05 .. 0.95: the least output error wins

x_mean is a channel's mean |x| over the calibration tokens, w_mean its mean |w| relative to the largest of its group. Each
group's range is then clipped where that lowers the error of its part of the output (queries and keys apart), and rounded to
nearest: 4 bits, asymmetric, float16 scales. Source: Lin et al., AWQ (2023), arXiv:2306.00978, which has s = x_mean^a alone.
Package: autoawq 0.2.9, no longer maintained.

What it does with calibration texts: it drops those longer than a block, joins the rest without a mark between them, and cuts
the line into blocks: a text sees the end of the one before, and what does not fill a block is lost. Where all texts together are
shorter than a block, we shorten the block. It searches with the full-precision model's activations throughout.

It works on a copy of the model in the model's own type, with the key-value cache off, since it calls the attention again and again,
and with scaled dot product attention: it passes no mask, which other kinds take for "not causal".
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.quant.grid import Quantized
from helpers.quant.scheme import Scheme, SchemeError

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)  # of the types it knows, those whose scales go into norms and linear layers
BLOCK = 512  # tokens: the package's default
ROWS = 32  # it packs rows eight to a word, and rounds the number of words down to a multiple of four


@dataclass(frozen=True)
class AutoAWQ:
    """What the package made of a model. A model with these layers and these other parameters computes what AutoAWQ's does.

    `layers` holds diag(1 / output_scale) W diag(input_scale), rounded; a scale is one where there was none. `skipped` are the
    layers whose input got none: `o_proj` under grouped-query attention, because several heads read one value channel.
    """

    layers: dict[str, Quantized]
    others: dict[
        str, torch.Tensor
    ]  # every other parameter: embeddings, norms (scaled), biases (of quantized layers: float16)
    input_scale: dict[str, torch.Tensor]  # (columns,)
    output_scale: dict[str, torch.Tensor]  # (rows,)
    skipped: tuple[str, ...]
    tokens: int  # calibration tokens that were used
    dropped: int  # and that were not

    def restored(self, name: str) -> torch.Tensor:
        """The float32 weight, in the original model's terms, that a layer's codes stand for."""
        return self.layers[name].dequantize() * self.output_scale[name][:, None] / self.input_scale[name]


@torch.no_grad()
def autoawq(
    model: PreTrainedModel,
    scheme: Scheme,
    calibration: Sequence[Sequence[int]],
    clip: bool = True,
    block: int | None = None,
    parallel: int | None = None,
) -> AutoAWQ:
    """Quantize the linear layers of the model's blocks with AutoAWQ; the model itself stays as it is.

    `calibration` holds token ids, one list a text; `block` is the length they are cut to (None: 512 or the model's longest
    input); `parallel` blocks go through a layer at once (None: all).

    Errors: `SchemeError` for a scheme, a type of model or a layer that the package does not do, and for unusable texts.
    """
    _check(model, scheme)
    block = block or min(BLOCK, model.config.max_position_embeddings)
    texts = [list(map(int, text)) for text in calibration if 0 < len(text) <= block]
    if not texts:
        raise SchemeError(
            f"AutoAWQ can use none of {len(calibration)} calibration texts: block = {block} allows 1 to {block} tokens each."
        )
    block = min(block, sum(map(len, texts)))
    work = copy.deepcopy(model).eval()
    work.config.use_cache = False
    work.set_attn_implementation("sdpa")
    log: list[tuple[str, tuple[str, ...], torch.Tensor]] = []
    with _quiet():
        from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP

        kind = model.config.model_type
        AWQ_CAUSAL_LM_MODEL_MAP[kind](work, kind, False, work.config, None, None).quantize(
            quant_config={"zero_point": True, "q_group_size": scheme.group_size, "w_bit": 4, "version": "GEMM"},
            calib_data=texts,
            apply_clip=clip,
            n_parallel_calib_samples=parallel,
            max_calib_samples=len(texts),
            max_calib_seq_len=block,
            quantizer_cls=_quantizer(log),
        )
    modules = {name: m for name, m in work.named_modules() if hasattr(m, "qweight")}
    layers = {name: read_out(m, scheme, model.device) for name, m in modules.items()}
    inputs = {name: torch.ones(q.codes.shape[1], device=model.device) for name, q in layers.items()}
    outputs = {name: torch.ones(q.codes.shape[0], device=model.device) for name, q in layers.items()}
    for before, after, scale in log:
        inputs |= dict.fromkeys(after, scale.float().to(model.device))
        if before in outputs:
            outputs[before][-len(scale) :] = scale.float()
    others = dict(work.named_parameters())
    others |= {f"{name}.bias": m.bias for name, m in modules.items() if m.bias is not None}
    others = {name: t.detach().to(model.device) for name, t in others.items()}
    skipped = tuple(name for name in layers if all(name not in after for _, after, _ in log))
    used = sum(map(len, texts)) // block * block
    return AutoAWQ(layers, others, inputs, outputs, skipped, used, sum(map(len, calibration)) - used)


def read_out(module: nn.Module, scheme: Scheme, device: torch.device | None = None) -> Quantized:
    """What a `WQLinear_GEMM` holds, which is transposed and packed eight to a word in an order of its own."""
    from awq.utils.packing_utils import reverse_awq_order, unpack_awq

    packed = reverse_awq_order(*unpack_awq(module.qweight, module.qzeros, scheme.bits), scheme.bits)
    codes, zeros = ((x & 15).to(torch.uint8).t().contiguous().to(device) for x in packed)  # above the 4 bits is garbage
    return Quantized(codes, module.scales.t().contiguous().to(device), zeros, scheme)


@contextmanager
def cloned_state(module: nn.Module) -> Iterator[None]:
    """While open, `module.state_dict()` gives copies."""
    plain = module.state_dict
    module.state_dict = lambda *args, **kwargs: {name: t.clone() for name, t in plain(*args, **kwargs).items()}
    try:
        yield
    finally:
        del module.state_dict  # the class's own shows again


def _quantizer(log: list[tuple[str, tuple[str, ...], torch.Tensor]]) -> type:
    """The package's quantizer, cured, less strict, and with a log of (layer before, layers after, scale).

    Cured: for each scale that it tries it multiplies the weights in place, then restores what it saved by `.cpu()`. On a CPU
    that is no copy, so nothing is restored and the model is wrong before it is rounded. Less strict: the clip search wants a
    multiple of 64 rows. Rows are searched one by one, so some are repeated to fill up, and cut off again.
    """
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.module import append_str_prefix, get_op_name

    class Quantizer(AwqQuantizer):
        def _search_best_scale(self, module, *args, **kwargs):  # what it gives is what is applied
            found = super()._search_best_scale(module, *args, **kwargs)
            prefix = get_op_name(self.model, module) + "."
            log.append((append_str_prefix(found[0], prefix), append_str_prefix(found[1], prefix), found[2]))
            return found

        def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *args, **kwargs):
            with cloned_state(module2inspect):
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *args, **kwargs)

        def _compute_best_clip(self, w, *args, **kwargs):
            rows = torch.arange(-(-len(w) // 64) * 64, device=w.device) % len(w)
            return super()._compute_best_clip(w[rows], *args, **kwargs)[: len(w)]

    return Quantizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Import and run the package without its banner and its progress bar; the filters of warnings are as before afterwards."""
    with warnings.catch_warnings(record=True):  # filters do not help: the package sets its own before it warns
        import awq.quantize.quantizer as module

        bar, module.tqdm = module.tqdm, lambda work, **_: work
        try:
            yield
        finally:
            module.tqdm = bar


def _check(model: PreTrainedModel, scheme: Scheme) -> None:
    """Raise the `SchemeError` that says what the package cannot do here, if there is something."""
    if scheme != Scheme(4, "group", scheme.group_size):
        raise SchemeError(
            f"AutoAWQ cannot make {scheme}: it has 4 bits, groups, an asymmetric grid, and all layers alike; choose one of "
            "w4g32, w4g64, w4g128."
        )
    kind = model.config.model_type
    if kind not in MODEL_TYPES:
        raise SchemeError(
            f"AutoAWQ cannot quantize a model of type {kind!r} here: choose one of {', '.join(MODEL_TYPES)}."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise SchemeError(
            "AutoAWQ cannot quantize a model that is quantized already: start from its full-precision parent."
        )
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            rows, columns = layer.weight.shape
            if columns % scheme.group_size or rows % ROWS:
                raise SchemeError(
                    f"layer {name} of {rows} x {columns} does not fit {scheme} in AutoAWQ: rows must be a multiple of {ROWS}, "
                    f"columns one of {scheme.group_size}."
                )
            if not torch.isfinite(layer.weight).all():
                raise SchemeError(f"layer {name} has weights that are not finite: AutoAWQ cannot quantize it.")
