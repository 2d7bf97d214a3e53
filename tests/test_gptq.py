"""GPTQ against a slow one written from the paper's formula, against RTN, and on broken Hessians."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.bench import gptq as bench
from helpers.kernels import pack
from helpers.quant import Scheme, SchemeError, round_to_nearest
from helpers.quant import gptq as module
from helpers.quant.awq import output_error
from helpers.quant.gptq import prepared
from helpers.quant.grid import encode, find_grids, per_weight


def inputs(columns, tokens=2000, seed=0):
    """Correlated inputs of very different sizes, as layers have them."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    sizes = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return torch.randn(tokens, columns, generator=generator) @ (torch.eye(columns) + mix) * sizes


def gptq(weight, h, scheme, clip=True, act_order=True, damping=0.01):
    """(codes and grids, damping that it took)."""
    seen = prepared(h, act_order, damping)
    return module.gptq(weight, seen, scheme, clip), seen.damping


def hessian(x):
    return x.T @ x / len(x)


def slow_gptq(weight, h, scheme, damping=0.01):
    """Optimal brain quantization in fixed order: quantize a column, solve for the rest, drop its row and column of H (float64)."""
    w, h = weight.double().clone(), h.double() + damping * h.diagonal().mean() * torch.eye(len(h))
    scale, zero = (per_weight(x.double(), w.shape) for x in find_grids(weight, scheme))
    inverse = torch.linalg.inv(h)
    codes = torch.zeros_like(w)
    for j in range(w.shape[1]):
        codes[:, j] = (torch.round(w[:, j] / scale[:, j]) + zero[:, j]).clamp(0, 2**scheme.bits - 1)
        error = (w[:, j] - scale[:, j] * (codes[:, j] - zero[:, j])) / inverse[j, j]
        w[:, j:] -= error[:, None] * inverse[j, j:]
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
    return codes.to(torch.uint8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [64, 192])  # one block of columns, and more than one
def test_equals_the_definition(bits, columns):
    weight = torch.randn(24, columns, generator=torch.Generator().manual_seed(bits))
    h = hessian(inputs(columns))
    found, damping = gptq(weight, h, Scheme(bits, "group", 32), clip=False, act_order=False)
    same = (found.codes == slow_gptq(weight, h, Scheme(bits, "group", 32))).float().mean()
    assert damping == 0.01
    assert same > 0.995  # float32 against float64: a tie may fall to the other side, and what follows it then differs


@given(st.sampled_from([2, 3, 4]), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_independent_inputs_of_one_size_leave_nothing_to_compensate(bits, seed):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
    found, _ = gptq(weight, torch.eye(64), Scheme(bits), clip=False)
    assert torch.equal(found.codes, round_to_nearest(weight, Scheme(bits)).codes)


@given(st.sampled_from([2, 3, 4]), st.booleans(), st.booleans(), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_outputs_err_less_than_those_of_rounding(bits, act_order, symmetric, seed):
    scheme = Scheme(bits, "group", 32, symmetric)
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(seed))
    h = hessian(inputs(96, seed=seed))
    found, _ = gptq(weight, h, scheme, clip=False, act_order=act_order)
    errors = [output_error(q.dequantize() - weight, h) for q in (found, round_to_nearest(weight, scheme))]
    assert errors[0] < 0.95 * errors[1]
    assert int(found.codes.min()) >= int(symmetric)
    assert int(found.codes.max()) < 2**bits


def test_act_order_and_clip_help_on_average():
    totals = {}
    for seed in range(8):
        weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))
        h = hessian(inputs(128, seed=seed))
        for act_order, clip in ((False, False), (True, False), (True, True)):
            found, _ = gptq(weight, h, Scheme(2), clip=clip, act_order=act_order)
            error = output_error(found.dequantize() - weight, h)
            totals[act_order, clip] = totals.get((act_order, clip), 0) + error
    assert totals[True, True] < totals[True, False] < totals[False, False]


@pytest.mark.parametrize("scheme", [Scheme(2, "group", 32), Scheme(3, "channel"), Scheme(2, "tensor", symmetric=True)])
def test_a_clip_search_is_never_worse_row_by_row(scheme):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    h = hessian(inputs(64, seed=3))
    found = [gptq(weight, h, scheme, clip=clip)[0].dequantize() - weight for clip in (True, False)]
    searched, whole = (((d @ h) * d).sum(1) for d in found)
    if scheme.granularity == "tensor":
        searched, whole = searched.sum(), whole.sum()
    assert bool((searched <= whole * 1.0001).all())
    assert float(searched.sum()) < float(whole.sum())


def test_grids_stay_where_they_were_under_act_order():
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    found, _ = gptq(weight, hessian(inputs(128)), Scheme(3, "group", 32), clip=False, act_order=True)
    scale, zero = find_grids(weight, Scheme(3, "group", 32))
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.zero, zero)


def test_dead_inputs_are_rounded_and_disturb_nothing():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = inputs(64)
    x[:, 10:20] = 0
    found, damping = gptq(weight, hessian(x), Scheme(4), clip=False)
    nearest = round_to_nearest(weight, Scheme(4))
    assert damping == 0.01
    assert torch.equal(found.codes[:, 10:20], nearest.codes[:, 10:20])
    assert not torch.equal(found.codes, nearest.codes)
    everything, _ = gptq(weight, torch.zeros(64, 64), Scheme(4))
    assert torch.equal(everything.codes, nearest.codes)


def test_damping_grows_until_the_factor_exists():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = inputs(64, tokens=3)  # of rank 3
    found, damping = gptq(weight, hessian(x), Scheme(4), damping=0.0)
    assert damping > 0
    assert torch.isfinite(found.dequantize()).all()
    indefinite = torch.eye(64)
    indefinite[0, 1] = indefinite[1, 0] = 5.0
    _, damping = gptq(weight, indefinite, Scheme(4))
    assert damping == pytest.approx(10.0)
    indefinite[0, 1] = indefinite[1, 0] = 50.0
    with pytest.raises(SchemeError, match="no damping up to 10 makes the Hessian of a layer positive definite"):
        gptq(weight, indefinite, Scheme(4))


def test_constant_rows_survive():
    weight = torch.tensor([[0.0] * 64, [0.5] * 64, [-0.25] * 64])
    found, _ = gptq(weight, hessian(inputs(64)), Scheme(2))
    assert torch.allclose(found.dequantize(), weight, atol=1e-3)


def test_a_hessian_that_is_not_finite_is_refused():
    with pytest.raises(SchemeError, match="the calibration inputs of a layer are not finite"):
        gptq(torch.randn(4, 32), torch.full((32, 32), torch.nan), Scheme(4))


def test_encode_is_the_nearest_code_within_the_grid():
    weight = torch.tensor([[-1.0, -0.26, 0.24, 0.26, 3.0]])
    codes = encode(weight, torch.tensor([[0.5]]), torch.tensor([[1.0]]), Scheme(2, "channel"))
    assert codes.tolist() == [[0, 0, 1, 2, 3]]


def test_the_benchmark_measures_time_and_errors():
    whole, searched, update = bench.rows(texts=8, length=64, repeats=1)
    assert [row["work"] for row in (whole, searched, update)] == [
        "GPTQ", "GPTQ with the clip search", "GPTQ block update",
    ]  # fmt: skip
    assert searched["error"] < whole["error"] < 0.05
    assert update["error"] < 1e-6
    assert whole["target"] is None


def test_weights_of_gptqmodel_s_layers_are_read_as_they_are_laid_out():
    codes, zero = torch.randint(16, (8, 64)), torch.randint(16, (8, 2))
    scale, group = torch.rand(8, 2), torch.randint(2, (64,))
    layer = torch.nn.Module()
    layer.qweight, layer.qzeros = pack(codes, 4).T, pack(zero.T, 4)
    layer.scales, layer.g_idx = scale.T, group.int()
    assert torch.equal(bench.of_gptqmodel(layer), scale[:, group] * (codes - zero[:, group]))
