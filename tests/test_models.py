"""Micro models, their tokenizer and checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from helpers import models
from helpers.models.micro import CHARACTERS, MARKS
from helpers.quant import Scheme


@pytest.fixture(scope="module")
def tokenizer():
    return models.build_tokenizer()


@pytest.fixture
def saved(tokenizer, tmp_path):
    models.seed_everything(0)
    model = models.build("xs", tokenizer)
    return model, models.save(model, tokenizer, tmp_path / "model", card="A test.")


@given(st.lists(st.sampled_from([*CHARACTERS, *MARKS]), max_size=60).map("".join))
def test_decode_is_the_inverse_of_encode(text):
    tokenizer = models.build_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_marks_are_single_ordinary_tokens(tokenizer):
    for mark in MARKS:
        ids = tokenizer(mark)["input_ids"]
        assert len(ids) == 1
        assert ids[0] not in tokenizer.all_special_ids


def test_chat_template_loads_through_autotokenizer(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved[1])
    chat = [{"role": "user", "content": "1+2"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<user>1+2<assistant>"
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": r"\boxed{3}"}], tokenize=False)
    assert whole == r"<user>1+2<assistant>\boxed{3}<eos>"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) == 1 + 3 + 1 + 3 + 1


@pytest.mark.parametrize(("size", "millions"), [("xs", 0.15), ("s", 0.79), ("m", 3.2), ("l", 12.4)])
def test_sizes(size, millions, tokenizer):
    with torch.device("meta"):
        model = models.build(size, tokenizer)
    assert models.count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.03)
    assert model.config.tie_word_embeddings


def test_what_is_saved_is_what_is_loaded(saved):
    model, folder = saved
    loaded, tokenizer = models.load(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert loaded.dtype == torch.float32
    assert not loaded.training
    assert tokenizer.padding_side == "left"
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".md", ".jinja"}
    assert all(t.dtype == torch.bfloat16 for t in load_file(folder / "model.safetensors").values())


def test_nan_weights_are_refused(saved):
    file = saved[1] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(models.CheckpointError, match=r"has 1 weights that are not finite in model\.norm\.weight"):
        models.load(saved[1])


def test_a_missing_tensor_is_refused_not_invented(saved):
    file = saved[1] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.gate_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(models.CheckpointError, match=r"lacks 1 tensors, the first of them model\.layers\.0\.mlp\.gate"):
        models.load(saved[1])


def test_nan_weights_are_not_saved(saved, tokenizer, tmp_path):
    model = saved[0]
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(models.CheckpointError, match="not finite"):
        models.save(model, tokenizer, tmp_path / "other", card="")
    assert not (tmp_path / "other" / "model.safetensors").exists()


def test_a_missing_checkpoint_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(models.CheckpointError, match=r"empty cannot be loaded: .+") as error:
        models.load(tmp_path / "empty")
    assert "\n" not in str(error.value)


def test_pickled_weights_are_refused(saved, tmp_path):
    folder = saved[1]
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(models.CheckpointError, match="cannot be loaded"):
        models.load(folder)


def test_the_same_seed_builds_the_same_model(tokenizer):
    weights = []
    for _ in range(2):
        models.seed_everything(7)
        weights.append(models.build("xs", tokenizer).model.layers[0].mlp.up_proj.weight)
    assert torch.equal(*weights)


def test_descriptions_follow_the_recipe(saved):
    model = saved[0]
    base = models.describe(model, name="xs")
    assert (base["recipe"], base["scheme"], base["bits"]) == ("base", "bf16", 16)
    parent = SimpleNamespace(id="base-1", result=SimpleNamespace(model=base))
    low = models.describe(model, parent, step="rtn", scheme=Scheme(4, "group", 64))
    assert (low["recipe"], low["method"], low["scheme"], low["bits"]) == ("base > rtn", "rtn", "w4g64", 4)
    assert low["made_from"] == "base-1"
    # training a low-bit model makes a full-precision one
    after = models.describe(model, SimpleNamespace(id="ptq-1", result=SimpleNamespace(model=low)), step="grpo")
    assert (after["recipe"], after["scheme"], after["bits"]) == ("base > rtn > grpo", "bf16", 16)
    assert models.describe(model, SimpleNamespace(id="e", result=SimpleNamespace(model=low))) == low
