"""GPTQ and AWQ exports, read by gptqmodel: through transformers and by itself. It computes from the codes and gives our logits.

In float32 it still rounds each weight to float16, so the difference is that; 2-bit weights, a scale times a number up to 3, are
exact.
"""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import models, quant
from helpers.quant.export import export

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # read when gptqmodel is imported
gptqmodel = pytest.importorskip("gptqmodel", reason="runs in the environment of the cross-checks")

IDS = torch.tensor([[3, 8, 9, 10, 20, 21, 4, 30, 31, 8]])


@pytest.fixture
def exported(tmp_path):
    """Folder of base-xs quantized by a scheme in a format, and our logits of it."""

    def make(scheme, format):
        model, tokenizer = models.load("base-xs", device=torch.device("cpu"))
        quant.quantize(model, "rtn", scheme)
        models.save(model, tokenizer, tmp_path / "packed", card="")
        with torch.no_grad():
            reference = models.load(tmp_path / "packed", device=torch.device("cpu"))[0](IDS).logits
        return export(str(tmp_path / "packed"), format, tmp_path / "out"), reference

    return make


def difference(model, reference):
    with torch.no_grad():
        return float((model(IDS).logits.float() - reference).norm() / reference.norm())


def low_bit(model):
    return sum(hasattr(m, "qweight") for m in model.modules())


GPTQ = (
    "w4g64",
    "w4g32-sym",
    "w3g64",
    "w3g32-sym",
    "w2g64",
    "w8g64",
    "w8pt",
    "w3pc-sym",
    "w4pc",
    "w4pt-sym",
    "w3g64-attn",
    "w4g64-attn",
)
AWQ = ("w4g64", "w4g32-sym", "w4pc", "w4g64-attn")


@pytest.mark.parametrize(("format", "scheme"), [*(("gptq", s) for s in GPTQ), *(("awq", s) for s in AWQ)])
def test_transformers_reads_it_with_gptqmodel(exported, scheme, format):
    out, reference = exported(scheme, format)
    for dtype, limit in ((torch.float16, 5e-3), (torch.float32, 1e-5 if scheme == "w2g64" else 1e-3)):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, device_map="cpu")
        assert model.dtype == dtype
        assert low_bit(model) == (12 if "attn" in scheme else 21)
        assert difference(model, reference) < limit


@pytest.mark.parametrize("scheme", ["w3g64", "w4g32-sym-attn"])
def test_gptqmodel_reads_it_by_itself(exported, scheme):
    out, reference = exported(scheme, "gptq")
    backend = gptqmodel.BACKEND.GPTQ_TORCH
    model = gptqmodel.GPTQModel.load(str(out), device="cpu", backend=backend, dtype=torch.float16).model
    assert low_bit(model) == (12 if "attn" in scheme else 21)
    assert difference(model, reference) < 5e-3
