"""Memory: what modules hold, what a scheme costs by formula, the cache by hand, and what `lowbit memory` says."""

import json
import signal
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from helpers import cli, models, quant
from helpers.models import memory
from helpers.quant import Scheme, SchemeError, size
from helpers.quant.layers import stored_bytes

UNIFORM = [f"w{b}{g}{s}" for b in (2, 3, 4, 8) for g in ("pt", "pc", "g32", "g64") for s in ("", "-sym")]
OWN = ["nf4", "nf4-dq", "int8"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return models.build("xs", models.build_tokenizer()).eval()


def quantized(model, scheme):
    quant.quantize(model, "bnb" if scheme in OWN else "rtn", scheme)
    return model


@given(st.sampled_from(UNIFORM), st.integers(1, 70), st.sampled_from([7, 31, 32, 33, 64, 96, 100, 192]))
@settings(max_examples=150, deadline=None)
def test_the_formula_is_what_packed_tensors_hold(scheme, rows, columns):
    scheme = Scheme.parse(scheme)
    if scheme.granularity == "group" and columns > scheme.group_size and columns % scheme.group_size:
        with pytest.raises(SchemeError, match="does not divide"):
            size.stored_parts(rows, columns, scheme)
        return
    layer = quant.round_to_nearest(torch.randn(rows, columns), scheme).pack()
    assert size.stored_parts(rows, columns, scheme) == memory.stored(layer)


@pytest.mark.parametrize("shape", [(1, 64), (3, 65), (64, 192), (130, 129)])
@pytest.mark.parametrize("scheme", OWN)
def test_the_formula_is_what_bitsandbytes_holds(scheme, shape):
    from helpers.quant import bnb

    scheme = Scheme.parse(scheme)
    layer = bnb.bnb_layer(nn.Linear(shape[1], shape[0]), scheme)
    assert size.stored_parts(*shape, scheme) == memory.stored(layer)
    assert sum(memory.stored(layer)) == bnb.stored_bytes(layer)


def test_by_hand():
    # 4 bits in groups of 64: 2 x 128 codes in 32 words; 4 scales of 2 bytes, 4 zero points of 4 bits in one word
    assert size.stored_parts(2, 128, Scheme.parse("w4g64")) == (128, 12)
    # 3 bits a tensor: 33 codes are 99 bits, 4 words, in each of 3 rows; one scale and one zero point in a word
    assert size.stored_parts(3, 33, Scheme.parse("w3pt")) == (48, 6)


@pytest.mark.parametrize("scheme", ["w4g32", "w3pc-sym", "w2g64-attn", *OWN])
def test_a_packed_model_weighs_what_its_tensors_do(model, scheme):
    planned = size.planned(model, Scheme.parse(scheme))
    weights = {name: layer.weight.numel() for name, layer in quant.linear_layers(model).items()}
    total = models.count_parameters(model)
    found = models.measure(quantized(model, scheme))
    low_bit = {name: layer for name, layer in quant.linear_layers(model).items() if memory.stored(layer)}
    held = sum(map(stored_bytes, low_bit.values()))
    assert found.packed
    assert found.total_bytes == held + 2 * (total - sum(weights[name] for name in low_bit))
    assert found.effective_bits == pytest.approx(8 * held / sum(weights[name] for name in low_bit))
    assert found.total_bytes == sum(found.parts.values())
    assert planned == found.model_copy(update={"packed": False})


def test_running_a_model_does_not_change_what_it_weighs(model):
    quantized(model, "int8")  # its first forward moves the scales
    before = models.measure(model)
    model(torch.tensor([[1, 2, 3]]))
    assert models.measure(model) == before


def test_full_precision_counts_two_bytes_and_tied_embeddings_once_as_on_the_disk(model, tmp_path):
    found = models.measure(model)
    models.save(model, models.build_tokenizer(), tmp_path, card="")
    assert found.total_bytes == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert found.total_bytes == 2 * models.count_parameters(model)
    assert found.parts["embeddings"] == 2 * model.get_input_embeddings().weight.numel()
    assert (found.parts["scales"], found.effective_bits, found.packed) == (0, 16, False)


def test_untied_heads_and_biases_are_counted():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_bias=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    found = models.measure(quantized(model, "w4g32"))
    assert found.parts["embeddings"] == 2 * 2 * 50 * 32
    assert found.parts["other"] == 2 * (3 * 32 + 4 * 32)  # three norms, four biases


def test_embeddings_are_told_by_what_they_are_and_not_by_name():
    falcon = FalconForCausalLM(
        FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )  # transformer.word_embeddings, tied
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16))  # wte and wpe
    assert models.measure(falcon).parts["embeddings"] == 2 * 50 * 32
    assert models.measure(gpt2).parts["embeddings"] == 2 * (50 + 16) * 32
    assert models.measure(gpt2).parts["linear"] == 2 * 12 * 32 * 32  # of Conv1D
    inner = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    whole = models.measure(inner)
    inner.model.layers[0].add_module("embed", inner.model.layers[0].mlp)
    del inner.model.layers[0].mlp
    assert models.measure(inner) == whole


def test_the_cache_by_hand():
    grouped = Qwen2Config(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert memory.cache_bytes(grouped, 100, 5) == 2 * 3 * 2 * 8 * 100 * 5 * 2
    window = MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=16, sliding_window=64
    )
    assert memory.cache_bytes(window, 50) == 2 * 2 * 4 * 16 * 50 * 2
    assert memory.cache_bytes(window, 100) == 2 * 2 * 4 * 16 * 64 * 2
    mixed = Qwen2Config(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=10, max_window_layers=3,
    )  # fmt: skip
    assert memory.cache_bytes(mixed, 30) == 2 * 2 * 16 * (3 * 30 + 10) * 2


def test_the_cache_is_what_a_model_keeps(model):
    kept = model(torch.ones(2, 9, dtype=torch.long), use_cache=True).past_key_values
    held = sum(2 * layer.keys.numel() + 2 * layer.values.numel() for layer in kept.layers)
    assert memory.cache_bytes(model.config, 9, 2) == held


@pytest.mark.parametrize("scheme", ["w3g64", "nf4-dq", "int8"])
def test_a_saved_packed_model_is_told_from_its_configuration(model, tmp_path, scheme):
    quantized(model, scheme)
    models.save(model, models.build_tokenizer(), tmp_path, card="")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    found = size.account(str(tmp_path), None)
    measured = models.measure(model)
    assert (found["parts"], found["scheme"]) == (measured.parts, "as packed")
    assert found["effective_bits"] == measured.effective_bits


@pytest.fixture
def lowbit(monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowbit", *arguments])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as end:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        return end.value.code or 0, *capfd.readouterr()

    return call


def test_the_command_prints_parts_cache_and_total(lowbit):
    code, output, _ = lowbit("memory", "base-xs", "--scheme", "w4g64", "--tokens", "128", "--batch", "16")
    assert code == 0
    lines = {line.rsplit("  ", 1)[0].strip(): line.split()[-2:] for line in output.splitlines()[1:]}
    assert output.startswith("base-xs, w4g64: 4.31 bits a weight")
    assert lines["linear layers"] == ["72.0", "KiB"]  # 147,456 codes of 4 bits
    assert lines["cache of 16 x 128 tokens"] == ["768", "KiB"]  # 2 * 3 * 2 * 16 * 128 * 16 * 2 bytes
    code, output, _ = lowbit("memory", "base-xs", "--scheme", "w4g64", "--tokens", "128", "--batch", "16", "--json")
    found = json.loads(output)
    assert found["total_bytes"] == found["weights_bytes"] + found["cache_bytes"] == 88_256 + 768 * 1024


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["base-xs", "--scheme", "w5g64"], "bits = 5 is no scheme"),
        (["base-xs", "--scheme", "four"], "scheme = 'four' cannot be read"),
        (
            ["base-xs", "--scheme", "w4g128"],
            "layer model.layers.0.mlp.down_proj: group_size = 128 does not divide a row of 192",
        ),
        (["base-xs", "--tokens", "257"], "tokens = 257 is more than the 256 positions of the model."),
        (["base-xxs"], "The model base-xxs is unknown (is it base-xs"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(lowbit, arguments, sentence):
    code, output, errors = lowbit("memory", *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1


def test_a_packed_model_has_no_scheme_to_choose(lowbit, model, tmp_path):
    models.save(quantized(model, "w4g64"), models.build_tokenizer(), tmp_path, card="")
    code, _, errors = lowbit("memory", str(tmp_path), "--scheme", "w3g64")
    assert code == 2
    assert "packed already" in errors
    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    code, _, errors = lowbit("memory", str(tmp_path))
    assert code == 2
    assert errors.startswith(f"The configuration of {tmp_path} cannot be used:")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (GPT2Config(n_layer=1), "GPT2LMHeadModel keeps weights in Conv1D layers (transformer.h.0.attn.c_attn)"),
        (MixtralConfig(num_hidden_layers=1), "MixtralForCausalLM is a mixture of experts"),
    ],
)
def test_what_is_not_quantized_has_no_size_at_a_scheme(lowbit, tmp_path, config, sentence):
    config.save_pretrained(tmp_path)
    code, _, errors = lowbit("memory", str(tmp_path), "--scheme", "w4g64")
    assert (code, errors.startswith(sentence), errors.count("\n")) == (2, True, 1)
    assert lowbit("memory", str(tmp_path))[0] == 0


def test_what_another_software_quantized_is_not_measured(lowbit, tmp_path):
    LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(tmp_path)
    code, _, errors = lowbit("memory", str(tmp_path))
    assert code == 2
    assert errors.startswith(f"The configuration of {tmp_path} cannot be used: it is quantized by gptq")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 5}, "layer {} is described by {{'bits': 5, "),
        ({"bits": "4"}, "layer {} is described by {{'bits': '4', "),
        ({"bits": True}, "layer {} is described by "),
        ({"grids": 0}, "layer {} is described by "),
        ({"grids": 1, "per_tensor": None}, "layer {} is described by "),
        ({"grids": 2, "per_tensor": True}, "layer {} is described by "),
        ({"group_size": 32}, "layer {} is described by "),
        ({"grids": 7}, "layer {}: 7 grids do not divide a row of 64."),
        (
            "model.layers.9.up",
            "its quantization_config names layer model.layers.9.up, which is no linear layer",
        ),
        ("model.norm", "its quantization_config names layer model.norm, which is no linear layer"),
        (None, "layer {} is described by None"),
        ([], "the layers of its quantization_config must be an object"),
    ],
)
def test_a_faulty_configuration_is_one_sentence(lowbit, model, tmp_path, change, sentence):
    models.save(quantized(model, "w4g64"), models.build_tokenizer(), tmp_path, card="")
    name, file = "model.layers.0.self_attn.q_proj", tmp_path / "config.json"
    config = json.loads(file.read_text())
    layers = config["quantization_config"]["layers"]
    if change == []:
        del config["quantization_config"]["layers"]
    elif isinstance(change, str):  # another layer's name
        layers[change] = layers[name]
    else:
        layers[name] = change and layers[name] | change
    file.write_text(json.dumps(config))
    code, _, errors = lowbit("memory", str(tmp_path))
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"The configuration of {tmp_path} cannot be used: {sentence.format(name)}")
    with pytest.raises(models.CheckpointError) as error:
        models.load(tmp_path)
    assert str(error.value).startswith(f"checkpoint {tmp_path} cannot be loaded: {sentence.format(name)}")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (1_234_567, "1.18 MiB"),
        (16 * 2**30, "16.0 GiB"),
    ],
)
def test_units(count, text):
    assert size.in_units(count) == text
