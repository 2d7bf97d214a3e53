"""The low-bit product: arranged codes are the same codes, and the kernel gives what the reference does, on any shape.

Without a GPU Triton's interpreter runs the kernel, in float16 alone: it cannot multiply bfloat16.
"""

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers.kernels import LowBitLinear, lowbit_matmul
from helpers.kernels.lowbit_matmul import Layout

pytest.importorskip("triton")
from helpers.kernels.fused import lowbit_matmul as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 4e-3}  # of the weights, where these are rounded, and of the result
SHAPES = [  # rows, columns, grids: one grid a row, groups of 32, 64, 128; rows and columns that fill no block
    (40, 512, 1),
    (70, 1024, 32),
    (33, 512, 8),
    (129, 1024, 8),
    (64, 250, 1),
]
MICRO = [(64, 64, 1), (192, 64, 2), (64, 192, 6), (128, 384, 3), (8, 576, 9)]  # most are padded by more than a tenth


def layer(bits, rows, columns, grids, symmetric=False, per_tensor=False, bias=True, seed=0) -> LowBitLinear:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator).to(torch.uint8)
    shape = (1, 1) if per_tensor else (rows, grids)
    scale = (torch.rand(shape, generator=generator) + 0.5) / 2**bits
    zero = None if symmetric else torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
    found = LowBitLinear.pack(codes, scale, zero, bits, torch.randn(rows, generator=generator) if bias else None)
    return found.to(DEVICE)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_arranged_codes_are_the_same_codes(bits, shape):
    of = layer(bits, *shape)
    codes, scale, zero = of.unpacked()
    layout = Layout.of(bits, *shape)
    words = lowbit_matmul.arrange(codes, layout)
    assert words.nbytes == shape[0] * layout.padded * bits // 8
    assert torch.equal(lowbit_matmul.restore(words, layout), codes)
    table = lowbit_matmul.table(scale, zero, layout)
    assert torch.equal(lowbit_matmul.weights(words, table, layout, torch.float32), of.dequantize())
    assert torch.equal(fused.weights(words, table, layout, torch.float32), of.dequantize())


@pytest.mark.parametrize(
    ("shape", "m"), [(SHAPES[0], 1), (SHAPES[1], 5), (SHAPES[2], 16), (SHAPES[3], 40), (SHAPES[3], 1), (SHAPES[4], 130)]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_kernel_multiplies_by_what_the_codes_stand_for(bits, shape, m):
    dtype = TYPES[(bits + m) % len(TYPES)]
    of = layer(bits, *shape, symmetric=m == 5, per_tensor=shape[2] == 1 and m == 1, bias=m != 16)
    x = torch.randn(m, shape[1], device=DEVICE).to(dtype)
    expected = torch.nn.functional.linear(x.float(), of.dequantize(), None if of.bias is None else of.bias.float())
    of.arrange()
    found = fused.matmul(x, of.codes, of.table, of.layout, of.bias)
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < ROUNDING[dtype]


@pytest.mark.parametrize("shape", MICRO)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_layers_of_micro_models_have_the_kernel_too(bits, shape):
    of = layer(bits, *shape)
    x = torch.randn(3, shape[1], device=DEVICE).half()
    expected, before = torch.nn.functional.linear(x.float(), of.dequantize(), of.bias), of.nbytes
    of.arrange()
    assert of.table is not None
    found = fused.matmul(x, of.codes, of.table, of.layout, of.bias)
    assert float((found.float() - expected).norm() / expected.norm()) < ROUNDING[torch.float16]
    assert of.nbytes == before  # padding is no part of a layer's size in the study


def test_parts_of_a_row_are_added_once_each_call(monkeypatch):
    of = layer(4, 48, 4096, 32)
    x = torch.randn(3, 4096, device=DEVICE).half()
    expected = torch.nn.functional.linear(x.float(), of.dequantize(), of.bias)
    of.arrange()
    assert fused.config(3, of.layout, 132)[3] > 1
    config = fused.config
    monkeypatch.setattr(fused, "config", lambda m, layout, _: config(m, layout, 132))
    for _ in range(3):
        found = fused.matmul(x, of.codes, of.table, of.layout, of.bias)
        assert float((found.float() - expected).norm() / expected.norm()) < ROUNDING[torch.float16]
    assert not of.table[-1].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_few_rows_times_many(monkeypatch, bits, dtype):
    of = layer(bits, 530, 1024, 8)
    x = torch.randn(3, 1024, device=DEVICE).to(dtype)
    expected = torch.nn.functional.linear(x.float(), of.dequantize(), of.bias)
    of.arrange()
    config = fused.config
    monkeypatch.setattr(fused, "config", lambda m, layout, _: config(m, layout, 4))
    assert fused.config(3, of.layout, 132)[0] is fused.few
    found = fused.matmul(x, of.codes, of.table, of.layout, of.bias)
    assert float((found.float() - expected).norm() / expected.norm()) < ROUNDING[dtype]


@pytest.mark.parametrize(("bits", "shape"), [(4, (8, 480, 5)), (4, (8, 40, 5)), (3, (8, 96, 4)), (3, (8000, 1100, 1))])
def test_what_fills_no_tile_stays_as_it_is(bits, shape):
    of = layer(bits, *shape)
    assert of.layout is None
    of.arrange()
    assert of.table is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_arranged_layer_is_the_same_layer(bits):
    of = layer(bits, 40, 1024, 8)
    before, state, weight = of.unpacked(), copy.deepcopy(of.state_dict()), of.dequantize()
    x = torch.randn(2, 3, 1024, device=DEVICE)
    y = of(x)
    of.arrange()
    assert of.codes.dtype == torch.int16
    assert of.nbytes == sum(t.nbytes for t in state.values()) - of.bias.nbytes
    assert all(torch.equal(a, b) for a, b in zip(of.unpacked(), before, strict=True))
    assert torch.equal(of.dequantize(), weight)
    assert torch.allclose(of(x), y, atol=1e-4)
    assert all(torch.equal(t, state[name]) for name, t in of.state_dict().items())
    other = layer(bits, 40, 1024, 8, seed=1)
    other.arrange()
    other.load_state_dict(of.state_dict())
    assert torch.equal(other.dequantize(), weight)
    twin = copy.deepcopy(of).to("cpu").to(torch.bfloat16)
    assert twin.table is None
    assert torch.equal(twin.codes, state["codes"].cpu())
    assert torch.equal(twin.dequantize(), weight.cpu())


def test_gradients_go_through_an_arranged_layer():
    of = layer(4, 40, 512, 4)
    of.arrange()
    x = torch.randn(3, 512, device=DEVICE, requires_grad=True)
    of(x).sum().backward()
    assert torch.allclose(x.grad, of.dequantize().sum(0).expand(3, -1), atol=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("m", [1, 16, 100, 300])
def test_layers_on_a_gpu_compute_in_a_graph_as_outside(m):
    """Each layer reads what the one in front of it, a copy and a fill have written, though it is launched before they end."""
    up, down = layer(4, 20_000, 1024, 8), layer(3, 1024, 20_000, 1, seed=1)
    x, given = torch.randn(2, m, 1024, device=DEVICE, dtype=torch.bfloat16)

    def through() -> torch.Tensor:
        x.zero_()
        x.copy_(given)
        return down(up(down(up(x).relu()) / 100))

    with torch.no_grad():
        y = through()
        assert up.table is not None
        assert down.table is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = through()
        for _ in range(20):
            given.normal_()
            graph.replay()
            y = through()
            assert (
                torch.equal(again, y)
                if m < 300
                else torch.allclose(again, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))
            )
