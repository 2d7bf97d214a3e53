"""The fake-quantization kernels against their reference: to the bit, on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from helpers.kernels import fake_quant as reference  # noqa: E402
from helpers.kernels.fused import fake_quant as fused  # noqa: E402
from helpers.quant.grid import find_grids  # noqa: E402
from helpers.quant.scheme import Scheme  # noqa: E402

KINDS = [torch.float32, torch.bfloat16]
SHAPES = [(7, 96), (1, 32), (33, 192), (2, 4608)]
SCHEMES = ["w2g32", "w3g32-sym", "w4pc", "w4pc-sym", "w8pt", "w8pt-sym"]


def case(scheme, shape, kind, seed=0):
    """(weight, of which some are far beyond the range, scale, zero, low, high)."""
    torch.manual_seed(seed)
    scheme = Scheme.parse(scheme)
    weight = torch.randn(shape, device=DEVICE).to(kind)
    scale, zero = find_grids(weight, scheme)
    weight = torch.where(torch.rand(shape, device=DEVICE) < 0.1, 4 * weight, weight)
    return weight, scale, zero, int(scheme.symmetric), 2**scheme.bits - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_the_reference_to_the_bit(shape, scheme, kind):
    weight, scale, zero, low, high = case(scheme, shape, kind)
    expected = reference.restored(weight, scale, zero, low, high)
    if kind == torch.bfloat16 and DEVICE == "cpu":
        kind = torch.float32  # the interpreter cuts a number to bfloat16 instead of rounding it
    for dtype in {torch.float32, kind}:
        found = fused.forward(torch.empty_like(weight, dtype=dtype), weight, scale, zero, low, high)
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize(("learned", "masked"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_the_reference(shape, scheme, learned, masked):
    weight, scale, zero, low, high = case(scheme, shape, torch.float32)
    scale = scale * (1 + 0.1 * torch.rand_like(scale, dtype=torch.float32))  # not yet rounded, as a learned one
    gradient = torch.randn_like(weight)
    found = fused.backward(gradient, weight, scale, zero, low, high, masked, learned)
    expected = reference.plain_slopes(gradient, weight, scale, zero, low, high, masked, learned)
    assert torch.equal(found[0], expected[0])
    if learned:
        assert found[1].shape == scale.shape
        assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
    else:
        assert found[1] is expected[1] is None


def test_halves_go_to_even_codes_and_a_grid_of_zeros_stays_zero():
    weight = torch.tensor([[-1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 1e30, 0.0], [0.0] * 8], device=DEVICE)
    scale = torch.tensor([[1.0], [2.0**-24]], device=DEVICE)
    found = fused.forward(torch.empty_like(weight), weight, scale, torch.full_like(scale, 4).to(torch.uint8), 0, 15)
    assert found.tolist() == [[-2.0, 0.0, 0.0, 2.0, 2.0, 4.0, 11.0, 0.0], [0.0] * 8]


def test_a_weight_that_is_no_number_stays_none():
    weight = torch.full((1, 32), float("nan"), device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    assert fused.forward(torch.empty_like(weight), weight, one, one.to(torch.uint8), 0, 3).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["w2g32", "w2g32-sym", "w3g64", "w4pc", "w4pc-sym", "w8pc"])
@pytest.mark.parametrize("shape", [(4, 64), (7, 192), (2, 4608)])
def test_grids_are_those_of_find_grids_to_the_bit(shape, scheme, kind):
    torch.manual_seed(1)
    scheme = Scheme.parse(scheme)
    weight = torch.randn(shape, device=DEVICE).to(kind) * 10 ** torch.randn(shape[0], 1, device=DEVICE).to(kind)
    weight[0] = weight[0].abs()  # a range that must be widened to zero
    weight[1] = 0
    scale, zero = find_grids(weight, scheme)
    found = torch.zeros_like(scale), torch.zeros_like(zero)
    fused.find(weight, *found, scheme.bits, scheme.symmetric)
    assert torch.equal(found[0], scale)
    assert torch.equal(found[1], zero)


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_function_gives_the_same_by_kernel_and_by_reference(kind, monkeypatch):
    """Value and both gradients; only on a GPU is there a choice."""
    weight, scale, zero, low, high = case("w4pc", (16, 96), kind)
    gradient, results = torch.randn_like(weight), []
    for switch in ("", "torch"):
        monkeypatch.setenv("LOWBIT_KERNELS", switch)
        w, s = weight.clone().requires_grad_(), scale.float().requires_grad_()
        out = reference.fake_quantize(w, s, zero, low, high, masked=True)
        results.append((out, *torch.autograd.grad(out, (w, s), gradient)))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=1e-5, atol=1e-5)
