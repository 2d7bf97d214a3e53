"""Where QAT starts: weights and grids of each start, parents that go on, and those that do not fit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers import models, sampling
from helpers.quant import Scheme, fake, linear_layers, mixed, quantize
from helpers.training import student

SCHEME = Scheme(3, "group", 32)


@pytest.fixture(scope="module")
def base():
    return models.load("base-xs")


@pytest.fixture(scope="module")
def texts(base):
    return sampling.calibration_texts("corpus", *base, 40)


@pytest.fixture
def model(base):
    return copy.deepcopy(base[0])


def codes_of(model):
    return {name: layer.unpacked()[0] for name, layer in linear_layers(model).items()}


def shifted(model):
    """A model as training leaves it: latent weights off the points of their grid."""
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in fake.layers(model).values():
            layer.weight.add_(0.3 * layer.scale.float().mean() * torch.randn_like(layer.weight))
    return model


def test_grids_that_are_found_again_forget_where_they_began_and_say_so(model, texts, capsys):
    other = copy.deepcopy(model)
    student.prepare(model, "gptq", SCHEME, texts)
    assert capsys.readouterr().out == ""
    student.prepare(other, "gptq", SCHEME, texts, grids="step")
    said = "grids = step finds grids anew at each step: of init = gptq only the weights are kept, not its grids.\n"
    assert capsys.readouterr().out == said
    for name, layer in fake.layers(model).items():
        again = fake.layers(other)[name]
        assert torch.equal(again.weight, layer.weight)  # GPTQ's codes
    pairs = [
        (layer.quantized().scale, fake.layers(other)[name].quantized().scale)
        for name, layer in fake.layers(model).items()
    ]
    assert not all(torch.equal(kept, found) for kept, found in pairs)


@pytest.mark.parametrize("grids", ["fixed", "learned"])  # found again at each step, they are of the weights as they are
def test_full_and_rtn_compute_the_same_and_start_from_other_weights(grids, model):
    other = copy.deepcopy(model)
    weights = {name: layer.weight.clone() for name, layer in linear_layers(model).items()}
    student.prepare(model, "full", SCHEME, grids=grids)
    student.prepare(other, "rtn", SCHEME, grids=grids)
    for name, layer in fake.layers(model).items():
        rtn = fake.layers(other)[name]
        assert torch.equal(layer.weight, weights[name])
        assert torch.equal(layer.quantized().codes, rtn.quantized().codes)
        assert torch.equal(layer.quantized_weight(), rtn.quantized_weight())
        assert torch.equal(rtn.weight, rtn.quantized_weight())
    assert fake.layers(model).keys() == fake.layers(other).keys() == weights.keys()
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_method_gives_its_codes_and_its_grids(method, model, texts):
    packed = copy.deepcopy(model)
    quantize(packed, method, SCHEME, texts)
    student.prepare(model, method, SCHEME, texts)
    assert fake.differing(fake.codes(model), codes_of(packed)) == 0
    ids = torch.tensor([texts[0]])
    assert torch.equal(model(ids).logits, packed(ids).logits)
    assert all(p.requires_grad for layer in fake.layers(model).values() for p in layer.parameters())
    model(ids).logits.sum().backward()


def test_learned_scales_are_of_the_model(model, texts):
    student.prepare(model, "gptq", SCHEME, texts, grids="learned", masked=True)
    names = {name for name, _ in model.named_parameters() if name.endswith("log_scale")}
    assert names == {f"{name}.log_scale" for name in fake.layers(model)}
    assert all(layer.masked for layer in fake.layers(model).values())


def test_16_bits_are_full_precision(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert student.prepare(model, "full", None) is None
    assert not fake.layers(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    quantize(model, "rtn", SCHEME)
    weights = {name: layer.dequantize() for name, layer in linear_layers(model).items()}
    student.prepare(model, "full", None)  # what a quantized parent's codes stand for
    assert all(type(layer) is nn.Linear for layer in linear_layers(model).values())
    assert all(torch.equal(layer.weight, weights[name]) for name, layer in linear_layers(model).items())


@pytest.mark.parametrize("method", ["rtn-clip", "gptq"])
def test_a_quantized_parent_goes_on_from_its_own_codes(method, model, texts):
    quantize(model, method, SCHEME, texts if method == "gptq" else ())
    ids, codes = torch.tensor([texts[0]]), codes_of(model)
    logits = model(ids).logits
    assert student.prepare(model, "parent", SCHEME, grids="learned") == SCHEME
    assert fake.differing(fake.codes(model), codes) == 0
    assert torch.equal(model(ids).logits, logits)


def test_a_trained_parent_goes_on_from_its_latent_weights(model):
    student.prepare(model, "full", SCHEME)
    shifted(model)
    latent = {name: layer.weight.detach().clone() for name, layer in fake.layers(model).items()}
    fake.pack(model)
    codes = codes_of(model)
    student.prepare(model, "parent", SCHEME, latents=latent)
    assert all(torch.equal(layer.weight, latent[name]) for name, layer in fake.layers(model).items())
    assert fake.differing(fake.codes(model), codes) == 0


@pytest.mark.parametrize(
    "asked",
    [
        replace(SCHEME, bits=2),
        replace(SCHEME, bits=4),
        replace(SCHEME, group_size=64),
        replace(SCHEME, symmetric=True),
        replace(SCHEME, granularity="channel"),
        replace(SCHEME, granularity="tensor"),
        replace(SCHEME, targets="attention"),
    ],
    ids=str,
)
def test_a_parent_on_another_grid_is_refused(asked, model):
    quantize(model, "rtn", SCHEME)
    with pytest.raises(student.StudentError, match=str(asked)) as error:
        student.prepare(model, "parent", asked)
    assert "\n" not in str(error.value)


def test_a_parent_with_fewer_layers_is_refused(model):
    quantize(model, "rtn", replace(SCHEME, targets="attention"))
    with pytest.raises(
        student.StudentError, match=r"the parent has 12 quantized layers, which are not those of w3g32\."
    ):
        student.prepare(model, "parent", SCHEME)


def test_a_parent_of_mixed_precision_keeps_its_widths(model, texts):
    chosen = mixed(model, "rtn", SCHEME, texts)
    quantize(model, "rtn", chosen)
    bits = {name: layer.bits for name, layer in linear_layers(model).items()}
    assert len(set(bits.values())) > 1
    codes = codes_of(model)
    for wrong in (4, 8, 2):
        with pytest.raises(
            student.StudentError, match=f"the parent has 3 bits a weight, and the scheme is w{wrong}g32"
        ):
            student.prepare(copy.deepcopy(model), "parent", replace(SCHEME, bits=wrong))
    assert str(student.prepare(model, "parent", SCHEME)) == "mixed-w3g32"
    assert {name: layer.scheme.bits for name, layer in fake.layers(model).items()} == bits
    assert fake.differing(fake.codes(model), codes) == 0
    latent = {name: layer.weight.detach().clone() for name, layer in fake.layers(shifted(model)).items()}
    fake.pack(model)
    student.prepare(model, "parent", SCHEME, latents=latent)
    assert {name: layer.scheme.bits for name, layer in fake.layers(model).items()} == bits


@pytest.mark.parametrize("quantized", ["rtn", "bnb"])
@pytest.mark.parametrize("init", ["full", "rtn", "gptq", "awq"])
def test_a_quantized_parent_is_nothing_to_quantize_again(init, quantized, model, texts):
    quantize(model, quantized, SCHEME if quantized == "rtn" else "nf4")
    with pytest.raises(student.StudentError, match=f"init = {init} does not fit a parent that is quantized already"):
        student.prepare(model, init, SCHEME, texts)


def test_what_does_not_fit_is_one_sentence(model):
    for init, scheme, sentence in (
        ("zero", SCHEME, r"init = 'zero' is unknown: choose one of full, rtn, gptq, awq, parent\."),
        (
            "parent",
            SCHEME,
            r"init = parent needs a parent with packed codes: otherwise choose full, rtn, gptq or awq\.",
        ),
        ("gptq", None, r"init = gptq does not fit bits = 16: training in full precision starts from init = full\."),
        ("parent", None, r"init = parent does not fit bits = 16"),
    ):
        with pytest.raises(student.StudentError, match=sentence):
            student.prepare(model, init, scheme)
    quantize(model, "bnb", "nf4")
    with pytest.raises(student.StudentError, match="init = parent needs a parent with packed codes"):
        student.prepare(model, "parent", SCHEME)
