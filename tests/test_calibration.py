"""What the layers see: moments against a direct computation, padding that does not count, and texts that cannot be read."""

import pytest
import torch
import transformers

from helpers import models
from helpers.quant import SchemeError, linear_layers, quantize
from helpers.quant.calibration import Stream, decoder_blocks, split


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return models.build("xs", models.build_tokenizer()).eval()


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 40, 12, 33, 7, 21, 60, 9, 14, 11, 30, 8, 16, 25, 6, 19, 50, 10, 13, 22]
    return [torch.randint(5, 60, (n,), generator=generator).tolist() for n in lengths]


def seen_alone(model, texts, layer):
    """The inputs of a layer when each text is read by itself, without padding."""
    found = []
    hook = layer.register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
    with torch.no_grad():
        for ids in texts:
            model(torch.tensor([ids]))
    hook.remove()
    return torch.cat(found)


def test_moments_are_those_of_the_tokens_without_padding(model, texts):
    stream = Stream(model, texts)
    for prefix, block in decoder_blocks(model):
        layers = {n: m for n, m in linear_layers(model).items() if n.startswith(f"{prefix}.")}
        moments = stream.moments(block, layers, onward=True)
        assert set(moments) == set(layers)
        for name in (f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj", f"{prefix}.self_attn.k_proj"):
            x = seen_alone(model, texts, layers[name])
            assert moments[name].tokens == len(x) == sum(map(len, texts))
            torch.testing.assert_close(moments[name].second, x.T @ x / len(x), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(moments[name].magnitude, x.abs().mean(0), rtol=1e-3, atol=1e-5)


def test_layers_that_read_one_tensor_share_their_moments_in_order_of_use(model, texts):
    prefix, block = decoder_blocks(model)[0]
    layers = {n.removeprefix(f"{prefix}."): m for n, m in linear_layers(model).items() if n.startswith(f"{prefix}.")}
    moments = Stream(model, texts).moments(block, layers)
    q, k, v, o = (moments[f"self_attn.{x}_proj"] for x in "qkvo")
    gate, up, down = (moments[f"mlp.{x}_proj"] for x in ("gate", "up", "down"))
    assert q is k is v
    assert gate is up
    assert len({id(x) for x in (q, o, gate, down)}) == 4
    first_of_each = [next(n for n in moments if moments[n] is m) for m in (q, o, gate, down)]
    assert sorted(first_of_each, key=list(moments).index) == first_of_each


def test_a_block_is_read_group_by_group_and_each_part_computed_once_it_is_final(model, texts):
    prefix, block = decoder_blocks(model)[0]
    layers = {n.removeprefix(f"{prefix}."): m for n, m in linear_layers(model).items() if n.startswith(f"{prefix}.")}
    stream, plain = Stream(model, texts), Stream(model, texts)
    expected = plain.moments(block, layers, onward=True)
    computed = []
    hook = block.self_attn.o_proj.register_forward_hook(lambda *_: computed.append(1))
    left, groups = dict(layers), []
    while left:
        names, moments = stream.next_moments(block, left)
        groups.append([name.split(".")[1] for name in names])
        for name in names:
            del left[name]
            torch.testing.assert_close(moments.second, expected[name].second)
            torch.testing.assert_close(moments.magnitude, expected[name].magnitude)
            assert moments.tokens == sum(map(len, texts))
    stream.go_through(block)
    hook.remove()
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert (
        len(computed) == len(stream.hidden) + 1
    )  # and once in the first batch, to see who else reads what o_proj does
    assert not any(stream.kept.values())
    for found, right in zip(stream.hidden, plain.hidden, strict=True):
        torch.testing.assert_close(found, right)


def test_the_hidden_states_are_the_model_s_own(model, texts):
    stream = Stream(model, texts)
    for _, block in decoder_blocks(model):
        stream.go_through(block)
    ids = sorted(texts, key=len)[0]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        last = model.model.norm(stream.hidden[0][0, : len(ids)])
    torch.testing.assert_close(last, states[-1][0], rtol=1e-4, atol=1e-5)


def test_every_fifth_text_is_held_out():
    seen, held_out = split([[i] for i in range(12)])
    assert held_out == [[4], [9]]
    assert [x[0] for x in seen] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]
    assert split([]) == ([], [])


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ([], "calibration holds no text, or an empty one"),
        ([[1, 2], []], "calibration holds no text, or an empty one"),
        ([[1, 2], [6] * 257], "calibration text 1 has 257 tokens, and the model has 256 positions"),
        ([[1, 60]], r"calibration text 0 holds a token id outside 0\.\.59"),
    ],
)
def test_texts_that_cannot_be_read(model, texts, sentence):
    with pytest.raises(SchemeError, match=sentence):
        Stream(model, texts)


def test_a_failed_start_leaves_no_hook_behind(model):
    with pytest.raises(SchemeError):
        Stream(model, [[99]])
    assert not decoder_blocks(model)[0][1]._forward_pre_hooks


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Qwen3", "GPTNeoXJapanese"])
def test_blocks_that_are_called_differently(kind):
    """A window in some blocks, other rotations in others, outputs in a tuple: each block gets what the model gives it."""
    torch.manual_seed(0)
    small = dict(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    if kind == "Qwen3":
        small |= {"use_sliding_window": True, "max_window_layers": 2}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, name)(**small)).eval()
    texts = [torch.randint(5, 60, (n,)).tolist() for n in (20, 9, 14)]
    stream = Stream(model, texts)
    for _, block in decoder_blocks(model):
        stream.go_through(block)
    ids = sorted(texts, key=len)[-1]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        decoder = model.get_decoder()
        last = (decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm)(
            stream.hidden[0][-1, : len(ids)]
        )
    torch.testing.assert_close(last, states[-1][0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_model_that_overflows_is_named(method, texts):
    torch.manual_seed(0)
    broken = models.build("xs", models.build_tokenizer()).eval()
    with torch.no_grad():
        broken.model.layers[1].input_layernorm.weight.fill_(1e25)
    with pytest.raises(SchemeError, match=r"the inputs of layer model\.layers\.1\.\S+ are not finite"):
        quantize(broken, method, "w4g64", texts)
