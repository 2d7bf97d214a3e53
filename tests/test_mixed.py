"""Mixed precision: the choice by hand and against brute force, its budget, and that a model takes a scheme for each layer."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import models, quant
from helpers.quant import Mixed, Scheme, SchemeError
from helpers.quant.mixed import bytes_of, choose
from helpers.quant.sensitivity import sensitivity

TOKENIZER = models.build_tokenizer()
WIDTHS = [Scheme(b) for b in (2, 3, 4, 8)]
Q0, DOWN2 = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return models.build("xs", TOKENIZER).eval()


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [list(map(int, rng.integers(8, 50, 40))) for _ in range(10)]


def test_the_choice_by_hand():
    two, four = Scheme(2), Scheme(4)
    damage = {"a": {two: 5.0, four: 1.0}, "b": {two: 3.0, four: 0.0}, "c": {two: 1.0, four: 0.5}}
    nbytes = {name: {two: 10, four: 20} for name in damage}
    # 40 bytes: one layer of 4 bits; it helps most (4.0) in a
    assert choose(damage, nbytes, 40) == {"a": four, "b": two, "c": two}
    assert choose(damage, nbytes, 59) == {"a": four, "b": four, "c": two}
    assert choose(damage, nbytes, 60) == dict.fromkeys("abc", four)
    with pytest.raises(SchemeError, match="budget = 29 bytes is too small: the narrowest grids of all layers take 30"):
        choose(damage, nbytes, 29)
    damage["b"][four] = float("nan")
    with pytest.raises(SchemeError, match="damage of layer b is no finite number"):
        choose(damage, nbytes, 60)


@given(st.integers(0, 10_000), st.integers(2, 4), st.sampled_from([0, 1, 2]))
@settings(max_examples=25, deadline=None)
def test_no_choice_within_the_budget_is_better(seed, layers, uniform):
    rng = np.random.default_rng(seed)
    schemes = WIDTHS[:3]
    damage = {str(i): {s: float(rng.exponential() * 4.0**-s.bits) for s in schemes} for i in range(layers)}
    sizes = rng.integers(1, 5, layers) * 64
    nbytes = {str(i): {s: int(sizes[i]) * s.bits for s in schemes} for i in range(layers)}
    budget = sum(b[schemes[uniform]] for b in nbytes.values())
    found = choose(damage, nbytes, budget)

    def cost(choice):
        return sum(damage[str(i)][s] for i, s in enumerate(choice))

    def size(choice):
        return sum(nbytes[str(i)][s] for i, s in enumerate(choice))

    best = min(cost(c) for c in product(schemes, repeat=layers) if size(c) <= budget)
    chosen = [found[str(i)] for i in range(layers)]
    assert size(chosen) <= budget
    assert cost(chosen) == pytest.approx(best, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("measure", ["output_error", "kl"])
def test_mixed_keeps_the_bytes_and_is_no_worse_in_what_it_measures(model, texts, measure):
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = quant.mixed(model, "rtn", Scheme(3), texts, measure)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "the model stays as it was"
    damage, sizes = sensitivity(model, "rtn", WIDTHS, texts, measure), bytes_of(model, WIDTHS)
    assert sum(damage[n][s] for n, s in found.items()) <= sum(d[Scheme(3)] for d in damage.values()) * (1 + 1e-6)
    report = quant.quantize(model, "rtn", found, texts)
    assert [r.nbytes for r in report] == [sizes[r.name][found[r.name]] for r in report], "as counted beforehand"
    assert sum(r.nbytes for r in report) <= sum(s[Scheme(3)] for s in sizes.values())
    assert len({s.bits for s in found.values()}) > 1
    about = models.describe(model, scheme=found, name="xs")
    assert (about["scheme"], about["bits"], about["group_size"]) == ("mixed-w3g64", 3, 64)


@pytest.mark.parametrize("method", ["rtn", "rtn-clip", "gptq", "awq"])
def test_each_layer_gets_its_scheme_and_keeps_it_on_the_disk(model, texts, method, tmp_path):
    names = list(quant.linear_layers(model))
    schemes = {name: WIDTHS[i % 4] for i, name in enumerate(names)}
    report = quant.quantize(model, method, schemes, texts)
    assert [(r.name, model.get_submodule(r.name).bits) for r in report] == [(n, s.bits) for n, s in schemes.items()]
    again, _ = models.load(models.save(model, TOKENIZER, tmp_path / "model", card=""))
    ids = torch.tensor([texts[0]])
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_one_scheme_for_all_is_the_same_written_either_way(model, texts):
    torch.manual_seed(0)
    other = models.build("xs", TOKENIZER).eval()
    one = quant.quantize(model, "gptq", Scheme(3), texts)
    each = quant.quantize(other, "gptq", dict.fromkeys(quant.linear_layers(other), Scheme(3)), texts)
    assert [r.output_error for r in one] == [r.output_error for r in each]


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_layers_that_are_not_named_stay_as_they_are(model, texts, method):
    kept = {name: m.weight.clone() for name, m in quant.linear_layers(model).items() if name != DOWN2}
    (report,) = quant.quantize(model, method, {DOWN2: Scheme(2)}, texts)
    assert report.name == DOWN2
    unchanged = {name for name, w in kept.items() if torch.equal(quant.weight_of(model.get_submodule(name)), w)}
    assert kept.keys() - unchanged <= {"model.layers.2.mlp.up_proj"}  # into which awq folds a scale


@pytest.mark.parametrize(
    ("method", "schemes", "sentence"),
    [
        ("rtn", {"model.layers.9.q": Scheme(3)}, r"the schemes name layer model\.layers\.9\.q, which the model lacks"),
        ("rtn", {}, "the schemes name no layer"),
        ("rtn", {Q0: Scheme(4, numbers="nf4")}, "method = rtn cannot make scheme = nf4"),
        ("bnb", {Q0: Scheme(4, numbers="nf4")}, "method = bnb takes one scheme for all layers"),
        ("autoawq", {Q0: Scheme(4)}, "method = autoawq takes one scheme for all layers"),
    ],
)
def test_schemes_that_do_not_fit(model, method, schemes, sentence):
    with pytest.raises(SchemeError, match=sentence):
        quant.quantize(model, method, schemes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": quant.bitsandbytes(4)}, "scheme = nf4 has one width"),
        ({"widths": (2, 4)}, "bits = 3 must be one of the widths to choose from: 2, 4"),
        ({"measure": "guess"}, "measure = 'guess' is unknown: choose one of kl, output_error"),
        ({"texts": [[9, 10]]}, "a sensitivity needs at least 5 texts"),
    ],
)
def test_what_mixed_cannot_do(model, texts, change, sentence):
    given = {"method": "rtn", "budget": Scheme(3), "texts": texts} | change
    with pytest.raises(SchemeError, match=sentence):
        quant.mixed(model, **given)


def test_mixed_reads_like_a_scheme():
    found = Mixed({"a": Scheme(2), "b": Scheme(8)}, Scheme(4, "channel", symmetric=True))
    assert str(found) == "mixed-w4pc-sym"
    assert dict(found) == {"a": Scheme(2), "b": Scheme(8)}
    assert found.granularity == "channel"
