"""Run one quantizer on one checkpoint and exactly the given calibration tokens, and keep what its codes stand for.

`python tests/crosscheck/peers.py request.json` writes into the folder `out` a checkpoint in the plain Hugging Face layout, with
float32 weights, and `answer.json`: peer, version, and the seconds of the quantization itself (without imports and loading, except
where the peer quantizes while it loads). Each has a process of its own: several change global state, some die rather than raise.

A request: {"peer": "gptqmodel", "model": folder, "tokens": [[id, ...], ...], "bits": 4, "group_size": 64, "out": folder,
"settings": {}}. Every peer is asked for an asymmetric grid, whose scales and zero points it finds itself.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import calibrated
import torch
import uncalibrated
from request import Answer, Request, full_precision
from transformers import AutoTokenizer

HELD_OUT = 5  # our `quantize` measures on one text in five, and calibrates on the others


def ours(request: Request) -> Answer:
    """This project's `quantize`, whose `method`, `scheme` and settings are the request's settings.

    It holds back every fifth text to measure on; a filler in each fifth place lets it calibrate on all the others' texts.
    """
    from helpers.quant import linear_layers, quantize, weight_of

    model = full_precision(request)
    texts = list(request.tokens)
    for index in range(HELD_OUT - 1, len(texts) * HELD_OUT // (HELD_OUT - 1), HELD_OUT):
        texts.insert(index, request.tokens[0])
    start = perf_counter()
    quantize(model, calibration=texts, **request.settings)
    seconds = perf_counter() - start
    layers = linear_layers(model)
    others = {
        name: p for name, p in model.named_parameters() if name.removesuffix(".weight") not in layers
    }  # norms change in AWQ
    return seconds, others | {f"{name}.weight": weight_of(layer) for name, layer in layers.items()}


PEERS: dict[str, tuple[Callable[[Request], Answer], str]] = {  # function, package
    "ours": (ours, "low-bit-reasoning"),
    "gptqmodel": (calibrated.gptqmodel, "gptqmodel"),
    "llm-compressor GPTQ": (calibrated.compressor_gptq, "llmcompressor"),
    "llm-compressor AWQ": (calibrated.compressor_awq, "llmcompressor"),
    "llm-compressor RTN": (calibrated.compressor_rtn, "llmcompressor"),
    "AutoAWQ": (calibrated.autoawq, "autoawq"),
    "torchao": (uncalibrated.torchao, "torchao"),
    "bitsandbytes": (uncalibrated.bitsandbytes, "bitsandbytes"),
}


def main(path: str) -> None:
    """Run the request in the file `path`."""
    request = Request(**json.loads(Path(path).read_text()))
    run, package = PEERS[request.peer]
    torch.manual_seed(0)
    seconds, weights = run(request)
    model = full_precision(request)
    unknown = weights.keys() - model.state_dict().keys()
    assert not unknown, f"{request.peer} gave tensors that the checkpoint lacks: {sorted(unknown)}"
    model.load_state_dict({name: w.detach().float().contiguous() for name, w in weights.items()}, strict=False)
    model.save_pretrained(request.out)
    AutoTokenizer.from_pretrained(request.model).save_pretrained(request.out)
    answer = {"peer": request.peer, "version": version(package), "seconds": seconds, "tensors": len(weights)}
    (Path(request.out) / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
