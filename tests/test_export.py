"""Exports: each layout decoded bit by bit from its definition, each file read by the format's own software, and what is refused.

What needs gptqmodel is in `crosscheck/test_exports.py`.
"""

import json
import signal
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from helpers import cli, models, quant
from helpers.models.lowbit import low_bit_layers
from helpers.quant import Scheme, bnb
from helpers.quant.export import ExportError, awq, compressed_tensors, export, folder, gptq
from helpers.quant.export.grids import kind_of, told_apart

IDS = torch.tensor([[3, 8, 9, 10, 20, 21, 4, 30, 31, 8]])
UNIFORM = [Scheme.parse(f"w{b}{g}{s}") for b in (2, 3, 4, 8) for g in ("pt", "pc", "g32", "g64") for s in ("", "-sym")]


def make(scheme, method="rtn"):
    """base-xs, quantized, with its tokenizer."""
    model, tokenizer = models.load("base-xs")
    quant.quantize(model, method, scheme)
    return model, tokenizer


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Folder of base-xs quantized by a scheme, and the logits of what is in it."""
    made = {}

    def find(scheme, method="rtn"):
        if scheme not in made:
            path = tmp_path_factory.mktemp("packed") / scheme
            models.save(*make(scheme, method), path, card="")
            with torch.no_grad():
                made[scheme] = path, models.load(path)[0](IDS).logits
        return made[scheme]

    return find


def difference(logits, reference):
    return float((logits.float() - reference.float()).norm() / reference.float().norm())


# Slow decoders, written from the definition of each layout: one bit at a time, and nothing shared with the code that packs.


def bit(words, index):
    """Bit `index` of a list of 32-bit words, least significant bit of the first word first."""
    return (int(words[index // 32]) >> (index % 32)) & 1


def number(words, position, bits):
    """The code at `position` of a stream of `bits`-bit codes."""
    return sum(bit(words, position * bits + k) << k for k in range(bits))


def decode_gptq(tensors, settings):
    """W[row][column] = scales[group, row] * (q - z); z is stored less one unless the format is gptq_v2."""
    bits, shift = settings["bits"], 0 if settings["checkpoint_format"] == "gptq_v2" else 1
    rows, columns = tensors["scales"].shape[1], len(tensors["g_idx"])
    weight = torch.zeros(rows, columns)
    for row in range(rows):
        stream = tensors["qweight"][:, row].tolist()
        for column in range(columns):
            group = int(tensors["g_idx"][column])
            zero = number(tensors["qzeros"][group].tolist(), row, bits) + shift
            weight[row, column] = tensors["scales"][group, row].float() * (number(stream, column, bits) - zero)
    return weight


def decode_awq(tensors, settings):
    """Word w of a line holds outputs 8 w .. 8 w + 7; output 8 w + o is in nibble [0, 4, 1, 5, 2, 6, 3, 7][o]."""
    place = [0, 4, 1, 5, 2, 6, 3, 7]
    columns, words = tensors["qweight"].shape
    size = columns if settings["group_size"] == -1 else settings["group_size"]
    weight = torch.zeros(words * 8, columns)
    for row in range(words * 8):
        word, shift = row // 8, 4 * place[row % 8]
        for column in range(columns):
            code = (int(tensors["qweight"][column, word]) >> shift) & 15
            zero = (int(tensors["qzeros"][column // size, word]) >> shift) & 15
            weight[row, column] = tensors["scales"][column // size, row].float() * (code - zero)
    return weight


def decode_compressed_tensors(tensors, settings):
    """Codes and zero points are signed and stored plus 2^(b-1): codes along a row, zero points down a column."""
    kind = settings["config_groups"]["group_0"]["weights"]
    bits, (rows, columns) = kind["num_bits"], tensors["weight_shape"].tolist()
    size = kind["group_size"] or columns
    weight = torch.zeros(rows, columns)
    for row in range(rows):
        stream = tensors["weight_packed"][row].tolist()
        for column in range(columns):
            group, code, zero = column // size, number(stream, column, bits) - 2 ** (bits - 1), 0
            if not kind["symmetric"]:
                zero = number(tensors["weight_zero_point"][:, group].tolist(), row, bits) - 2 ** (bits - 1)
            weight[row, column] = tensors["weight_scale"][row, group].float() * (code - zero)
    return weight


DECODERS = {
    "gptq": (gptq, decode_gptq),
    "awq": (awq, decode_awq),
    "compressed-tensors": (compressed_tensors, decode_compressed_tensors),
}


@pytest.mark.parametrize("format", DECODERS)
@given(scheme=st.sampled_from(UNIFORM), shape=st.sampled_from([(32, 64), (64, 32), (32, 128)]), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_the_layout_decodes_to_our_weights(format, scheme, shape, seed):
    module, decode = DECODERS[format]
    torch.manual_seed(seed)
    weight = torch.randn(shape) + torch.randn(shape[0], 1)  # off centre: zero points of all sizes, 0 among them
    layer = quant.round_to_nearest(weight, scheme).pack()
    layers = {"model.layers.0.up": layer}
    kind = kind_of(layers)
    if module.objection(kind, layers):
        assert format == "awq"
        assert scheme.bits != 4
        return
    kind = module.written(kind, layers)
    tensors = module.tensors(layer, kind)
    assert all(t.dtype == torch.int32 for n, t in tensors.items() if "scale" not in n and n != "weight_shape")
    assert torch.equal(decode(tensors, module.config(kind, layers, [])), layer.dequantize())


@given(scheme=st.sampled_from(UNIFORM), rows=st.integers(1, 40), columns=st.sampled_from([5, 31, 33, 64, 75]))
@settings(max_examples=25, deadline=None)
def test_compressed_tensors_holds_any_shape(scheme, rows, columns):
    assume(scheme.granularity != "group" or columns < scheme.group_size or columns % scheme.group_size == 0)
    layer = quant.round_to_nearest(torch.randn(rows, columns), scheme).pack()
    kind = kind_of({"up": layer})
    tensors = compressed_tensors.tensors(layer, kind)
    decoded = decode_compressed_tensors(tensors, compressed_tensors.config(kind, {}, []))
    assert torch.equal(decoded, layer.dequantize())


def test_a_group_shorter_than_others_cuts_those():
    scheme = Scheme.parse("w4g128")
    wide, narrow = (quant.round_to_nearest(torch.randn(8, n), scheme).pack() for n in (256, 64))
    kind = kind_of({"wide": wide, "narrow": narrow})
    assert (kind.name, kind.group_size) == ("w4g128", 64)
    for layer in (wide, narrow):
        found = decode_gptq(gptq.tensors(layer, kind), gptq.config(kind, {}, []))
        assert torch.equal(found, layer.dequantize())


@pytest.mark.parametrize("scheme", ["w4g64", "w3g32-sym", "w2pc", "w8pt", "w4g32-sym-attn", "w3g64-attn"])
def test_transformers_reads_compressed_tensors(packed, tmp_path, scheme):
    path, reference = packed(scheme)
    out = export(str(path), "compressed-tensors", tmp_path / "out")
    for dtype, limit in (
        (torch.float16, 5e-3),
        (torch.float32, 1e-3),
    ):  # asymmetric ones are rounded to float16 by the reader
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
        assert model.dtype == dtype
        with torch.no_grad():
            assert difference(model(IDS).logits, reference) < (
                1e-5 if "sym" in scheme and dtype == torch.float32 else limit
            )


@pytest.mark.slow  # the package's own kernel for CPUs takes seconds
@pytest.mark.parametrize("scheme", ["w4g64", "w4pc-sym", "w4pt", "w4g32-attn"])
def test_autoawq_reads_awq(packed, tmp_path, monkeypatch, scheme):
    import awq.models.base
    import awq.modules.linear.gemm
    from awq import AutoAWQForCausalLM

    monkeypatch.setattr(awq.models.base, "get_best_device", lambda: "cpu:0")  # it would look for a GPU
    monkeypatch.setattr(awq.modules.linear.gemm, "TRITON_AVAILABLE", False)
    path, reference = packed(scheme)
    out = export(str(path), "awq", tmp_path / "out")
    where = {"fuse_layers": False, "device_map": {"": "cpu"}, "torch_dtype": torch.float16}
    model = AutoAWQForCausalLM.from_quantized(str(out), **where).model
    assert sum(hasattr(m, "qweight") for m in model.modules()) == (12 if "attn" in scheme else 21)
    with torch.no_grad():
        assert difference(model(IDS).logits, reference) < 5e-3


@pytest.mark.parametrize("scheme", ["nf4", "nf4-dq", "int8"])
def test_transformers_reads_bnb(packed, tmp_path, scheme):
    path, reference = packed(scheme, "bnb")
    out = export(str(path), "bnb", tmp_path / "out")
    half, plain = models.load(path, dtype=torch.bfloat16)[0], AutoModelForCausalLM.from_pretrained(out)
    bnb.guard(plain)
    with torch.no_grad():
        assert torch.equal(models.load(out)[0](IDS).logits, reference)
        assert torch.equal(plain(IDS).logits, half(IDS).logits)
        assert scheme == "int8" or difference(plain(IDS).logits, reference) < 1.5e-2  # int8 rounds what comes in, too


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_what_is_in_the_folder(packed, tmp_path, format):
    path, _ = packed("w4g32-attn")
    out = export(str(path), format, tmp_path / "new" / "out")
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    tensors = load_file(out / "model.safetensors")
    assert not any("lm_head" in name for name in tensors)  # tied to the embeddings
    assert {t.dtype for name, t in tensors.items() if name.endswith(("norm.weight", "embed_tokens.weight"))} == {
        torch.float16
    }
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.0.self_attn.q_proj.weight" not in tensors
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert config["quantization_config"]["quant_method"] == format
    assert str(tmp_path) not in "".join(p.read_text() for p in out.glob("*.json"))
    card = (out / "README.md").read_text()
    for part in (
        "w4g32-attn",
        f"in the format {format}",
        "AutoModelForCausalLM.from_pretrained",
        folder.FORMATS[format].READERS,
    ):
        assert part in card
    chat = [{"role": "user", "content": "1+2"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == "<user>1+2"


def test_biases_and_untied_heads_are_kept(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    quant.quantize(model, "rtn", "w4g32-sym")
    models.save(model, models.build_tokenizer(), tmp_path / "packed", card="")
    loaded, _ = models.load(tmp_path / "packed")
    out = export(str(tmp_path / "packed"), "compressed-tensors", tmp_path / "out")
    assert "lm_head.weight" in load_file(out / "model.safetensors")
    with torch.no_grad():
        reference = loaded(IDS).logits
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(IDS).logits
    assert difference(found, reference) < 1e-5


def test_4_bit_rows_are_cut_into_groups_and_others_are_not():
    layers = {n: quant.round_to_nearest(torch.randn(8, n), Scheme.parse("w4pc")).pack() for n in (64, 192)}
    kind = kind_of(layers)
    assert (kind.group_size, gptq.written(kind, layers).group_size, awq.written(kind, layers).group_size) == (
        -1,
        64,
        64,
    )
    assert compressed_tensors.written(kind, layers).group_size == -1
    layers = {n: quant.round_to_nearest(torch.randn(32, n), Scheme.parse("w3pc")).pack() for n in (64, 192)}
    assert gptq.written(kind_of(layers), layers).group_size == -1


def test_others_may_read_what_is_written(packed, tmp_path):
    path, _ = packed("w4g64")
    out = export(str(path), "gptq", tmp_path / "out")
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {(out / "README.md").stat().st_mode & 0o777}


def test_names_are_told_apart():
    kept, others = ["lm_head", "model.layers.0.mlp.up", "model.layers.1.mlp.up"], ["model.layers.0.self_attn.q"]
    assert told_apart(kept, others) == ["lm_head", "mlp.up"]
    assert told_apart(kept[1:2], [*others, "model.layers.1.mlp.up"]) == ["model.layers.0.mlp.up"]


@pytest.mark.parametrize(
    ("scheme", "format", "sentence"),
    [
        ("w3g64", "awq", "awq cannot hold w3g64: it has 4 bits only; gptq and compressed-tensors can."),
        ("w4g64", "bnb", "bnb cannot hold w4g64: it has no uniform grids; gptq, awq and compressed-tensors can."),
        ("nf4-dq", "gptq", "gptq cannot hold nf4-dq: it has uniform grids only; bnb can."),
        ("int8", "awq", "awq cannot hold int8: it has uniform grids only; bnb can."),
        ("w4g64", "gguf", "format = gguf is unknown: choose one of gptq, awq, compressed-tensors, bnb."),
    ],
)
def test_a_format_that_cannot_hold_it_names_those_that_can(packed, tmp_path, scheme, format, sentence):
    path, _ = packed(scheme, "bnb" if scheme in ("nf4-dq", "int8") else "rtn")
    with pytest.raises(ExportError) as error:
        export(str(path), format, tmp_path / "out")
    assert str(error.value) == sentence
    assert not list(tmp_path.iterdir())


def test_rows_that_do_not_fill_words_are_named(tmp_path):
    layers = {"model.layers.0.up": quant.round_to_nearest(torch.randn(40, 64), Scheme.parse("w3g32")).pack()}
    found = gptq.objection(kind_of(layers), layers)
    assert (
        found
        == "the 40 outputs of model.layers.0.up do not fill whole words of 3-bit codes (it needs a multiple of 32)"
    )
    layers = {"up": quant.round_to_nearest(torch.randn(12, 64), Scheme.parse("w4g32")).pack()}
    assert awq.objection(kind_of(layers), layers).startswith("the 12 outputs of up do not fill whole words")
    assert not compressed_tensors.objection(kind_of(layers), layers)


def test_layers_of_several_schemes_are_refused(packed, tmp_path):
    model, tokenizer = make("w4g64")
    name, layer = next(iter(low_bit_layers(model).items()))
    model.set_submodule(name, quant.round_to_nearest(layer.dequantize(), Scheme.parse("w8pc")).pack())
    quant.methods.mark(model, Scheme.parse("w4g64"))
    models.save(model, tokenizer, tmp_path / "mixed", card="")
    with pytest.raises(ExportError, match="its layers differ in bits or symmetry, and a format holds one scheme"):
        export(str(tmp_path / "mixed"), "gptq", tmp_path / "out")


def test_full_precision_has_nothing_to_export(tmp_path):
    with pytest.raises(ExportError, match=r"There is nothing to export: base-xs is in full precision\."):
        export("base-xs", "gptq", tmp_path / "out")


def test_an_adapter_is_not_left_behind(tmp_path):
    from peft import LoraConfig, get_peft_model

    base, tokenizer = make("nf4", "bnb")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    models.save(adapted, tokenizer, tmp_path / "adapted", card="")
    with pytest.raises(ExportError, match="has an adapter beside its weights"):
        export(str(tmp_path / "adapted"), "bnb", tmp_path / "out")


def test_a_folder_that_is_used_stays_as_it_is(packed, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(ExportError, match="is there already"):
            export(str(packed("w4g64")[0]), "gptq", out)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (export(str(packed("w4g64")[0]), "gptq", tmp_path / "empty") / "config.json").is_file()


def test_nothing_is_left_of_an_export_that_fails(packed, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "save_torch_state_dict", full)
    for out in (tmp_path / "out", tmp_path / "new" / "deep" / "out"):
        with pytest.raises(folder.records.DiskFull):
            export(str(packed("w4g64")[0]), "gptq", out)
        assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(packed, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ExportError) as error:
        export(str(packed("w4g64")[0]), "gptq", tmp_path / "file" / "out")
    assert str(error.value) == f"{tmp_path / 'file' / 'out'} cannot be written: Not a directory."
    monkeypatch.setattr(folder.os, "rename", lambda made, out: made.read_text())  # whose error has the hidden name
    with pytest.raises(ExportError) as error:
        export(str(packed("w4g64")[0]), "gptq", tmp_path / "new" / "out")
    assert str(error.value) == f"{tmp_path / 'new' / 'out'} cannot be written: Is a directory."
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_to_an_empty_folder_leads_there(packed, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert export(str(packed("w4g64")[0]), "gptq", tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "config.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link"]


def test_the_command_says_where_it_is(packed, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["lowbit", "export", str(packed("w4g64")[0]), "--format", "gptq", "--out", "served"]
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    assert end.value.code in (0, None)
    assert capfd.readouterr().out == "served\n"
    assert (tmp_path / "served" / "model.safetensors").is_file()
