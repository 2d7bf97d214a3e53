"""BitsAndBytes: NF4, with double quantization or without, and LLM.int8, layer by layer on a loaded full-precision model.

    NF4       16 values t_i in [-1, 1], quantiles of the normal distribution, and blocks of 64 weights along the flattened matrix:
              a = max|w|,  q = the i whose t_i is nearest to w / a,  w' = a t_q.   a is float32: 4 + 32/64 = 4.5 bits a weight
    double    each 256 maxima a, less the mean of all, become 8-bit floats with one float32 maximum of their own:
              4 + 8/64 + 32/(64 * 256) = 4.127 bits a weight, and two tables that only a small layer notices (`stored_bytes`)
    LLM.int8  a = max|w| of each row,  q = round(127 w / a); activations too, each token by its own maximum. Products are sums of
              integers times a_w a_x / 127^2; input channels in which some token exceeds 6 are multiplied in 16 bit instead

Sources: Dettmers et al., QLoRA (2023), arXiv:2305.14314; Dettmers et al., LLM.int8() (2022), arXiv:2208.07339. The package is the
authors' own, and the layers are those that transformers makes when it loads a checkpoint with a `BitsAndBytesConfig`.

Other than in the papers, a CPU computes NF4 layers in float32. LLM.int8 takes weights and activations through float16. Since one
large token moves its channel to 16 bit for the whole batch, the output for a text depends on its neighbours, in the paper too.
"""

import logging
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from helpers.quant.scheme import Scheme, SchemeError

OUTLIER = 6.0  # activations above it stay 16 bit in LLM.int8, the paper's value and the package's
# LLM.int8 says at every call of every layer that it casts its input to float16
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@torch.no_grad()
def bnb_layer(layer: nn.Linear, scheme: Scheme) -> nn.Module:
    """The low-bit layer of `layer` on its device: `Linear4bit` for `nf4` and `nf4-dq`, `Linear8bitLt` for `int8`.

    4-bit layers compute in float32 on a CPU and in the layer's own type on a GPU.

    Errors: `SchemeError` for another scheme, a layer that is quantized already, and weights that are not finite (in float16
    for `int8`).
    """
    if scheme.numbers not in ("nf4", "int8"):
        raise SchemeError(f"scheme = {scheme} is no format of bitsandbytes: choose one of nf4, nf4-dq, int8.")
    if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
        raise SchemeError(
            f"a {type(layer).__name__} cannot be quantized by bitsandbytes: it must be a full-precision nn.Linear."
        )
    weight = layer.weight.data
    if not torch.isfinite(weight.half() if scheme.numbers == "int8" else weight).all():
        raise SchemeError(
            f"a weight of shape {tuple(weight.shape)} cannot be quantized to {scheme}: it must be finite"
            f"{' in float16' if scheme.numbers == 'int8' else ''}."
        )
    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    with torch.device("meta"):
        if scheme.numbers == "nf4":
            compute = torch.float32 if weight.device.type == "cpu" else weight.dtype
            new = bnb.nn.Linear4bit(*shape, compute, compress_statistics=scheme.double, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=OUTLIER)
    if scheme.numbers == "nf4":
        settings = dict(new.weight.__dict__)  # block size, type, and the layer itself, as transformers hands them over
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device)
    else:  # it quantizes on the way from the CPU to a device, the CPU included
        new.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(weight.device)
    new.bias = layer.bias
    new.source_cls = nn.Linear  # transformers asks for it when it loads more weights into the layer
    guard(new)
    return new.requires_grad_(False).train(layer.training)


def guard(model: nn.Module) -> None:
    """Keep bitsandbytes from rewriting 4-bit weights in memory; call it on every model that was loaded with them.

    On a CPU that has AVX512-BF16, the first forward in eval mode repacks codes and scales in place, into another layout and
    bfloat16. The layer still computes, but whatever reads its weights afterwards (`dequantize_4bit`, saving, merging, the gradients
    of QLoRA) is wrong, without a word. A layer decides when it is built. So this switches off the layers in `model` and, for the
    rest of the process, the question that later layers ask, those of a reload among them.

    Errors: `SchemeError` where the harm is done; the scales are rounded by then, so it cannot be undone.
    """
    bnb.nn.modules.has_avx512bf16 = lambda: False
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise SchemeError(
                    f"layer {name} was repacked by a forward before guard() saw it: load the model again."
                )
            module.support_avx512bf16_for_cpu = False


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a low-bit layer stores, bias aside, by name; `table` and `nested_table` are constants of the format."""
    if isinstance(module, bnb.nn.Linear8bitLt):  # the first forward moves the scales from the weight to the state
        scale = module.state.SCB if module.weight.SCB is None else module.weight.SCB
        return {"codes": module.weight.data, "absmax": scale}
    if not isinstance(module, bnb.nn.Linear4bit):
        raise SchemeError(f"a {type(module).__name__} is no layer of bitsandbytes.")
    state = module.weight.quant_state
    kept = {"codes": module.weight.data, "absmax": state.absmax, "table": state.code}
    if state.nested:
        kept |= {"nested_absmax": state.state2.absmax, "offset": state.offset, "nested_table": state.state2.code}
    return kept


def stored_bytes(module: nn.Module, tables: bool = True) -> int:
    """Bytes of everything that the layer keeps: codes, maxima, nested maxima, offset, and the tables.

    Each layer has its own copy of the tables, in memory and in a checkpoint: 64 bytes of NF4 and, with double quantization, 1,024
    of the 8-bit floats. They are counted, although they are the same everywhere; `tables=False` leaves them out. With them, double
    quantization saves nothing on a layer of fewer than 22,000 weights.
    """
    return sum(t.nbytes for name, t in tensors(module).items() if tables or "table" not in name)


@torch.no_grad()
def dequantized(module: nn.Module) -> torch.Tensor:
    """The float32 weight `(rows, columns)` that the codes stand for; LLM.int8 rounds its input as well."""
    kept = tensors(module)
    if isinstance(module, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(kept["codes"], kept["absmax"])
    return bnb.functional.dequantize_4bit(kept["codes"], module.weight.quant_state).float()


def config(model: PreTrainedModel, scheme: Scheme) -> BitsAndBytesConfig:
    """The configuration that makes transformers build these layers; linear layers that are not low-bit are named as skipped."""
    low_bit = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)  # both are subclasses of nn.Linear
    skipped = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, low_bit)]
    settings: dict[str, Any] = {"llm_int8_skip_modules": skipped}
    if scheme.numbers == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER, **settings)
    compute = next((m.compute_dtype for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)), torch.float32)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=scheme.double,
        bnb_4bit_compute_dtype=compute,
        **settings,
    )


def mark(model: PreTrainedModel, scheme: Scheme) -> None:
    """Say on the model what its layers are, as transformers does after loading, so that `save_pretrained` and a reload work.

    From then on transformers refuses `model.to(dtype)`. Call `guard` on the reloaded model.
    """
    quantizer = AutoHfQuantizer.from_config(config(model, scheme), pre_quantized=False)
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)  # sets config.quantization_config and is_loaded_in_4bit or is_loaded_in_8bit
    guard(model)
