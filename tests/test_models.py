"""Micro models, their tokenizer and checkpoints."""

import json
import logging
import os
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from helpers import models, project, quant, runs
from helpers.models import checkpoint, lowbit
from helpers.models.device import tensor_cores
from helpers.models.micro import CHARACTERS, MARKS
from helpers.quant import Scheme
from machinery import make


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


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_are_for_whom_the_umask_says(tokenizer, tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        folder = models.save(models.build("xs", tokenizer), tokenizer, tmp_path / "model", card="")
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {oct(mode)}


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


@pytest.fixture
def packed(saved):
    """Folder of a model in 4 bits, and a function that changes its tensors there."""
    model, folder = saved
    quant.quantize(model, "rtn", "w4g64")
    models.save(model, models.build_tokenizer(), folder, card="")

    def change(**tensors):
        file = folder / "model.safetensors"
        held = {**load_file(file), **{f"model.layers.0.{name}": tensor for name, tensor in tensors.items()}}
        save_file({name: t for name, t in held.items() if t is not None}, file, metadata={"format": "pt"})

    return folder, change


def configure(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    "own",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"bits": 4},
    ],
)
def test_what_another_software_quantized_is_refused(saved, own):
    configure(saved[1], quantization_config=own)
    with pytest.raises(models.CheckpointError) as error:
        models.load(saved[1])
    kind = own.get("quant_method", "software that it does not name")
    assert str(error.value) == (
        f"checkpoint {saved[1]} cannot be loaded: it is quantized by {kind}, which is not read here: "
        "start from the full-precision model or a run of this project."
    )


def test_old_configurations_of_bitsandbytes_have_no_name():
    config = SimpleNamespace(quantization_config={"load_in_4bit": True})
    config.get_text_config = lambda: config
    assert lowbit.quantized_by(config) == "bitsandbytes"
    whole = SimpleNamespace(get_text_config=lambda: SimpleNamespace(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(lowbit.PackingError, match="quantized by fp8"):  # the language model of a larger one
        lowbit.quantized_by(whole)


def test_tensors_that_nothing_asks_for_are_refused(saved):
    file = saved[1] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old checkpoints have it: harmless
    save_file(tensors, file, metadata={"format": "pt"})
    models.load(saved[1])
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        models.CheckpointError, match=r"has 1 tensors that its configuration has no place for, .*up_proj\.weight_scale"
    ):
        models.load(saved[1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"symmetric": True}, r"has 1 tensors that its .* no place for, .* model\.layers\.0\.mlp\.up_proj\.zero\."),
        ({"bits": 8}, r"has 2 tensors of another shape than .* says, .* model\.layers\.0\.mlp\.up_proj\.codes\."),
        ({"grids": 2}, r"has 2 tensors of another shape than .* says, .* model\.layers\.0\.mlp\.up_proj\.scale\."),
        (
            {"per_tensor": True},
            r"has 2 tensors of another shape than .* says, .* model\.layers\.0\.mlp\.up_proj\.scale\.",
        ),
        (None, r"lacks 1 tensors, .* model\.layers\.0\.mlp\.up_proj\.weight\."),
    ],
)
def test_a_packed_layer_that_is_not_what_is_said_of_it_is_refused(packed, change, sentence):
    own = json.loads((packed[0] / "config.json").read_text())["quantization_config"]
    name = "model.layers.0.mlp.up_proj"
    kind = own["layers"].pop(name)
    if change:
        own["layers"][name] = kind | change
    configure(packed[0], quantization_config=own)
    with pytest.raises(models.CheckpointError, match=sentence):
        models.load(packed[0])


def test_a_packed_layer_that_is_not_whole_is_refused(packed):
    folder, change = packed
    change(**{"mlp.up_proj.zero": None})
    with pytest.raises(models.CheckpointError, match=r"lacks 1 tensors, .*up_proj\.zero"):
        models.load(folder)


def test_a_scale_that_is_no_number_means_a_damaged_checkpoint(packed):
    folder, change = packed
    scale = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.scale"]
    scale[3] = float("nan")
    change(**{"mlp.up_proj.scale": scale})
    with pytest.raises(models.CheckpointError, match=r"up_proj\.scale: it is damaged, make the run again\.$"):
        models.load(folder)


@pytest.mark.parametrize(
    ("scheme", "table"), [("nf4", "weight.absmax"), ("nf4-dq", "weight.nested_absmax"), ("int8", "SCB")]
)
def test_so_it_does_in_a_layer_of_bitsandbytes(saved, scheme, table):
    model, folder = saved
    quant.quantize(model, "bnb", scheme)
    models.save(model, models.build_tokenizer(), folder, card="")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{table}"][0] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        models.CheckpointError, match=r"in model\.layers\.0\.mlp\.up_proj: it is damaged, make the run again"
    ):
        models.load(folder)


def test_saving_what_awq_made_changes_nothing(tmp_path):
    """It folds scales into norms and biases, which are kept in bfloat16."""
    model, tokenizer = models.load("base-xs")
    texts = torch.randint(3, 40, (12, 40), generator=torch.Generator().manual_seed(0)).tolist()
    quant.quantize(model, "awq", "w3g64", texts)
    ids = torch.tensor(texts[:2])
    with torch.no_grad():
        before = model(ids).logits
        models.save(model, tokenizer, tmp_path, card="")
        assert torch.equal(model(ids).logits, before)
        assert torch.equal(models.load(tmp_path)[0](ids).logits, before)


def test_a_parent_that_has_been_changed_is_refused(home, tmp_path):
    path = make(size="s").path
    assert runs.load_parent(path.name).path == path
    (path / "notes.txt").write_text("mine")  # not the run's
    (path / "metrics.jsonl").unlink()  # published runs lack files
    assert runs.load_parent(path.name).path == path
    weights = path / "model" / "model.safetensors"
    weights.write_bytes(bytes(255 - byte for byte in weights.read_bytes()))
    for ref in (path.name, str(path), str(path / "model")):
        with pytest.raises(runs.RunError) as error:
            runs.load_parent(ref)
        assert str(error.value).startswith(f"The parent {ref} has been changed since it was made (")
        assert str(error.value).endswith("model.safetensors): make it again with `lowbit run base -p size=s`.")


def test_shipped_and_published_runs_are_as_they_were_made(tmp_path):
    shipped = project.SHIPPED / "base-xs"
    assert runs.load_parent("base-xs").path == shipped
    copy = shutil.copytree(shipped, tmp_path / "copy")
    (copy / "run.ipynb").write_text("{}")  # looked at in Jupyter
    assert runs.load_parent(str(copy)).id == runs.load_parent("base-xs").id
    configure(copy / "model", tie_word_embeddings=False)
    with pytest.raises(runs.RunError, match=r"has been changed since it was made \(.*config\.json\)"):
        runs.load_parent(str(copy))


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


def test_a_model_in_a_folder_goes_by_the_folder_s_name(saved, tmp_path, monkeypatch):
    mine = saved[1].rename(tmp_path / "my-model")
    monkeypatch.chdir(mine)
    for ref in (str(mine), "."):
        assert models.describe(saved[0], runs.load_parent(ref))["name"] == "my-model"
    hub = runs.RunRef("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert models.describe(saved[0], hub)["name"] == "Qwen3-0.6B"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection."),
            "couldn't connect",
        ),
        (OSError("You are trying to access a gated repo.\nMake sure to have access to it."), "a gated repo"),
        (OSError("Qwen/Qwen9 is not a local folder and is not a valid model identifier.\nLog in."), "not a valid"),
    ],
)
def test_a_model_that_no_hub_gives_is_one_sentence(monkeypatch, error, said):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(models.CheckpointError) as raised:
        models.load("Qwen/Qwen9")
    assert str(raised.value).startswith(
        "checkpoint Qwen/Qwen9 cannot be loaded (there is no such folder here, and no such"
    )
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_not_told_of_at_each_attempt():
    models.seed_everything(0)
    assert not logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)


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


def test_float32_products_are_tf32_on_a_gpu_alone_and_only_inside(monkeypatch):
    for on_gpu, inside in ((False, "highest"), (True, "high")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        with suppress(ZeroDivisionError), tensor_cores():
            assert torch.get_float32_matmul_precision() == inside
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "highest"
