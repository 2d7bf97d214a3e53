"""With scales left in float32, our GPTQ of a block gives llm-compressor's weights; the few that differ are ties in a zero point.

Only the first block is compared: from the second on, ours has calibrated `o_proj` and `down_proj` on inputs of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("llmcompressor", reason="runs in the environment of the cross-checks")

from transformers import AutoModelForCausalLM

from helpers import models
from helpers.quant import Scheme, grid
from helpers.quant.calibration import Stream, decoder_blocks
from helpers.quant.gptq import gptq, prepared

TEXTS = [[1 + (i * i + 7 * j) % 50 for j in range(40)] for i in range(32)]  # 1280 tokens, three times the widest layer


def float32_grids(low: torch.Tensor, high: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric grids without the rounding of scales to float16."""
    top = 2**scheme.bits - 1
    scale = (high - low) / top
    return scale, torch.round(-low / scale).clamp(0, top)


@pytest.mark.parametrize("bits", [4, 2])
def test_gptq_equals_llm_compressor(bits, tmp_path, monkeypatch):
    model, tokenizer = models.load("base-s", device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "full")
    tokenizer.save_pretrained(tmp_path / "full")
    request = {"peer": "llm-compressor GPTQ", "model": str(tmp_path / "full"), "tokens": TEXTS, "bits": bits}
    (tmp_path / "request.json").write_text(json.dumps(request | {"group_size": 64, "out": str(tmp_path / "peer")}))
    subprocess.run(
        [sys.executable, Path(__file__).with_name("peers.py"), tmp_path / "request.json"], check=True, cwd=tmp_path
    )
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "peer", dtype=torch.float32)

    monkeypatch.setattr(grid, "_grids", float32_grids)
    prefix, block = decoder_blocks(model)[0]
    layers = {name: m for name, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
    moments = Stream(model, TEXTS).moments(block, layers)
    equal, total = 0, 0
    for name, layer in layers.items():
        found = gptq(layer.weight, prepared(moments[name].second), Scheme(bits), clip=False)
        same = torch.isclose(found.dequantize(), peer.get_submodule(f"{prefix}.{name}").weight, rtol=1e-4, atol=1e-6)
        equal, total = equal + int(same.sum()), total + same.numel()
    assert equal / total > 0.999
