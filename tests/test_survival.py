"""Update survival: codes, steps and directions by hand; the share of a gain that is left."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from helpers import models
from helpers.errors import UserError
from helpers.evaluation.survival import _sums, survival, survivals, update_metrics, updates
from helpers.quant import Scheme, SchemeError, bitsandbytes, linear_layers
from helpers.runs import Metric

TOKENIZER = models.build_tokenizer()


def build():
    torch.manual_seed(0)
    return models.build("xs", TOKENIZER).eval()


def tuned(size):
    model = build()
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in linear_layers(model).values():
            layer.weight.add_(size * torch.randn_like(layer.weight))
    return model


def test_by_hand():
    # 2 bits, s = (1.0 - -0.5) / 3 = 0.5: the points are -0.5, 0, 0.5, 1; of four weights, one crosses 0.25
    before = torch.tensor([[-0.5, 0.0, 0.2, 1.0]])
    update = torch.tensor([[0.0, 0.1, 0.1, 0.0]])
    sums = _sums("x", before, before + update, Scheme(2, "channel"))
    assert sums["changed_fixed"] == sums["changed_own"] == 1
    assert sums["steps"] == pytest.approx(0.4)
    assert sums["uu"] == pytest.approx(0.02)
    assert sums["uf"] == pytest.approx(0.1 * 0.5)  # the one that crossed moved by a whole step
    assert sums["ff"] == pytest.approx(0.25)


def test_a_grid_of_its_own_moves_with_the_largest_weight():
    before = torch.tensor([[-0.5, 0.0, 0.5, 1.0]])
    after = torch.tensor([[-0.5, 0.0, 0.5, 2.5]])  # on its own grid s = 1, and 1.0 is out of reach of the old one
    sums = _sums("x", before, after, Scheme(2, "channel"))
    assert sums["changed_fixed"] == 0  # the old grid ends at 1.0
    assert sums["ff"] == 0
    assert sums["oo"] > 0


def test_nothing_changed_and_everything_kept():
    same = updates(build(), build(), Scheme(4)).loc["all"]
    assert (same["step_share"], same["changed_fixed"], same["changed_own"], same["cosine_own"]) == (0, 0, 0, 0)
    large = updates(build(), tuned(0.01), Scheme(8)).loc["all"]
    assert large["changed_fixed"] > 0.9
    assert large["cosine_own"] > 0.999
    assert 0.97 < large["cosine_fixed"] < large["cosine_own"]  # the base's grids end where its own weights did


def test_fewer_bits_keep_fewer_codes_and_more_noise():
    base, rl = build(), tuned(2e-4)
    found = pd.DataFrame([updates(base, rl, Scheme(b)).loc["all"] for b in (8, 4, 3, 2)])
    for name in ("step_share", "changed_fixed", "cosine_fixed"):
        assert found[name].is_monotonic_decreasing
    assert found["size_fixed"].is_monotonic_increasing
    # where weights lie evenly between points, the share that crosses a middle is the mean |u| / s
    assert found["changed_fixed"].iloc[1] == pytest.approx(found["step_share"].iloc[1], rel=0.1)
    assert found["weights"].iloc[0] == sum(m.weight.numel() for m in linear_layers(base).values())


def test_as_metrics():
    found = update_metrics(build(), tuned(1e-3), [Scheme(4), Scheme(2)])
    assert {m.benchmark for m in found} == {"updates/w4g64", "updates/w2g64"}
    assert {m.metric for m in found} >= {"step_share", "changed_fixed", "changed_own", "cosine_fixed", "cosine_own"}
    assert all(m.n == 147_456 and m.ci_low is None for m in found)


def test_models_and_schemes_that_do_not_fit():
    with pytest.raises(SchemeError, match="scheme = nf4 has no steps of one size"):
        updates(build(), build(), bitsandbytes(4))
    with pytest.raises(SchemeError, match="do not have the same layers"):
        updates(build(), models.build("s", TOKENIZER), Scheme(4))
    other = build()
    other.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(
        SchemeError, match=r"layer model\.layers\.0\.mlp\.up_proj is \(192, 64\) in one model and \(64, 64\)"
    ):
        updates(build(), other, Scheme(4))


def accuracy(marks, problems="p"):
    return Metric(
        metric="accuracy", value=marks.count("1") / len(marks), n=len(marks), task="t", benchmark="t",
        detail={"problems": problems, "correct": marks},
    )  # fmt: skip


def test_survival_by_hand():
    base, rl, low = accuracy("1100000000" * 10), accuracy("1111111000" * 10), accuracy("1111100000" * 10)
    found = survival(base, rl, low)
    assert found.value == pytest.approx(3 / 5)
    assert (found.detail["gain"], found.detail["left"]) == pytest.approx((0.5, 0.3))
    assert found.ci_low < 0.6 < found.ci_high
    assert 0.1 < found.ci_high - found.ci_low < 0.4
    assert survival(base, rl, rl).value == 1
    assert survival(base, rl, base).value == 0
    assert survival(base, rl, accuracy("0" * 100)).value == pytest.approx(-2 / 5)  # worse than before RL


def test_no_gain_no_survival():
    with pytest.raises(UserError, match=r"training gained nothing \(1 of 4 problems gained, 1 lost\)"):
        survival(accuracy("1000"), accuracy("0100"), accuracy("0000"))
    with pytest.raises(UserError, match="the problems differ"):
        survival(accuracy("1000"), accuracy("1100"), accuracy("0000", problems="q"))


def test_lines_of_descent():
    def result(parent, recipe, made_from, marks):
        model = {"name": "s", "recipe": recipe, "scheme": "w4g64"} | ({"made_from": made_from} if made_from else {})
        return SimpleNamespace(parents=[parent], seed=0, model=model, metrics=[accuracy(marks)])

    found = survivals(
        [
            result("b", "base", None, "1100000000"),
            result("g", "base > grpo", "b", "1111110000"),
            result("q", "base > grpo > rtn", "g", "1111100000"),
            result("h", "base > dr_grpo", "b", "1100000000"),  # gained nothing
            result("r", "base > dr_grpo > rtn", "h", "1000000000"),
            result("z", "base > rtn", "b", "1000000000"),  # no training between
        ],
        "t",
    )
    assert list(found["survival"]) == ["0.75"]
    assert list(found["gain"]) == ["+0.400"]
