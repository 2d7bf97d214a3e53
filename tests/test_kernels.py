"""Packing: exact for any shape and width, bit for bit as documented; the layer computes what its codes stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.kernels import LowBitLinear, pack, unpack, words
from helpers.quant import Scheme, round_to_nearest

WIDTHS = st.sampled_from([2, 3, 4, 8])


@given(WIDTHS, st.integers(1, 7), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact_for_any_shape(bits, rows, columns, seed):
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, words(columns, bits))
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_32_codes_take_as_many_words_as_bits(bits):
    assert words(32, bits) == bits
    assert pack(torch.zeros(3, 32, dtype=torch.uint8), bits).shape == (3, bits)


@given(WIDTHS, st.lists(st.integers(0, 255), min_size=1, max_size=70))
@settings(max_examples=100, deadline=None)
def test_a_row_is_one_stream_of_bits_least_significant_first(bits, values):
    codes = [value % 2**bits for value in values]
    stream = sum(code << (bits * index) for index, code in enumerate(codes))
    expected = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(words(len(codes), bits))]
    packed = pack(torch.tensor([codes], dtype=torch.uint8), bits)[0]
    assert [int(word) & 0xFFFFFFFF for word in packed] == expected


@pytest.mark.parametrize(
    ("codes", "bits", "sentence"),
    [
        (torch.tensor([[4]]), 2, "a code from 4 to 4 does not fit into 2 bits"),
        (torch.tensor([[-1]]), 4, "a code from -1 to -1 does not fit"),
        (torch.tensor([[1]]), 5, "bits = 5 cannot be packed: choose one of 2, 3, 4, 8"),
        (torch.tensor([1, 2]), 4, r"codes of shape \(2,\) cannot be packed"),
        (torch.zeros(3, 0), 4, r"codes of shape \(3, 0\) cannot be packed"),
    ],
)
def test_what_cannot_be_packed(codes, bits, sentence):
    with pytest.raises(ValueError, match=sentence):
        pack(codes, bits)


@given(
    WIDTHS,
    st.sampled_from(["tensor", "channel", "group"]),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([1, 20, 32, 96, 160]),
)
@settings(max_examples=80, deadline=None)
def test_the_layer_multiplies_by_what_its_codes_stand_for(bits, granularity, symmetric, rows, columns):
    scheme = Scheme(bits, granularity, 32, symmetric)
    generator = torch.Generator().manual_seed(rows * columns)
    quantized = round_to_nearest(torch.randn(rows, columns, generator=generator), scheme)
    bias = torch.randn(rows, generator=generator)
    layer = quantized.pack(bias)
    x = torch.randn(2, 3, columns, generator=generator)
    assert torch.equal(layer.dequantize(), quantized.dequantize())
    assert torch.equal(layer(x), torch.nn.functional.linear(x, quantized.dequantize(), bias))
    codes, scale, zero = layer.unpacked()
    assert torch.equal(codes, quantized.codes)
    assert torch.equal(scale, quantized.scale)
    assert torch.equal(zero, quantized.zero)


def test_bytes_are_those_of_the_tensors_and_of_the_formula():
    layer = round_to_nearest(torch.randn(48, 128), Scheme(3, "group", 64)).pack()
    # 48 rows of 128 codes: 12 words each; 96 scales of 2 bytes; 96 zero points of 3 bits in 9 words
    assert layer.nbytes == 48 * 12 * 4 + 96 * 2 + 9 * 4
    assert layer.nbytes == sum(buffer.nbytes for buffer in layer.buffers())
    symmetric = round_to_nearest(torch.randn(48, 128), Scheme(3, "group", 64, symmetric=True)).pack()
    assert symmetric.nbytes == 48 * 12 * 4 + 96 * 2


def test_no_cast_rounds_a_scale():
    layer = round_to_nearest(torch.randn(8, 64), Scheme(4, "channel")).pack(torch.randn(8))
    before = layer.dequantize()
    layer.to(torch.bfloat16)
    assert layer.scale.dtype == torch.float16
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(), before)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16


def test_an_empty_layer_takes_a_saved_one_s_state():
    saved = round_to_nearest(torch.randn(4, 96), Scheme(2, "group", 32)).pack()
    layer = LowBitLinear(96, 4, bits=2, grids=3)
    layer.load_state_dict(saved.state_dict())
    assert torch.equal(layer.dequantize(), saved.dequantize())


def test_a_layer_without_memory_gets_some():
    layer = LowBitLinear(96, 4, bits=2, grids=3, device="meta")
    layer.to(torch.bfloat16).to_empty(device="cpu")
    assert {b.device.type for b in layer.buffers()} == {"cpu"}
    assert layer.scale.dtype == torch.float16
    saved = round_to_nearest(torch.randn(4, 96), Scheme(2, "group", 32)).pack()
    layer.load_state_dict(saved.state_dict())
    assert torch.equal(layer.dequantize(), saved.dequantize())
    assert saved.to("meta").scale.is_meta
