"""BitsAndBytes and AutoAWQ: the packages' own results, read out exactly, saved and loaded, with their traps shut."""

import contextlib
import copy

import bitsandbytes as nf
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from helpers import models
from helpers.quant import Scheme, SchemeError, autoawq, bnb

FORMATS = ("nf4", "nf4-dq", "int8")


def relative(found, expected):
    """The error of a tensor relative to the other's size."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def linear(rows, columns, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=bias)


def low_bit(model, scheme):
    """The model's low-bit version by bitsandbytes, marked, and its low-bit layers by name."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            model.set_submodule(name, bnb.bnb_layer(layer, scheme))
    bnb.mark(model, scheme)
    return {n: m for n, m in model.named_modules() if isinstance(m, nf.nn.Linear4bit | nf.nn.Linear8bitLt)}


# BitsAndBytes


def test_nf4_by_hand():
    # the largest weight of a block is +-1 on the table, zero is on it; the values are those of QLoRA, appendix E
    layer = linear(1, 64)
    layer.weight.data.zero_()
    layer.weight.data[0, :4] = torch.tensor([-2.0, 1.5, 0.1, 1.2])
    restored = bnb.dequantized(bnb.bnb_layer(layer, Scheme.parse("nf4")))
    assert restored[0, :5].tolist() == pytest.approx([-2.0, 2 * 0.7229568, 2 * 0.0795803, 2 * 0.5626170, 0.0], abs=1e-6)


def test_int8_by_hand():
    layer = linear(3, 4)
    layer.weight.data = torch.tensor([[1.27, -0.5, 0.014, 0.016], [0, 0, 0, 0], [-2, 2, 1, 0.0]])
    module = bnb.bnb_layer(layer, Scheme.parse("int8"))
    assert module.weight.tolist() == [[127, -50, 1, 2], [0, 0, 0, 0], [-127, 127, 64, 0]]  # 63.5 goes to the even code
    assert bnb.dequantized(module)[2].tolist() == pytest.approx([-2, 2, 128 / 127, 0])


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (30, 50), (7, 6)])  # whole blocks, a tail, and less than one block
def test_a_layer_of_any_shape_computes_from_its_codes(scheme, shape):
    layer = linear(*shape, bias=True)
    module = bnb.bnb_layer(layer, Scheme.parse(scheme))
    weight, x = bnb.dequantized(module), torch.randn(5, shape[1])
    assert weight.shape == shape
    assert weight.dtype == torch.float32
    assert relative(weight, layer.weight) < (0.01 if scheme == "int8" else 0.12)
    expected, found = nn.functional.linear(x, weight, layer.bias), module(x)
    tolerance = 0.02 if scheme == "int8" else 1e-5  # LLM.int8 rounds x too
    assert relative(found, expected) < tolerance
    assert torch.equal(bnb.dequantized(module), weight)  # also after a forward
    assert not any(p.requires_grad for p in module.parameters())


def test_llm_int8_multiplies_a_channel_with_an_outlier_in_full():
    layer = linear(16, 64)
    module = bnb.bnb_layer(layer, Scheme.parse("int8"))
    x = torch.randn(4, 64).clamp(-3, 3)
    x[0, 7] = 60.0  # with 8 bits for it, its row's step would be 0.47
    expected = x @ bnb.dequantized(module).T
    assert relative(module(x)[0], expected[0]) < 0.005
    alone = module(x[1:2])
    assert not torch.equal(alone[0], module(x)[1])  # channel 7 is full precision for the others of the batch as well


def test_bytes_are_those_of_the_tensors():
    nf4, double, int8 = (bnb.bnb_layer(linear(64, 128), Scheme.parse(s)) for s in FORMATS)
    assert bnb.stored_bytes(nf4) == 64 * 64 + 4 * 128 + 4 * 16  # nibbles, 128 maxima, the table
    assert (
        bnb.stored_bytes(double) == 64 * 64 + 128 + 4 + 4 + 4 * 16 + 4 * 256
    )  # 8-bit maxima, their maximum, mean, two tables
    assert bnb.stored_bytes(int8) == 64 * 128 + 4 * 64
    tail = bnb.bnb_layer(linear(5, 13), Scheme.parse("nf4"))
    assert (
        bnb.stored_bytes(tail, tables=False) == 33 + 4 * 2
    )  # 65 weights: a byte for the last nibble, a block for the last weight


def test_bits_a_weight_and_when_double_quantization_pays():
    def bits(scheme, rows, columns, tables=True):
        module = bnb.bnb_layer(linear(rows, columns), Scheme.parse(scheme))
        return 8 * bnb.stored_bytes(module, tables) / (rows * columns)

    assert bits("nf4", 1024, 1024) == pytest.approx(4.5, abs=1e-3)
    assert bits("nf4-dq", 1024, 1024) == pytest.approx(
        4.127 + 8 * 1092 / 2**20, abs=1e-3
    )  # the tables are 0.008 bits of it
    assert bits("nf4-dq", 64, 64, tables=False) < bits("nf4", 64, 64, tables=False)
    assert bits("nf4-dq", 64, 64) > bits("nf4", 64, 64)  # the second table costs more than it saves
    assert bits("nf4-dq", 160, 140) < bits("nf4", 160, 140)  # 22,400 weights


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("size", ["base-xs", "base-s"])
def test_the_same_as_transformers_makes_and_as_it_loads(size, scheme, tmp_path):
    model, _ = models.load(size)
    source = model.name_or_path
    layers = low_bit(model, Scheme.parse(scheme))
    assert len(layers) == 7 * model.config.num_hidden_layers
    ids = torch.randint(8, 50, (3, 40), generator=torch.Generator().manual_seed(0))
    config = model.config.quantization_config
    assert config.llm_int8_skip_modules == ["lm_head"]
    peer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=copy.deepcopy(config))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    logits = model(ids).logits
    for other in (peer, again):
        bnb.guard(other)
        for name, module in layers.items():
            twin = other.get_submodule(name)
            assert type(twin) is type(module)
            assert torch.equal(bnb.dequantized(twin), bnb.dequantized(module))
            assert bnb.stored_bytes(twin) == bnb.stored_bytes(module)
        assert torch.equal(other(ids).logits, logits)


def test_layers_that_stay_are_named_and_stay_after_a_reload(tmp_path):
    model, _ = models.load("base-xs")
    kept = "model.layers.1.mlp.down_proj"
    scheme = Scheme.parse("nf4")
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name not in ("lm_head", kept):
            model.set_submodule(name, bnb.bnb_layer(layer, scheme))
    bnb.mark(model, scheme)
    assert sorted(model.config.quantization_config.llm_int8_skip_modules) == ["lm_head", kept]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    bnb.guard(again)
    assert type(again.get_submodule(kept)) is nn.Linear
    ids = torch.arange(10, 40)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_survive_a_forward_on_a_cpu_with_avx512_bf16(monkeypatch):
    # such a CPU says yes when a layer is built, and its kernel, which other CPUs lack, is left out
    monkeypatch.setattr(nf.nn.modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(nf, "matmul_4bit", lambda x, w, bias, quant_state: x.new_zeros(*x.shape[:-1], 64))
    layer, x = linear(64, 128), torch.zeros(1, 128)
    open_ = nf.nn.Linear4bit(128, 64, False, torch.float32, compress_statistics=False, quant_type="nf4")
    open_.weight = nf.nn.Params4bit(layer.weight.data, requires_grad=False, **open_.weight.__dict__).to("cpu")
    before = bnb.dequantized(open_)
    codes = open_.weight.data.clone()
    guarded = bnb.bnb_layer(layer, Scheme.parse("nf4"))
    assert torch.equal(bnb.dequantized(guarded), before)

    open_.eval()(x)  # the trap: the codes are others now
    assert not torch.equal(open_.weight.data.flatten(), codes.flatten())
    with pytest.raises(SchemeError, match="repacked by a forward"):
        bnb.guard(nn.Sequential(open_))

    guarded.eval()(x)
    assert torch.equal(bnb.dequantized(guarded), before)
    assert not nf.nn.Linear4bit(128, 64).support_avx512bf16_for_cpu  # a reload's layers are built like this


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: bnb.bnb_layer(linear(4, 8), Scheme(4)),
            "scheme = w4g64 is no format of bitsandbytes: choose one of nf4",
        ),
        (
            lambda: bnb.bnb_layer(nn.Conv1d(4, 4, 1), Scheme.parse("nf4")),
            "a Conv1d cannot be quantized by bitsandbytes",
        ),
        (
            lambda: bnb.bnb_layer(bnb.bnb_layer(linear(4, 8), Scheme.parse("nf4")), Scheme.parse("nf4")),
            "a Linear4bit cannot be quantized by bitsandbytes: it must be a full-precision",
        ),
        (lambda: bnb.stored_bytes(linear(4, 8)), "a Linear is no layer of bitsandbytes"),
    ],
)
def test_what_bitsandbytes_cannot_do_is_named(make, sentence):
    with pytest.raises(SchemeError, match=sentence):
        make()


@pytest.mark.parametrize(("scheme", "value"), [("nf4", torch.nan), ("nf4-dq", torch.inf), ("int8", 1e5)])
def test_weights_that_are_not_finite_are_refused(scheme, value):
    layer = linear(4, 64)
    layer.weight.data[1, 1] = value
    with pytest.raises(SchemeError, match="must be finite"):
        bnb.bnb_layer(layer, Scheme.parse(scheme))


# AutoAWQ


def texts(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 60, (n,), generator=generator).tolist()
    return [torch.randint(8, 50, (length,), generator=generator).tolist() for length in lengths]


def filled(model, result):
    """A copy of the model with what AutoAWQ made of it."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in result.others.items():
            parameters[name].copy_(tensor)
        for name, q in result.layers.items():
            model.get_submodule(name).weight.copy_(q.dequantize())
    return model


def worst_error(model, result):
    return max(relative(result.restored(name), model.get_submodule(name).weight) for name in result.layers)


@pytest.mark.slow
def test_autoawq_is_read_out_exactly(monkeypatch, capfd, recwarn):
    model, _ = models.load("base-xs")
    before = copy.deepcopy(model.state_dict())
    own, read_out = {}, autoawq.read_out

    def spy(module, scheme, device=None):
        from awq.utils.packing_utils import dequantize_gemm  # here, where the package's banner has been kept quiet

        found = read_out(module, scheme, device)
        own[found] = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, 64).t()
        return found

    monkeypatch.setattr(autoawq, "read_out", spy)
    capfd.readouterr()
    result = autoawq.autoawq(model, Scheme.parse("w4g64"), texts())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert capfd.readouterr() == ("", "")
    assert [str(w.message) for w in recwarn.list] == []

    assert list(result.layers) == [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    for q in result.layers.values():
        groups = q.codes.shape[1] // 64
        assert (q.codes.dtype, q.scale.dtype, q.zero.dtype) == (torch.uint8, torch.float16, torch.uint8)
        assert q.scale.shape == q.zero.shape == (q.codes.shape[0], groups)
        assert int(q.codes.max()) <= 15
        exact = (q.codes.half() - q.zero.half().repeat_interleave(64, 1)) * q.scale.repeat_interleave(64, 1)
        assert torch.equal(exact, own[q])
    assert worst_error(model, result) < 0.15

    # grouped-query attention: no scale between v and o. The norms are scaled, and up_proj by its rows for down_proj
    assert result.skipped == tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(3))
    assert not torch.equal(
        result.others["model.layers.0.input_layernorm.weight"], model.model.layers[0].input_layernorm.weight
    )
    up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
    assert torch.equal(result.output_scale[up], result.input_scale[down])
    assert bool((result.output_scale[down] == 1).all())

    ids = torch.randint(8, 50, (3, 40), generator=torch.Generator().manual_seed(1))
    ours = filled(model, result)
    logits = ours(ids).logits
    for name, q in result.layers.items():
        ours.get_submodule(name).weight.data = own[q].float()
    assert relative(ours(ids).logits, logits) < 1e-3  # their product is rounded to float16


@pytest.mark.parametrize("guarded", [True, False])
def test_a_search_for_scales_leaves_the_weights_alone(guarded, monkeypatch):
    if not guarded:  # what the package does by itself on a CPU
        monkeypatch.setattr(autoawq, "cloned_state", lambda module: contextlib.nullcontext())
    with autoawq._quiet():
        search = object.__new__(autoawq._quantizer([]))
    search.w_bit, search.group_size, search.zero_point, search.duo_scaling = 4, 32, True, True
    search.n_parallel_calib_samples, search.max_chunk_memory = None, 2**30
    layer, x = linear(8, 64), torch.randn(10, 64) * torch.rand(64)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        scale = search._compute_best_scale(x, before.abs().mean(0), x.abs().mean(0), layer, [layer], layer(x))
    assert scale.shape == (64,)
    assert torch.equal(layer.weight, before) == guarded
    assert "state_dict" not in vars(layer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # Llama without grouped queries: v and o are a pair; Qwen2: biases
def test_scales_between_layers_and_biases(kind):
    torch.manual_seed(0)
    shape = dict(vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4)).eval()
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=4)).eval()
        for name in ("q_proj", "k_proj", "v_proj"):
            nn.init.normal_(model.model.layers[0].self_attn.get_submodule(name).bias)
    result = autoawq.autoawq(model, Scheme(4, "group", 32), texts(12), clip=False)
    assert result.skipped == ()
    v, o = (f"model.layers.0.self_attn.{name}_proj" for name in "vo")
    assert torch.equal(result.output_scale[v], result.input_scale[o])
    assert worst_error(model, result) < 0.2
    if kind == "qwen2":
        restored = result.others[f"{v}.bias"].float() * result.output_scale[v]
        assert torch.allclose(restored, model.model.layers[0].self_attn.v_proj.bias, rtol=2e-3)
    # in the model's own terms: weights whose scales were taken out again, with the original norms, are the same function
    plain = copy.deepcopy(model)
    for name in result.layers:
        plain.get_submodule(name).weight.data = result.restored(name)
    ids = torch.randint(8, 50, (2, 30))
    found, expected = filled(model, result)(ids).logits, plain(ids).logits
    assert relative(found, expected) < 2e-3  # biases went through float16


@pytest.mark.slow
def test_calibration_texts_are_counted():
    model, _ = models.load("base-xs")
    result = autoawq.autoawq(model, Scheme(4), [[9] * 40, [10] * 70, [11] * 30], clip=False, block=64)
    assert (result.tokens, result.dropped) == (
        64,
        70 + 6,
    )  # one text is longer than a block; 70 tokens are one block and a rest
    result = autoawq.autoawq(model, Scheme(4), [[9, 10, 11] * 4], clip=False)
    assert (result.tokens, result.dropped) == (12, 0)  # one short block


@pytest.mark.parametrize("scheme", ["w3g64", "w4pc", "w4g64-sym", "w4g64-attn", "nf4"])
def test_schemes_that_autoawq_lacks(scheme):
    model = models.build("xs", models.build_tokenizer())
    with pytest.raises(SchemeError, match=rf"cannot make {scheme}: .* choose one of w4g32, w4g64, w4g128\."):
        autoawq.autoawq(model, Scheme.parse(scheme), texts(2))


def test_what_autoawq_cannot_do_is_named():
    model = models.build("xs", models.build_tokenizer())
    first = r"layer model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(SchemeError, match=rf"{first} of 64 x 64 does not fit w4g128 in AutoAWQ: .* columns one of 128"):
        autoawq.autoawq(model, Scheme(4, "group", 128), texts(2))
    with pytest.raises(SchemeError, match="can use none of 2 calibration texts: block = 16 allows 1 to 16 tokens each"):
        autoawq.autoawq(model, Scheme(4), texts(2), block=16)
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(SchemeError, match=f"{first} has weights that are not finite"):
        autoawq.autoawq(model, Scheme(4), texts(2))
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = 0.0
    low_bit(model, Scheme.parse("int8"))
    with pytest.raises(SchemeError, match="quantized already: start from its full-precision parent"):
        autoawq.autoawq(model, Scheme(4), texts(2))
    model.config.model_type = "gpt2"
    with pytest.raises(SchemeError, match="type 'gpt2' here: choose one of llama"):
        autoawq.autoawq(model, Scheme(4), texts(2))
