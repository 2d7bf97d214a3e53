"""Packages that need calibration texts: GPTQModel, llm-compressor and AutoAWQ."""

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # read when gptqmodel is imported

import torch
from request import Answer, Request, full_precision, linear_layers, unpack
from safetensors.torch import load_file
from transformers import AutoTokenizer


def gptqmodel(request: Request) -> Answer:
    """GPTQModel, columns taken in the order of their activations; `act_group_aware` (its default) would permute whole groups.

    What it wrote is read back from the file, by hand: its model in memory is not to be trusted after quantization. The second
    format of GPTQ files keeps zero points as they are; the first one subtracts 1 from whole words, with borrows.
    """
    from gptqmodel import GPTQModel, QuantizeConfig

    settings = {"desc_act": True, "sym": False, "damp_percent": 0.01, "act_group_aware": False} | request.settings
    config = QuantizeConfig(
        bits=request.bits,
        group_size=request.group_size,
        format="gptq_v2",
        device="cpu",
        pack_impl="original",
        offload_to_disk=False,
        **settings,
    )
    wrapped = GPTQModel.load(request.model, config, dtype=torch.float32)
    rows = [{"input_ids": [ids], "attention_mask": [[1] * len(ids)]} for ids in request.tokens]
    start = perf_counter()
    wrapped.quantize(rows, batch_size=1, calibration_data_min_length=1)  # by default it drops texts of up to 10 tokens
    seconds = perf_counter() - start
    wrapped.save(f"{request.out}/packed")
    tensors = load_file(f"{request.out}/packed/model.safetensors")
    weights = {}
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        codes = unpack(tensors[f"{name}.qweight"].T, request.bits)  # (rows, columns)
        zero = unpack(tensors[f"{name}.qzeros"], request.bits).T  # (rows, groups)
        scale = tensors[f"{name}.scales"].T.float()
        group = tensors[f"{name}.g_idx"].long()  # of each column
        weights[f"{name}.weight"] = scale[:, group] * (codes - zero[:, group])
    return seconds, weights


def compressor_gptq(request: Request) -> Answer:
    """llm-compressor's GPTQ: static groups (scales from the original weights), decoder layer by decoder layer."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    settings = {"ignore": ["lm_head"], "actorder": "static", "dampening_frac": 0.01}
    return compress(request, lambda groups: [GPTQModifier(config_groups=groups, **settings)])


def compressor_awq(request: Request) -> Answer:
    """llm-compressor's AWQ: a search for scales, none for clipping."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.cuda.is_available():
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None  # pinning asks for an accelerator
    return compress(
        request,
        lambda groups: [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])],
    )


def compressor_rtn(request: Request) -> Answer:
    """llm-compressor's round to nearest."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return compress(request, lambda groups: [QuantizationModifier(config_groups=groups, ignore=["lm_head"])])


def compress(request: Request, recipe: Callable[[dict[str, Any]], list[Any]]) -> Answer:
    """Run llm-compressor's `recipe`; one text at a time, since it would count padding. `observer` says how ranges are found."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, fake_quantize
    from datasets import Dataset
    from llmcompressor import oneshot

    grid = QuantizationArgs(
        num_bits=request.bits,
        type="int",
        symmetric=False,
        strategy="group",
        group_size=request.group_size,
        observer=request.settings.get("observer", "memoryless_minmax"),
    )
    model = full_precision(request)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in request.tokens]
    start = perf_counter()
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=recipe({"group_0": QuantizationScheme(targets=["Linear"], weights=grid)}),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
        max_seq_length=max(map(len, request.tokens)),
        batch_size=1,
    )
    seconds = perf_counter() - start
    weights = {name: p.detach() for name, p in model.named_parameters() if "weight_" not in name}  # norms change in AWQ
    for name, layer in linear_layers(model).items():
        args = layer.quantization_scheme.weights
        weights[f"{name}.weight"] = fake_quantize(layer.weight, layer.weight_scale, layer.weight_zero_point, args)
    return seconds, weights


def autoawq(request: Request) -> Answer:
    """AutoAWQ: scales, then clipping. It stores only 4 bits, so its rounding is kept but not its packing, at every width.

    It joins the texts and cuts them into blocks of one length. Its search puts the original weights back from a copy that is none
    on a CPU, so that every scale after the first is tried on weights already rounded: hence `restoring`.
    """
    import awq.quantize.quantizer as module
    from awq import AutoAWQForCausalLM

    search = module.AwqQuantizer._compute_best_scale

    def restoring(self, x, w_mean, x_mean, inspected, *args, **kwargs):
        plain = inspected.state_dict
        inspected.state_dict = lambda *a, **k: {key: value.clone() for key, value in plain(*a, **k).items()}
        try:
            return search(self, x, w_mean, x_mean, inspected, *args, **kwargs)
        finally:
            del inspected.state_dict

    def round_only(self, block, named):
        for layer in named.values():
            rounded, scale, _ = self.pseudo_quantize_tensor(layer.weight.data.half())
            step = scale.float().repeat_interleave(self.group_size, dim=1)
            codes = (rounded.float() / step).round()
            layer.weight.data = codes * step  # what they stand for, without float16's error in the product

    module.AwqQuantizer._compute_best_scale = restoring
    module.AwqQuantizer._apply_quant = round_only
    wrapped = AutoAWQForCausalLM.from_pretrained(request.model, torch_dtype=torch.float32, device_map={"": "cpu"})
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    total, longest = sum(map(len, request.tokens)), max(map(len, request.tokens))
    lengths = range(longest, 2 * longest)  # it leaves out longer texts, and the tokens left after the last whole block
    config = {"w_bit": request.bits, "q_group_size": request.group_size, "zero_point": True, "version": "GEMM"}
    start = perf_counter()
    wrapped.quantize(
        tokenizer,
        quant_config=config,
        calib_data=request.tokens,
        max_calib_samples=len(request.tokens),
        max_calib_seq_len=min(lengths, key=lambda length: total % length),
        **request.settings,
    )
    seconds = perf_counter() - start
    return seconds, dict(wrapped.model.named_parameters())
