"""Quantizing whole models: what is replaced, what is reported, the order of the methods, and every refusal."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers import models, quant, sampling
from helpers.kernels import LowBitLinear
from helpers.quant import Scheme, SchemeError, gptq, methods


@pytest.fixture(scope="module")
def base():
    models.seed_everything(0)
    model, tokenizer = models.load("base-xs", device=torch.device("cpu"))
    return model, tokenizer, sampling.calibration_texts("traces", model, tokenizer, 100)


def quantized(base, method, scheme, **settings):
    model = copy.deepcopy(base[0])
    return model, quant.quantize(model, method, scheme, base[2], **settings)


def error(report):
    return sum(r.output_error for r in report) / len(report)


@pytest.mark.parametrize("scheme", ["w2g64", "w3g64", "w4g64", "w3pc", "w4pt"])
def test_what_looks_at_the_inputs_errs_less(base, scheme):
    errors = {method: error(quantized(base, method, scheme)[1]) for method in ("rtn", "rtn-clip", "awq", "gptq")}
    assert errors["gptq"] < errors["awq"] < errors["rtn"]
    assert errors["gptq"] < errors["rtn-clip"] < errors["rtn"]


def test_linear_layers_alone_become_low_bit_and_bytes_add_up(base):
    model, report = quantized(base, "rtn", "w3g64")
    low_bit = {name for name, m in model.named_modules() if isinstance(m, LowBitLinear)}
    assert low_bit == {r.name for r in report} == set(quant.linear_layers(base[0]))
    assert len(report) == 3 * 7
    for name, parameter in base[0].named_parameters():
        if "_proj" not in name:
            assert torch.equal(parameter, model.get_parameter(name))
    memory = models.measure(model)
    weights = sum(r.shape[0] * r.shape[1] for r in report)
    rest = models.count_parameters(base[0]) - weights
    assert memory.packed
    assert memory.total_bytes == sum(r.nbytes for r in report) + 2 * rest
    assert memory.effective_bits == pytest.approx(8 * sum(r.nbytes for r in report) / weights)
    # rows of 64 or 192 weights: 3 bits, a float16 scale and a 3-bit zero point for each 64
    assert memory.effective_bits == pytest.approx(3 + 19 / 64, abs=0.01)


def test_attention_alone(base):
    model, report = quantized(base, "gptq", "w4g64-attn")
    assert {r.name.split(".")[-2] for r in report} == {"self_attn"}
    assert len(report) == 3 * 4
    assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)


@pytest.mark.parametrize(
    ("method", "scheme"), [("gptq", "w2g64"), ("awq", "w3pc-sym"), ("rtn", "w8pt"), ("bnb", "nf4-dq")]
)
def test_what_is_saved_is_what_was_measured(base, method, scheme, tmp_path):
    model, report = quantized(base, method, scheme)
    models.save(model, base[1], tmp_path, card="A test.")
    again, _ = models.load(tmp_path)
    ids = torch.tensor([base[2][0]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert models.measure(again) == models.measure(model)
    for layer in report:
        assert torch.equal(
            quant.weight_of(again.get_submodule(layer.name)), quant.weight_of(model.get_submodule(layer.name))
        )


def test_the_last_layer_s_error_by_another_way(base):
    """The reported output error of RTN equals that of outputs computed by hand on the held-out texts."""
    model, report = quantized(base, "rtn", "w3g64")
    name = "model.layers.0.self_attn.q_proj"
    found = []
    hook = base[0].get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
    with torch.no_grad():
        for ids in base[2][4::5]:
            base[0](torch.tensor([ids]))
    hook.remove()
    x, before, after = torch.cat(found), base[0].get_submodule(name), model.get_submodule(name)
    with torch.no_grad():
        expected = (after(x) - before(x)).norm() / before(x).norm()
    assert next(r for r in report if r.name == name).output_error == pytest.approx(float(expected), rel=1e-3)


def test_without_texts_outputs_are_not_measured(base):
    model = copy.deepcopy(base[0])
    report = quant.quantize(model, "rtn", "w4g64")
    assert all(r.output_error is None and r.weight_error > 0 for r in report)
    assert [m.metric for m in quant.layer_error(report)] == ["weight_error"]
    assert "output error" in quant.report_table(report).columns


def nan_weights(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    return model


def huge_weight(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, :2] = torch.tensor([3e6, -3e6])
    return model


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def says_quantized(model):
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def odd_row(model):
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(100, 64, bias=False)
    return model


def already(model):
    quant.quantize(model, "rtn", "w4g64")
    return model


def already_bnb(model):
    quant.quantize(model, "bnb", "nf4")
    return model


@pytest.mark.parametrize(
    ("spoil", "method", "scheme", "texts", "sentence"),
    [
        (None, "gptqq", "w4g64", None, "method = 'gptqq' is unknown: choose one of rtn, rtn-clip, gptq"),
        (None, "gptq", "w5g64", None, "bits = 5 is no scheme: choose one of 2, 3, 4, 8"),
        (None, "gptq", "four", None, "scheme = 'four' cannot be read: write w4g64"),
        (None, "gptq", "nf4", None, "method = gptq cannot make scheme = nf4: it makes uniform grids"),
        (None, "bnb", "w4g64", None, "method = bnb cannot make scheme = w4g64: it makes nf4"),
        (
            None,
            "autoawq",
            "w3g64",
            None,
            "method = autoawq cannot make scheme = w3g64: it makes w4g32, w4g64 and w4g128",
        ),
        (None, "gptq", "w4g64", [], "method = gptq has 0 tokens to calibrate on, and the widest layer has 192 inputs"),
        (None, "awq", "w4g64", [[5] * 40] * 4, "method = awq has 160 tokens to calibrate on"),
        (
            nan_weights,
            "rtn",
            "w4g64",
            None,
            r"layer model\.layers\.1\.mlp\.up_proj: its weights hold a NaN or an infinity",
        ),
        (
            odd_row,
            "rtn",
            "w4g64",
            None,
            r"layer model\.layers\.1\.mlp\.down_proj: group_size = 64 does not divide a row of 100",
        ),
        (
            already,
            "rtn",
            "w4g64",
            None,
            r"the model is quantized already \(layer model\.layers\.0\.self_attn\.q_proj\)",
        ),
        (already_bnb, "gptq", "w4g64", None, "the model is quantized already"),
    ],
)
def test_refusals_come_before_anything_is_changed(base, spoil, method, scheme, texts, sentence):
    model = copy.deepcopy(base[0])
    model = spoil(model) if spoil else model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SchemeError, match=sentence):
        quant.quantize(model, method, scheme, base[2] if texts is None else texts)
    if texts is None:
        with pytest.raises(SchemeError, match=sentence):
            quant.check(model, method, scheme)
    after = model.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(after[k].float(), before[k].float()) or "up_proj" in k for k in before)


def test_conv1d_and_experts_are_refused_by_name():
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    with pytest.raises(
        SchemeError, match=r"GPT2LMHeadModel keeps weights in Conv1D layers \(transformer\.h\.0\.attn\.c_attn\)"
    ):
        quant.quantize(GPT2LMHeadModel(GPT2Config(**small)), "rtn", "w4g32")
    config = Qwen3MoeConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(SchemeError, match="Qwen3MoeForCausalLM is a mixture of experts"):
        quant.quantize(Qwen3MoeForCausalLM(config), "rtn", "w4g32")


def test_mixed_schemes_are_written_and_read():
    for text in ("w4g64", "w3g128-sym", "w8pt", "w2pc-attn", "nf4", "nf4-dq", "int8", "nf4-attn"):
        assert str(Scheme.parse(text)) == text
    assert quant.bitsandbytes(4, double=True) == Scheme.parse("nf4-dq")
    with pytest.raises(SchemeError, match=r"bits = 3: bitsandbytes has 4 \(NF4\) and 8 \(LLM.int8\)"):
        quant.bitsandbytes(3)
    with pytest.raises(SchemeError, match="double = True is for nf4 alone"):
        quant.bitsandbytes(8, double=True)


@pytest.mark.parametrize(("method", "scheme"), [("rtn", "w3g64"), ("bnb", "nf4"), ("bnb", "int8")])
def test_a_packed_model_has_as_many_weights_as_before(base, method, scheme):
    assert models.count_parameters(quantized(base, method, scheme)[0]) == models.count_parameters(base[0])


def test_a_setting_that_the_method_does_not_read_is_refused():
    quant.refuse_unread("gptq", {"method", "parent", "bits", "damping", "act_order", "granularity"})
    quant.refuse_unread("bnb", {"method", "double", "targets"})
    for method, name in (
        ("bnb", "symmetric"),
        ("rtn", "double"),
        ("awq", "damping"),
        ("autoawq", "granularity"),
        ("merge", "mixed"),
    ):
        with pytest.raises(
            SchemeError, match=f"{name} means nothing to method = {method}: leave it as it is, or choose"
        ):
            quant.refuse_unread(method, {"parent", name})


def test_the_example_of_a_report_is_in_the_original_model_s_terms(base):
    for method in ("rtn", "awq", "autoawq"):
        _, report = quantized(base, method, "w4g64")
        before, after = report[0].example
        assert torch.equal(before, base[0].get_submodule(report[0].name).weight.flatten()[:64])
        assert float((after - before).norm() / before.norm()) < 0.25


def test_scales_below_float16_s_full_precision_are_noted(base):
    model = copy.deepcopy(base[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-5)
    report = quant.quantize(model, "rtn", "w8g64")
    assert [r.name for r in report if r.note] == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("damping", [-1, 20, float("nan")])
def test_damping_that_makes_no_sense_is_refused(base, damping):
    with pytest.raises(SchemeError, match=f"damping = {damping} is not allowed: it must be 0 or more, and at most 10"):
        quantized(base, "gptq", "w4g64", damping=damping)


def test_seconds_hold_what_layers_with_the_same_inputs_share(base, monkeypatch):
    """On a clock that only factorizations move, each by a second: four a block."""
    now = [0.0]

    def slow(*args):
        now[0] += 1
        return gptq.prepared(*args)

    monkeypatch.setattr(methods, "perf_counter", lambda: now[0])
    monkeypatch.setattr(methods, "prepared", slow)
    model, report = quantized(base, "gptq", "w4g64", clip=False)
    assert sum(r.seconds for r in report) == now[0] == 4 * len(model.model.layers)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_layer_that_is_never_called_is_named(base, method):
    model = copy.deepcopy(base[0])
    model.model.layers[0].mlp.spare = torch.nn.Linear(64, 64)
    with pytest.raises(SchemeError, match=r"the model never calls model\.layers\.0\.mlp\.spare, so"):
        quant.quantize(model, method, "w4g64", base[2])
