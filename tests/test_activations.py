"""Simulated low-bit activations and cache: rounding by hand, straight-through gradients, and where the hooks sit."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import models, sampling, tasks
from helpers.models import activations
from helpers.quant import Scheme, fake, linear_layers, quantize


@pytest.fixture(scope="module")
def base():
    return models.load("base-xs")


@pytest.fixture
def model(base):
    return copy.deepcopy(base[0])


IDS = torch.tensor([[3, 9, 10, 44, 12, 4, 5, 20, 21]])


def test_by_hand():
    """4 bits over 0..15 has a step of 1; over -1..2 of 0.2; a row of equal numbers stays."""
    x = torch.tensor([[0.0, 15.0, 7.4, 7.6, 0.4], [-1.0, 2.0, -0.11, 0.0, 0.05], [3.0] * 5, [0.0] * 5])
    expected = torch.tensor([[0.0, 15.0, 7.0, 8.0, 0.0], [-1.0, 2.0, -0.2, 0.0, 0.0], [3.0] * 5, [0.0] * 5])
    assert torch.allclose(activations.rounded(x, 4), expected, atol=1e-6)


@given(st.integers(0, 1000), st.sampled_from([4, 8]), st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_ends_stay_points_are_few_and_errors_are_half_a_step(seed, bits, size):
    torch.manual_seed(seed)
    x = size * torch.randn(3, 2, 500)
    found = activations.rounded(x, bits)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    assert ((found - x).abs() <= 0.501 * step).all()
    assert torch.allclose(found.amin(-1), x.amin(-1))
    assert torch.allclose(found.amax(-1), x.amax(-1))
    points = (found - low) / step
    assert torch.allclose(points, points.round(), atol=1e-2)


def test_each_row_has_a_grid_of_its_own_and_a_type_stays():
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    together = activations.rounded(x, 4)
    assert torch.equal(together[2], activations.rounded(x[2], 4))
    for dtype in (torch.bfloat16, torch.float16):
        assert activations.rounded(x.to(dtype), 4).dtype == dtype
        assert torch.isfinite(activations.rounded(1e-5 * x.to(dtype), 4)).all()


def test_the_gradient_is_that_of_the_identity():
    x = torch.randn(2, 3, 8, requires_grad=True)
    upstream = torch.randn(2, 3, 8)
    (activations.rounded(x, 4) * upstream).sum().backward()
    assert torch.equal(x.grad, upstream)


def test_16_bits_leave_the_model_as_it_is_and_hooks_can_be_removed(model):
    plain = model(IDS).logits
    assert activations.simulate(model) == []
    assert torch.equal(model(IDS).logits, plain)
    hooks = activations.simulate(model, 4, 4)
    assert not torch.equal(model(IDS).logits, plain)
    for hook in hooks:
        hook.remove()
    assert torch.equal(model(IDS).logits, plain)


def test_fewer_bits_change_more(model):
    """How far logits are from those of the model as it is."""
    plain, far = model(IDS).logits.detach(), {}
    for bits in ((8, 16), (16, 8), (8, 8), (4, 16), (16, 4), (4, 4)):
        hooks = activations.simulate(model, *bits)
        far[bits] = float((model(IDS).logits.detach() - plain).norm() / plain.norm())
        for hook in hooks:
            hook.remove()
    assert 0 < far[8, 8] < 0.05
    assert far[8, 8] < far[4, 4] < 0.8
    assert far[8, 16] < far[4, 16]
    assert far[16, 8] < far[16, 4]


def test_inputs_of_every_linear_layer_of_the_decoder_and_not_of_the_head(model):
    inputs = {}
    for name, layer in linear_layers(model).items():
        layer.register_forward_pre_hook(lambda module, args, name=name: inputs.__setitem__(name, args[0]))
    head = []
    model.lm_head.register_forward_pre_hook(lambda module, args: head.append(args[0]))
    model(IDS)
    plainly = {name: x[0, 0].unique().numel() for name, x in inputs.items()}
    assert min(plainly.values()) > 16
    for layer in linear_layers(model).values():
        layer._forward_pre_hooks.clear()
    activations.simulate(model, 4)
    for name, layer in linear_layers(model).items():  # what a hook after ours is given
        layer.register_forward_pre_hook(lambda module, args, name=name: inputs.__setitem__(name, args[0]))
    model(IDS)
    for x in inputs.values():
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        points = 15 * (x - low) / (high - low)
        assert torch.allclose(points, points.round(), atol=1e-3)
    assert head[-1][0, 0].unique().numel() > 16


def test_keys_are_rounded_before_the_rotation_and_each_head_by_itself(model):
    """Of what the cache holds: values lie on 16 points a head and token; keys do, turned back."""
    activations.simulate(model, cache_bits=4)
    kept = {}
    attention = model.model.layers[0].self_attn
    attention.k_norm.register_forward_hook(lambda module, args, out: kept.__setitem__("keys", out))
    cache = model(IDS, use_cache=True).past_key_values
    values = cache.layers[0].values  # (1, heads, T, head_dim)
    for x in (values, kept["keys"]):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        points = 15 * (x - low) / (high - low)
        assert torch.allclose(points, points.round(), atol=1e-3)
    keys = cache.layers[0].keys
    assert torch.allclose(keys[0, :, 0], kept["keys"][0, 0], atol=1e-6)  # position 0 is not turned
    assert not torch.allclose(keys[0, :, 1], kept["keys"][0, 1], atol=1e-3)


@pytest.mark.parametrize("bits", [(4, 16), (16, 4), (4, 4), (8, 8)])
def test_with_a_cache_the_replies_are_those_without(bits, model, base):
    """Each token has a grid of its own, so it is the same whichever tokens came with it."""
    tokenizer = base[1]
    activations.simulate(model, *bits)
    problems = tasks.load("arithmetic", "test", 3)
    replies = sampling.sample(model, tokenizer, problems, max_new_tokens=16, batch_size=1)
    for head, reply in zip(sampling.prompt_ids(tokenizer, problems), replies, strict=True):
        ids = torch.tensor([head + list(reply.ids)])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(head) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(reply.ids)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_attention_that_does_not_normalize_its_keys():
    model = llama()
    plain = model(IDS).logits
    hooks = activations.simulate(model, cache_bits=4)
    assert len(hooks) == 4  # keys and values of two layers
    found = model(IDS, use_cache=True)
    assert not torch.equal(found.logits, plain)
    assert torch.allclose(found.logits, plain, atol=0.1)
    values = found.past_key_values.layers[1].values
    assert max(len(row.unique()) for row in values.flatten(0, 2)) <= 16
    assert len(activations.simulate(llama(), activation_bits=8)) == 2 * 7


def test_low_bit_layers_are_hooked_too_and_training_goes_through(model):
    quantize(model, "rtn", Scheme(4, "group", 32))
    assert len(activations.simulate(copy.deepcopy(model), 4)) == len(linear_layers(model))
    fake.insert(model, Scheme(4, "group", 32))
    plain = model(IDS).logits
    activations.simulate(model, 4, 4)
    logits = model(IDS).logits
    assert not torch.equal(logits, plain)
    logits.square().sum().backward()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in fake.layers(model).values())


def test_names():
    assert activations.labelled("w4g64") == "w4g64"
    assert activations.labelled("w4g64", 4, 4) == "w4g64a4kv4"
    assert activations.labelled("w4g64", 8) == "w4g64a8"
    assert activations.labelled("bf16", cache_bits=4) == "bf16kv4"
    assert activations.labelled("w4g64a4kv4", 4, 4) == "w4g64a4kv4"


def test_bad_input(model):
    for how, sentence in (
        ({"activation_bits": 3}, r"activation_bits = 3 is unknown: choose one of 4, 8, 16\."),
        ({"cache_bits": 2}, r"cache_bits = 2 is unknown: choose one of 4, 8, 16\."),
    ):
        with pytest.raises(activations.ActivationError, match=sentence):
            activations.simulate(model, **how)
    for layer in model.model.layers:
        del layer.self_attn.v_proj
    with pytest.raises(activations.ActivationError, match="cache_bits = 4: no k_proj and v_proj is found in Qwen3"):
        activations.simulate(model, cache_bits=4)
