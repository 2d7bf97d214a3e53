"""AWQ: a fold changes nothing, outlier channels are protected, heads that share a value scale alike, odd norms are left."""

import copy

import pytest
import torch
import transformers
from torch import nn

from helpers import models, quant
from helpers.quant import Scheme, SchemeError, awq, linear_layers
from helpers.quant.calibration import Moments, Stream, decoder_blocks


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = models.build("xs", models.build_tokenizer()).eval()
    with torch.no_grad():  # a few channels much larger than the others, as in large models
        for block in model.model.layers:
            block.input_layernorm.weight[::16] *= 30
            block.post_attention_layernorm.weight[::16] *= 30
    return model


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 60, (24,), generator=generator).tolist() for _ in range(40)]


def folded(model, texts, scheme):
    """Fold the first block; gives (its layers, scales, moments)."""
    prefix, block = decoder_blocks(model)[0]
    layers = {n.removeprefix(f"{prefix}."): m for n, m in linear_layers(model).items() if n.startswith(f"{prefix}.")}
    stream = Stream(model, texts)
    moments = stream.moments(block, layers)
    scales = awq.fold(block, layers, moments, stream, scheme)
    with torch.no_grad():
        for name, layer in layers.items():  # in quantizing they are replaced
            layer.weight.copy_(scales[name].weight)
    return layers, scales, moments


def test_folding_leaves_the_model_as_it_computes_and_undo_gives_the_weights_back(model, texts):
    before = copy.deepcopy(model)
    layers, scales, _ = folded(model, texts, Scheme(3, "group", 32))
    ids = torch.tensor(texts[:4])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=1e-3, atol=1e-4)
    for name, layer in layers.items():
        original = before.model.layers[0].get_submodule(name).weight
        assert not scales[name].note
        torch.testing.assert_close(scales[name].undo(layer.weight), original, rtol=1e-4, atol=1e-7)
        assert not torch.equal(scales[name].columns, torch.ones_like(scales[name].columns))


def test_queries_that_share_a_value_head_share_its_scale(model, texts):
    _, scales, _ = folded(model, texts, Scheme(3, "group", 32))
    # 4 query heads over 2 value heads of width 16: columns of heads 0 and 1 meet value head 0
    heads = scales["self_attn.o_proj"].columns.view(2, 2, 16)
    assert torch.equal(heads[:, 0], heads[:, 1])
    assert torch.equal(scales["self_attn.v_proj"].rows, heads[:, 0].flatten())


def test_moments_follow_the_fold(model, texts):
    _, _, moments = folded(model, texts, Scheme(4, "group", 32))
    prefix, block = decoder_blocks(model)[0]
    layers = {n.removeprefix(f"{prefix}."): m for n, m in linear_layers(model).items() if n.startswith(f"{prefix}.")}
    again = Stream(model, texts).moments(block, layers)
    for name in layers:
        torch.testing.assert_close(moments[name].second, again[name].second, rtol=1e-2, atol=1e-4)


def test_channels_with_large_inputs_are_protected():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    x = torch.randn(2000, 64, generator=generator)
    x[:, 5] *= 50
    moments = Moments(x.T @ x / len(x), x.abs().mean(0), len(x))
    s = awq.best_scale([weight], moments, Scheme(3, "group", 64))
    assert int(s.argmax()) == 5
    plain = quant.round_to_nearest(weight, Scheme(3, "group", 64)).dequantize() - weight
    scaled = quant.round_to_nearest(weight * s, Scheme(3, "group", 64)).dequantize() / s - weight
    assert awq.output_error(scaled, moments.second) < 0.3 * awq.output_error(plain, moments.second)


def test_output_error_is_the_mean_square_of_the_outputs_difference():
    difference, x = torch.randn(3, 8), torch.randn(50, 8)
    assert awq.output_error(difference, x.T @ x / 50) == pytest.approx(
        float((x @ difference.T).square().sum(1).mean()), rel=1e-4
    )


class OnePlusWeight(nn.Module):
    """A norm that multiplies by 1 + weight, as Gemma's does: dividing its weight does not divide what it gives."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * (1 + self.weight)


def test_a_norm_that_cannot_take_a_scale_is_left_and_noted(model, texts):
    model.model.layers[0].input_layernorm = OnePlusWeight(64)
    before = copy.deepcopy(model)
    layers, scales, _ = folded(model, texts, Scheme(3, "group", 32))
    assert scales["self_attn.q_proj"].note == "no scale: folding it into input_layernorm changes the output"
    assert torch.equal(layers["self_attn.q_proj"].weight, before.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(model.model.layers[0].input_layernorm.weight, before.model.layers[0].input_layernorm.weight)
    assert not scales["mlp.up_proj"].note
    with torch.no_grad():
        ids = torch.tensor(texts[:2])
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=1e-3, atol=1e-4)
    report = quant.quantize(before, "awq", "w3g32", texts)
    assert {r.name.rpartition(".")[2] for r in report if r.note} == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_folds_are_taken_in_every_type(model, texts, kind):
    report = quant.quantize(model.to(kind), "awq", "w4g32", texts)
    assert not any(r.note for r in report)


def test_what_stays_in_full_precision_is_what_will_be_saved(model, texts):
    quant.quantize(model, "awq", "w4g32", texts)
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            assert torch.equal(norm.weight, norm.weight.bfloat16().float())


def tiny(config_class, model_class, **more):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **more,
    )  # fmt: skip
    return model_class(config).eval()


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (lambda: tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, attention_bias=True), set()),
        (lambda: tiny(transformers.Qwen2Config, transformers.Qwen2ForCausalLM), set()),
        (lambda: tiny(transformers.Olmo2Config, transformers.Olmo2ForCausalLM), {"q_proj", "k_proj", "v_proj"}),
        (lambda: tiny(transformers.CohereConfig, transformers.CohereForCausalLM), set()),
    ],
)
def test_other_architectures(model, left, texts):
    model = model()
    before = copy.deepcopy(model)
    report = quant.quantize(model, "awq", "w8g32", texts)
    ids = torch.tensor(texts[:4])
    with torch.no_grad():
        off = (model(ids).logits - before(ids).logits).norm() / before(ids).logits.norm()
    assert off < 0.05
    assert left <= {r.name.rpartition(".")[2] for r in report if r.note}


def test_a_model_in_which_nothing_can_be_scaled_is_refused(texts):
    model = tiny(transformers.Phi3Config, transformers.Phi3ForCausalLM)
    with pytest.raises(SchemeError, match="awq finds nothing to scale in a Phi3DecoderLayer: use gptq or rtn-clip"):
        quant.quantize(model, "awq", "w4g32", texts)
    quant.quantize(tiny(transformers.Phi3Config, transformers.Phi3ForCausalLM), "gptq", "w4g32", texts)
