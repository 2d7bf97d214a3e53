"""Fake quantization: gradients by hand, the same numbers as packed layers, and codes that move."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import models, sampling, tasks
from helpers.kernels import LowBitLinear
from helpers.kernels.fake_quant import fake_quantize
from helpers.quant import Scheme, SchemeError, fake, linear_layers, quantize, round_to_nearest, weight_of
from helpers.training import precision

GRANULARITIES = {"tensor": (1, 1), "channel": (4, 1), "group": (4, 2)}  # of a weight of 4 x 64, in groups of 32


@pytest.fixture
def model():
    return models.load("base-xs")[0]


def layer_of(weight, scheme, **how):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone())
    return fake.FakeQuantLinear(linear, scheme, **how)


def test_ste_by_hand():
    """Scale 0.5, zero point 1, codes 0..3: the grid reaches from -0.5 to 1.0."""
    weight = torch.tensor([[-1.0, -0.8, -0.7, -0.5, 0.1, 0.3, 1.0, 1.2, 1.3, 2.0]], requires_grad=True)
    scale, zero = torch.tensor([[0.5]]), torch.tensor([[1.0]])
    upstream = torch.arange(1.0, 11.0)
    for masked, inside in ((False, [1] * 10), (True, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0])):
        weight.grad = None
        out = fake_quantize(weight, scale, zero, 0, 3, masked)
        assert out.flatten().tolist() == [-0.5, -0.5, -0.5, -0.5, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
        (out.flatten() * upstream).sum().backward()
        assert weight.grad.flatten().tolist() == (upstream * torch.tensor(inside)).tolist()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layer_gradients_are_the_analytic_ones(granularity, symmetric, masked):
    """y = x W'^T and L = sum(v y): dL/dx = v W', dL/dW = v^T x, where masked only within the range."""
    torch.manual_seed(0)
    scheme = Scheme(3, granularity, 32, symmetric)
    layer = layer_of(torch.randn(4, 64), scheme, masked=masked)
    with torch.no_grad():
        layer.weight.mul_(torch.where(torch.rand(4, 64) < 0.2, 3.0, 1.0))  # some leave the range, whose grid is fixed
    x, v = torch.randn(5, 64, requires_grad=True), torch.randn(5, 4)
    y = layer(x)
    (v * y).sum().backward()
    assert layer.scale.shape == ((1, 1) if granularity == "tensor" else GRANULARITIES[granularity])
    scale, zero = (t.float().repeat_interleave(64 // t.shape[1], 1).expand(4, 64) for t in (layer.scale, layer.zero))
    code = (layer.weight / scale).round() + zero
    low, high = (1, 7) if symmetric else (0, 7)
    restored = scale * (code.clamp(low, high) - zero)
    inside = (code >= low) & (code <= high)
    assert 0 < inside.float().mean() < 1
    assert torch.equal(y, x @ restored.T)
    assert torch.allclose(x.grad, v @ restored, atol=1e-6)
    assert torch.allclose(layer.weight.grad, (v.T @ x.detach()) * (inside if masked else 1.0), atol=1e-6)


def test_the_gradient_agrees_with_pytorchs_own():
    torch.manual_seed(1)
    weight = (3 * torch.randn(4, 64)).requires_grad_()
    theirs = torch.fake_quantize_per_tensor_affine(weight, 0.25, 5, 0, 15)
    ours = fake_quantize(weight, torch.tensor([[0.25]]), torch.tensor([[5.0]]), 0, 15, True)
    assert torch.equal(ours, theirs)
    upstream = torch.randn(4, 64)
    assert torch.equal(*(torch.autograd.grad(w, weight, upstream)[0] for w in (ours, theirs)))


# --- learned scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_the_slope_of_a_scale_by_hand(masked):
    """Scale 0.5, zero point 1, codes 0..3: inside the grid dw'/ds = (q - z) - w/s, beyond it q - z."""
    weight = torch.tensor([[-1.0, -0.6, 0.1, 0.3, 0.9, 2.0]])
    scale, zero = torch.tensor([[0.5]], requires_grad=True), torch.tensor([[1.0]])
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    out = fake_quantize(weight, scale, zero, 0, 3, masked)
    assert out.flatten().tolist() == [-0.5, -0.5, 0.0, 0.5, 1.0, 1.0]
    (out.flatten() * upstream).sum().backward()
    slopes = torch.tensor([-1.0, -1.0 + 1.2, 0.0 - 0.2, 1.0 - 0.6, 2.0 - 1.8, 2.0])
    assert scale.grad.item() == pytest.approx(float((slopes * upstream).sum()))


@pytest.mark.parametrize(("low", "high", "zero"), [(0, 15, 5), (-7, 7, 0)])
def test_the_slope_of_a_scale_agrees_with_pytorchs_own(low, high, zero):
    torch.manual_seed(1)
    weight, upstream = 3 * torch.randn(4, 64), torch.randn(4, 64)
    scale, their_zero = torch.tensor([0.25], requires_grad=True), torch.tensor([float(zero)])
    theirs = torch._fake_quantize_learnable_per_tensor_affine(weight, scale, their_zero, low, high, 1.0)
    ours = fake_quantize(weight, scale.view(1, 1), torch.tensor([[float(zero)]]), low, high)
    assert torch.equal(ours, theirs)
    one, other = (torch.autograd.grad(w, scale, upstream)[0] for w in (ours, theirs))
    assert one.item() == pytest.approx(other.item(), rel=1e-5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_grid_has_the_slope_of_its_own_weights(granularity):
    """dL/du = s dL/ds, s = s_0 exp(u); against the definition with PyTorch's gradients of the parts that have one."""
    torch.manual_seed(0)
    layer = layer_of(torch.randn(4, 64), Scheme(3, granularity, 32), grids="learned")
    assert layer.log_scale.shape == layer.scale.shape == GRANULARITIES[granularity]
    with torch.no_grad():
        layer.weight.mul_(1.3)
        layer.log_scale.normal_(0, 0.05)
    upstream = torch.randn(4, 64)
    layer.quantized_weight().backward(upstream)
    scale, zero = layer.scales().float(), layer.zero.float()
    wide_scale, wide_zero = (t.repeat_interleave(64 // t.shape[1], 1).expand(4, 64) for t in (scale, zero))
    ratio = layer.weight.detach() / wide_scale
    point = ratio.round() + wide_zero
    code = point.clamp(0, 7)
    slope = upstream * (code - wide_zero - ratio * (point == code))
    sums = slope.view(4, scale.shape[1], -1).sum(-1)
    expected = (
        (sums.sum().view(1, 1) if granularity == "tensor" else sums) * layer.scale.float() * layer.log_scale.exp()
    )
    assert torch.allclose(layer.log_scale.grad, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.weight.grad, upstream)  # what is learned of the scale takes nothing from the weights


def test_learned_scales_are_rounded_as_they_are_stored():
    torch.manual_seed(0)
    layer = layer_of(torch.randn(4, 64), Scheme(4, "group", 32), grids="learned")
    with torch.no_grad():
        layer.log_scale.normal_()
    assert layer.scales().dtype == torch.float16
    assert torch.equal(layer.scales(), layer.quantized().scale)
    assert not torch.equal(layer.scales().float(), layer.trained_scales())
    packed = layer.quantized().pack()
    assert torch.equal(packed.scale, layer.scales())
    assert torch.equal(packed.dequantize(), layer.quantized_weight())


def trained(model, steps=3):
    """Some steps of Adam on a loss that moves every weight and scale."""
    torch.manual_seed(0)
    ids = torch.randint(3, 50, (4, 12)).to(model.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return ids


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grids", fake.GRIDS)
@pytest.mark.parametrize("scheme", ["w2g32", "w3g64-sym", "w4pc", "w8pt"])
def test_after_training_a_package_computes_the_same_bit_for_bit(scheme, grids, masked, model):
    fake.insert(model, Scheme.parse(scheme), grids, masked)
    ids = trained(model)
    logits, weights = model(ids).logits, {n: m.quantized_weight() for n, m in fake.layers(model).items()}
    if grids == "learned":
        assert all(layer.log_scale.abs().min() > 0 for layer in fake.layers(model).values())
    fake.pack(model)
    for name, layer in linear_layers(model).items():
        assert torch.equal(layer.dequantize(), weights[name])
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("grids", ["fixed", "learned"])
def test_latent_weights_come_back_with_their_codes(grids, model, tmp_path):
    scheme = Scheme(3, "group", 32)
    fake.insert(model, scheme, grids)
    ids = trained(model)
    latent = {name: layer.weight.detach().clone() for name, layer in fake.layers(model).items()}
    codes = fake.codes(model)
    scales = {name: layer.scales() for name, layer in fake.layers(model).items()}
    fake.pack(model)
    folder = models.save(model, models.build_tokenizer(), tmp_path / "model", card="")
    loaded = models.load(folder)[0]
    logits = loaded(ids).logits
    kept = models.latents(folder)
    assert all(torch.equal(kept[name], latent[name].cpu()) for name in latent)
    fake.insert(loaded, scheme, "learned", latents=kept)
    assert torch.equal(loaded(ids).logits, logits)
    assert fake.differing(fake.codes(loaded), codes) == 0
    for name, layer in fake.layers(loaded).items():
        assert torch.equal(layer.weight, latent[name])
        assert torch.equal(layer.scales(), scales[name])
    # and once more, from there
    fake.pack(loaded)
    again = models.load(models.save(loaded, models.build_tokenizer(), tmp_path / "again", card=""))[0]
    assert torch.equal(again(ids).logits, logits)
    assert models.latents(tmp_path / "again").keys() == latent.keys()


def test_checkpoints_without_latent_weights_have_none(model, tmp_path):
    assert models.latents("base-xs") == {}
    assert models.latents("owner/name") == {}
    quantize(model, "rtn", Scheme(3, "group", 32))
    folder = models.save(model, models.build_tokenizer(), tmp_path / "model", card="")
    assert models.latents(folder) == {}
    assert not (folder / "latent").exists()


def test_latent_weights_of_another_run_are_refused(model):
    scheme = Scheme(3, "group", 32)
    quantize(model, "rtn", scheme)
    latent = {name: layer.dequantize() for name, layer in linear_layers(model).items()}
    name = list(latent)[-1]
    latent[name] = latent[name].flip(0)
    before, said = list(model.named_modules()), model.config.to_dict()
    with pytest.raises(SchemeError, match=f"layer {name}: its latent weights do not round to its codes"):
        fake.insert(model, scheme, latents=latent)
    assert list(model.named_modules()) == before
    assert model.config.to_dict() == said
    assert model.is_quantized


def test_a_refused_scheme_leaves_a_model_that_has_one_as_it_was(model):
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    fake.insert(model, Scheme(3, "group", 32))
    logits, together = model(ids).logits, model.model.together
    with pytest.raises(SchemeError, match="does not divide"):
        fake.insert(model, Scheme(4, "group", 128))
    assert model.model.together is together
    model(ids).logits.sum().backward()
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("policy", ["qaft", "ptq_rollout"])
def test_a_policy_goes_on_from_latent_weights(policy, model):
    """What GRPO does with a parent that QAT made: the same codes in its rollouts, the weights behind them in training."""
    scheme = Scheme(3, "group", 32)
    fake.insert(model, scheme, "learned")
    ids = trained(model)
    logits, latent = model(ids).logits, {n: m.weight.detach().clone() for n, m in fake.layers(model).items()}
    fake.pack(model)
    model = precision.apply(model, policy, scheme, latents=latent)
    with fake.materialized(model):
        assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(layer.weight, latent[name]) for name, layer in fake.layers(model).items())
    fake.remove(model)
    full = model(ids).logits
    assert not torch.equal(full, logits)


@given(st.integers(0, 1000), st.sampled_from([2, 3, 4, 8]), st.sampled_from(list(GRANULARITIES)), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_layer_computes_what_its_packed_codes_compute(seed, bits, granularity, symmetric):
    torch.manual_seed(seed)
    scheme = Scheme(bits, granularity, 32, symmetric)
    weight, x = torch.randn(4, 64), torch.randn(3, 64)
    layer = layer_of(weight, scheme)
    packed = layer.quantized().pack()
    assert torch.equal(layer(x), packed(x))
    assert torch.equal(layer.quantized_weight(), packed.dequantize())
    assert torch.equal(layer.quantized().codes, round_to_nearest(weight, scheme).codes)


def test_grids_are_found_once_or_at_each_forward():
    torch.manual_seed(0)
    for grids, follows in (("fixed", False), ("step", True)):
        layer = layer_of(torch.randn(4, 64), Scheme(4, "channel"), grids=grids)
        before = layer.scale.clone()
        with torch.no_grad():
            layer.weight.mul_(2)
        layer(torch.randn(1, 64))
        assert torch.allclose(layer.scale, 2 * before if follows else before)


def test_the_parameters_are_the_models_own(model):
    before = {id(p) for p in model.parameters()}
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    plain = model(ids).logits
    fake.insert(model, Scheme(8, "tensor", symmetric=True))
    assert {id(p) for p in model.parameters()} == before
    assert list(fake.layers(model)) == list(linear_layers(model))
    quantized = model(ids).logits
    assert not torch.equal(quantized, plain)
    fake.switch(model, "nowhere")
    assert torch.equal(model(ids).logits, plain)
    fake.switch(model, "everywhere")
    assert torch.equal(model(ids).logits, quantized)
    fake.remove(model)
    assert torch.equal(model(ids).logits, plain)
    assert not fake.layers(model)


def test_attention_alone(model):
    fake.insert(model, Scheme(4, "group", 32, targets="attention"))
    assert fake.layers(model)
    assert all("self_attn" in name for name in fake.layers(model))


@pytest.mark.parametrize("grids", fake.GRIDS)
def test_materialized_rollouts_are_the_same_and_quantize_once(model, grids, monkeypatch):
    tokenizer = models.build_tokenizer()
    problems = tasks.load("arithmetic", "test", 4)
    fake.insert(model, Scheme(4, "group", 32), grids)
    plainly = sampling.sample(model, tokenizer, problems, k=2, temperature=1.0, max_new_tokens=24)
    calls = []
    fill = fake.FakeQuantLinear.fill
    monkeypatch.setattr(fake.FakeQuantLinear, "fill", lambda self: calls.append(1) or fill(self))
    with fake.materialized(model):
        assert sampling.sample(model, tokenizer, problems, k=2, temperature=1.0, max_new_tokens=24) == plainly
    assert len(calls) == len(fake.layers(model))
    assert all(layer.held is None for layer in fake.layers(model).values())
    ids = torch.tensor([[3, 4]], device=model.device)
    model(ids).logits.sum().backward()  # and training goes on through the latent weights
    assert all(layer.weight.grad is not None for layer in fake.layers(model).values())


def test_where_forwards_are_quantized(model):
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    plain = model(ids).logits
    fake.insert(model, Scheme(3, "group", 32))
    quantized = model(ids).logits
    for where, outside, inside in (
        ("everywhere", quantized, quantized),
        ("rollouts", plain, quantized),
        ("nowhere", plain, plain),
    ):
        fake.switch(model, where)
        assert fake.where(model) == where
        assert torch.equal(model(ids).logits, outside)
        with fake.materialized(model):
            assert torch.equal(model(ids).logits, inside)


def test_held_weights_are_always_in_the_same_place(model):
    """Where a CUDA graph that was captured in one rollout finds those of the next."""
    fake.insert(model, Scheme(4, "group", 32))
    places = []
    for _ in range(2):
        with fake.materialized(model):
            held = {name: layer.held for name, layer in fake.layers(model).items()}
            places.append({name: weight.data_ptr() for name, weight in held.items()})
            for name, layer in fake.layers(model).items():
                assert torch.equal(held[name], layer.quantized_weight())
        trained(model, steps=1)
    assert places[0] == places[1]
    layer = model.model.layers[0].self_attn.q_proj.to(torch.bfloat16)
    with fake.materialized(model):
        assert layer.held.dtype == torch.bfloat16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grids", fake.GRIDS)
def test_layers_computed_together_are_those_computed_one_by_one(grids, masked, model):
    """Loss and all gradients; two passes before the first backward, a copy of the model, and none when it is parted."""
    fake.insert(model, Scheme(3, "group", 32), grids, masked)
    ids = trained(model, steps=1)
    model = copy.deepcopy(model)
    losses = [model(ids, labels=ids).loss for _ in range(2)]
    assert all(layer.held is None for layer in fake.layers(model).values())
    found = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    fake.part(model)
    alone = model(ids, labels=ids).loss
    assert torch.equal(losses[0], alone)
    for grads in zip(*found, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        assert torch.equal(grads[0], grads[1])
        assert torch.allclose(
            grads[0], grads[2], rtol=1e-5, atol=1e-9
        )  # those of scales are multiplied in another order


def broken_off(model, ids):
    """A forward pass in which Ctrl-C is pressed: torch calls no hook behind it."""

    def press(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    hook.remove()


def test_a_pass_that_is_broken_off_leaves_no_weights_behind(model):
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    fake.insert(model, Scheme(4, "group", 32))
    broken_off(model, ids)
    with fake.materialized(model):  # a rollout holds its own, whatever was left
        model(ids)
        assert all(layer.held is layer.place for layer in fake.layers(model).values())
    broken_off(model, ids)
    with torch.no_grad():
        for layer in fake.layers(model).values():
            layer.weight.mul_(0.5)
    logits = model(ids).logits
    assert all(layer.held is None for layer in fake.layers(model).values())
    fake.part(model)
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("masked", [False, True])
def test_weights_that_change_before_the_backward_pass_are_an_error(model, masked):
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    fake.insert(model, Scheme(4, "group", 32), masked=masked)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model(ids)  # computes W' again, where the first pass's was
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("grids", "masked"), [("fixed", False), ("fixed", True), ("step", True), ("learned", False)])
def test_blocks_may_be_computed_again_in_the_backward_pass(model, grids, masked, reentrant):
    fake.insert(model, Scheme(3, "group", 32), grids, masked)
    ids = trained(model, steps=1)
    model.train()
    model.enable_input_require_grads()
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("grids", ["fixed", "learned"])
def test_another_type_for_the_weights_rounds_no_grid(grids):
    torch.manual_seed(0)
    layer = layer_of(torch.randn(4, 64).bfloat16().float(), Scheme(4, "group", 32), grids=grids)
    if grids == "learned":
        layer.log_scale.data.normal_(0, 0.1)
    before = layer.quantized()
    after = layer.to(torch.bfloat16).quantized()
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(after.scale, before.scale)
    assert torch.equal(after.codes, before.codes)
    assert layer.to("meta").scale.is_meta


def test_held_weights_are_let_go_when_sampling_fails(model):
    fake.insert(model, Scheme(4, "group", 32))
    with pytest.raises(KeyError), fake.materialized(model):
        raise KeyError
    assert all(layer.held is None for layer in fake.layers(model).values())


def test_codes_that_changed_by_hand():
    """Grid -1, 0, 1 (2 bits, symmetric, scale 1): of four weights one crosses 0.5, one moves within its cell."""
    layer = nn.Sequential(layer_of(torch.tensor([[-1.0, 0.2, 0.4, 1.0]]), Scheme(2, "tensor", symmetric=True)))
    before = fake.codes(layer)
    assert before["0"].tolist() == [[1, 2, 2, 3]]
    with torch.no_grad():
        layer[0].weight.copy_(torch.tensor([[-1.0, 0.3, 0.6, 1.0]]))
    after = fake.codes(layer)
    assert after["0"].tolist() == [[1, 2, 3, 3]]
    assert fake.differing(after, before) == 0.25
    assert fake.differing(after, after) == 0


def test_switching_on_again_finds_the_grid_of_that_moment(model):
    fake.insert(model, Scheme(4, "channel"))
    name, layer = next(iter(fake.layers(model).items()))
    before = layer.scale.clone()
    fake.switch(model, "nowhere")
    with torch.no_grad():
        layer.weight.mul_(2)
    fake.switch(model, "everywhere")
    assert torch.allclose(layer.scale, 2 * before)
    fake.switch(model, "rollouts")  # it stays in use, and stays as it is
    fake.switch(model, "everywhere")
    assert torch.equal(layer.scale, fake.layers(model)[name].scale)


def test_packed_checkpoint_gives_the_logits_and_replies_of_the_fake_quantized_model(model, tmp_path):
    tokenizer = models.build_tokenizer()
    problems = tasks.load("arithmetic", "test", 6)
    ids = torch.tensor([[3, 4, 5, 6, 20, 30]], device=model.device)
    fake.insert(model, Scheme(4, "group", 32))
    with torch.no_grad():  # as after training: weights off the grid, some beyond it
        for layer in fake.layers(model).values():
            layer.weight.mul_(1.3)
        for name, parameter in model.named_parameters():  # a checkpoint has 16 bits of what is not quantized
            if "proj" not in name:
                parameter.copy_(parameter.bfloat16())
    logits, replies = model(ids).logits, sampling.sample(model, tokenizer, problems)
    fake.pack(model)
    assert torch.equal(model(ids).logits, logits)
    loaded, _ = models.load(models.save(model, tokenizer, tmp_path / "model", card=""))
    assert all(isinstance(layer, LowBitLinear) for layer in linear_layers(loaded).values())
    assert torch.equal(loaded(ids).logits, logits)
    assert sampling.sample(loaded, tokenizer, problems) == replies
    assert models.measure(loaded).packed


def test_a_packed_model_is_trained_from_its_own_codes(model):
    """GPTQ codes are not the nearest ones of a grid found anew, so the grid has to be kept."""
    scheme = Scheme(3, "group", 32)
    quantize(model, "rtn-clip", scheme)
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    logits = model(ids).logits
    codes = {name: layer.unpacked()[0] for name, layer in linear_layers(model).items()}
    other = copy.deepcopy(model)
    fake.insert(model, scheme)
    assert torch.equal(model(ids).logits, logits)
    assert fake.differing(fake.codes(model), codes) == 0
    assert not hasattr(model.config, "quantization_config")
    fake.insert(other, Scheme(4, "group", 32))  # another scheme: grids are found anew
    assert fake.where(other) == "everywhere"


@pytest.mark.parametrize("scheme", ["w3g64", "w8pt-sym", "w4g64-sym", "nf4", "int8"])
def test_low_bit_models_become_plain_ones_of_the_same_weights(model, scheme):
    quantize(model, "rtn" if scheme.startswith("w") else "bnb", scheme)
    weights = [weight_of(layer) for layer in linear_layers(model).values()]
    fake.restore(model)
    assert all(type(layer) is nn.Linear for layer in linear_layers(model).values())
    assert all(torch.equal(a.weight, b) for a, b in zip(linear_layers(model).values(), weights, strict=True))
    quantize(model, "rtn", Scheme(4))  # nothing on it says any more that it is quantized


def test_groups_longer_than_a_row_are_the_row_and_others_must_divide_it(model):
    """Rows of base-xs have 64 and 192 weights."""
    long = copy.deepcopy(model)
    attention = Scheme(4, "group", 128, targets="attention")
    fake.insert(long, attention)
    assert {layer.scale.shape[1] for layer in fake.layers(long).values()} == {1}
    with pytest.raises(
        SchemeError, match=r"layer model\.layers\.0\.mlp\.down_proj: group_size = 128 does not divide a"
    ):
        fake.insert(model, Scheme(4, "group", 128))
    assert not fake.layers(model)


@pytest.mark.parametrize(
    ("scheme", "grids", "sentence"),
    [
        (Scheme(4), "often", r"grids = 'often' is unknown: choose one of fixed, step, learned\."),
        (Scheme.parse("nf4"), "fixed", r"scheme = nf4 cannot be trained through"),
    ],
)
def test_bad_input(model, scheme, grids, sentence):
    with pytest.raises(SchemeError, match=sentence):
        fake.insert(model, scheme, grids)


def test_a_scheme_for_each_layer(model):
    names = list(linear_layers(model))
    fake.insert(model, {names[0]: Scheme(2, "group", 32), names[1]: Scheme(8, "channel")})
    assert {name: layer.scheme.bits for name, layer in fake.layers(model).items()} == {names[0]: 2, names[1]: 8}
