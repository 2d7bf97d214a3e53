"""Schemes and RTN: hand-computed values, properties of a grid, real byte counts, and the errors that name a layer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.quant import Scheme, SchemeError, round_to_nearest
from helpers.quant.grid import SEARCH, per_weight

SCHEMES = [
    Scheme(bits, granularity, 32, symmetric)
    for bits in (2, 3, 4, 8)
    for granularity in ("tensor", "channel", "group")
    for symmetric in (False, True)
]


def test_rtn_by_hand_asymmetric():
    # 2 bits: s = (0.9 - -0.6) / 3 = 0.5, z = round(0.6 / 0.5) = 1, codes round(w / 0.5) + 1
    q = round_to_nearest(torch.tensor([[-0.6, 0.1, 0.4, 0.9]]), Scheme(2, "channel"))
    assert q.scale.item() == 0.5
    assert q.zero.item() == 1
    assert q.codes.tolist() == [[0, 1, 2, 3]]
    assert q.dequantize().tolist() == [[-0.5, 0.0, 0.5, 1.0]]


def test_rtn_by_hand_symmetric():
    # 3 bits: s = 0.75 / 3 = 0.25, z = 4, codes round(w / 0.25) + 4 between 1 and 7
    q = round_to_nearest(torch.tensor([[-0.75, -0.3, 0.0, 0.5]]), Scheme(3, "channel", symmetric=True))
    assert q.scale.item() == 0.25
    assert q.codes.tolist() == [[1, 3, 4, 6]]
    assert q.dequantize().tolist() == [[-0.75, -0.25, 0.0, 0.5]]


@given(st.sampled_from(SCHEMES), st.integers(1, 5), st.sampled_from([8, 32, 96]), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_a_grid_keeps_zero_is_idempotent_and_errs_by_half_a_step(scheme, rows, columns, seed):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * 10 ** torch.empty(()).uniform_(-3, 1)
    weight[0, 0] = 0.0
    q = round_to_nearest(weight, scheme)
    restored = q.dequantize()
    assert restored.shape == weight.shape
    assert restored[0, 0] == 0
    assert int(q.codes.max()) < 2**scheme.bits
    steps = per_weight(q.scale.float(), weight.shape)
    # half a step, and up to half a step more at an end, where the zero point was rounded and float16 took a little of the range
    assert bool(((weight - restored).abs() <= steps * 1.01).all())
    inner = (q.codes > int(scheme.symmetric)) & (q.codes < 2**scheme.bits - 1)
    error = ((weight - restored).abs() / steps)[inner]
    assert error.numel() == 0 or float(error.max()) <= 0.5001


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_more_bits_err_less(granularity):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    errors = [
        float((round_to_nearest(weight, Scheme(b, granularity)).dequantize() - weight).norm()) for b in (2, 3, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 30


def test_smaller_groups_err_less_and_cost_more():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    found = [round_to_nearest(weight, Scheme(3, "group", size)) for size in (128, 64, 32)]
    errors = [float((q.dequantize() - weight).norm()) for q in found]
    assert errors == sorted(errors, reverse=True)
    assert [q.pack().nbytes for q in found] == sorted(q.pack().nbytes for q in found)


def test_agrees_with_pytorch_fake_quantization():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    q = round_to_nearest(weight, Scheme(4, "channel"))
    reference = torch.fake_quantize_per_channel_affine(
        weight, q.scale.float().flatten(), q.zero.flatten().to(torch.int32), 0, 0, 15
    )
    assert torch.equal(q.dequantize(), reference)


def test_constant_and_zero_rows_survive():
    weight = torch.tensor([[0.0] * 8, [0.5] * 8, [-0.5] * 8])
    for scheme in SCHEMES:
        if scheme.granularity != "tensor":
            assert torch.allclose(round_to_nearest(weight, scheme).dequantize(), weight, atol=1e-3), str(scheme)


def test_how_schemes_are_written():
    assert str(Scheme(4, "group", 64)) == "w4g64"
    assert str(Scheme(8, "tensor", symmetric=True)) == "w8pt-sym"
    assert str(Scheme(3, "channel")) == "w3pc"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Scheme(5), "bits = 5 is no scheme: choose one of 2, 3, 4, 8."),
        (lambda: Scheme(4, "row"), "granularity = 'row' is no scheme"),
        (lambda: Scheme(4, "group", 60), "group_size = 60 is no scheme"),
        (lambda: round_to_nearest(torch.randn(2, 96), Scheme(4, "group", 64)), "does not divide a row of 96"),
        (lambda: round_to_nearest(torch.tensor([[1.0, math.nan]]), Scheme(4)), "must be a finite matrix"),
        (lambda: round_to_nearest(torch.randn(8), Scheme(4)), "must be a finite matrix"),
        (lambda: round_to_nearest(torch.tensor([[1e9, -1e9]]), Scheme(2)), "beyond float16"),
    ],
)
def test_what_does_not_fit_is_named(make, sentence):
    with pytest.raises(SchemeError, match=sentence):
        make()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_searched_range_errs_less_and_importance_moves_it(bits):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    plain, searched = (round_to_nearest(weight, Scheme(bits), *shares) for shares in ((), (SEARCH,)))
    squares = [float((q.dequantize() - weight).square().sum()) for q in (plain, searched)]
    assert squares[1] < (0.7 if bits == 2 else 1) * squares[0]
    second = torch.eye(64)  # inputs 0 to 3 are large, and 0 and 1 always equal
    second[:4, :4] *= 1000.0
    second[0, 1] = second[1, 0] = 1000.0
    weighed = round_to_nearest(weight, Scheme(bits), SEARCH, second)
    differences = [q.dequantize() - weight for q in (searched, weighed)]
    errors = [float(((d @ second) * d).sum()) for d in differences]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("scheme", [Scheme(2, "group", 32), Scheme(2, "channel"), Scheme(2, "tensor")])
def test_each_grid_takes_the_share_with_the_least_output_error(scheme):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(3, 64, generator=generator), torch.randn(400, 64, generator=generator)
    second = x.T @ (x * torch.linspace(0.1, 3, 64)) / 400
    second = second @ second.T  # any positive matrix
    shares = (1.0, 0.8, 0.6)
    found = round_to_nearest(weight, scheme, shares, second)
    length = 32 if scheme.granularity == "group" else 64
    for start in range(0, 64, length):
        block = second[start : start + length, start : start + length]
        errors = []
        for share in shares:
            d = (round_to_nearest(weight, scheme, (share,)).dequantize() - weight)[:, start : start + length]
            errors.append(((d @ block) * d).sum(1))
        errors = torch.stack(errors)
        d = (found.dequantize() - weight)[:, start : start + length]
        error = ((d @ block) * d).sum(1)
        if scheme.granularity == "tensor":
            errors, error = errors.sum(1), error.sum()
        torch.testing.assert_close(error, errors.min(0).values)


@given(st.sampled_from(SCHEMES), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_a_search_is_never_worse_than_the_whole_range(scheme, seed):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    squares = [
        float((round_to_nearest(weight, scheme, *shares).dequantize() - weight).square().sum())
        for shares in ((), (SEARCH,))
    ]
    assert squares[1] <= squares[0] * 1.0001
