"""Precision policies: what each computes, trains, saves and refuses; adapters; the sampler against the trainer."""

import copy
import json
import sys

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import nn
from trl import GRPOTrainer

from helpers import models, runs, sampling, tasks
from helpers.execute import execute
from helpers.kernels import LowBitLinear
from helpers.models import adapters
from helpers.quant import Scheme, SchemeError, fake, linear_layers, quantize
from helpers.training import grpo, precision, rollout

IDS = torch.tensor([[3, 4, 5, 6, 20, 30]])
TINY = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 16, "kl_every": 0, "lr": 1e-3}


@pytest.fixture
def model():
    models.seed_everything(0)
    return models.load("base-xs")[0]


@pytest.fixture(scope="module")
def tokenizer():
    return models.build_tokenizer()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def trained(model, tokenizer, **changes):
    problems = tasks.load("arithmetic", "train", 8)
    return grpo.train(model, tokenizer, problems, **(TINY | changes))


def nudged(model):
    """The adapter as if it had learned something."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "scheme", "grids", "said"),
    [
        (
            "full",
            None,
            "fixed",
            "21 low-bit layers of the parent are made plain, and trained and saved in full precision.\n",
        ),
        ("lora", None, "fixed", "21 low-bit layers of the parent are made plain, and adapted in full precision.\n"),
        ("qaft", "w4g64", "fixed", ""),  # it goes on from the parent's codes
        ("qaft", "w4g64", "learned", ""),
        ("qaft", "w4g64", "step", "21 low-bit layers of the parent are made plain, and rounded to w4g64 anew.\n"),
        ("qaft", "w3g64", "fixed", "21 low-bit layers of the parent are made plain, and rounded to w3g64 anew.\n"),
    ],
)
def test_a_quantized_parent_does_not_become_plain_in_silence(model, capsys, policy, scheme, grids, said):
    precision.apply(model, "full")
    assert capsys.readouterr().out == ""
    quantize(model, "rtn", "w4g64")
    before = logits(model)
    model = precision.apply(model, policy, scheme, grids=grids)
    assert capsys.readouterr().out == said
    if grids != "step":  # found in float16 again, they are nearly the same here
        assert torch.equal(logits(model), before) == (scheme != "w3g64")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "scheme"), [("full", None), ("qaft", "w4g64"), ("qlora", "nf4")])
def test_checkpointing_computes_again_what_it_does_not_keep(model, tokenizer, policy, scheme):
    """The same weights after two steps, from twice the forwards of a layer; the model is afterwards as it would be without."""
    other = copy.deepcopy(model)
    found = []
    for each, checkpointing in ((model, False), (other, True)):
        models.seed_everything(0)
        each = precision.apply(each, policy, scheme)
        layer = adapters.base_of(each).get_decoder().layers[1].mlp
        embeddings, calls, hooks = adapters.base_of(each).get_input_embeddings(), [], set()
        layer.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(module.training))
        how = {"checkpointing": checkpointing, "reward": lambda verdict: len(verdict.answer or "") % 3}
        how["before_step"] = lambda _, e=embeddings, hooks=hooks: hooks.update(e._forward_hooks)
        rows = trained(each, tokenizer, **how)
        found.append((rows, [p.detach() for p in each.parameters()], sum(calls)))
        assert not any(getattr(m, "gradient_checkpointing", False) for m in each.modules())
        assert not hooks  # with which the engine would not sample
    (rows, weights, calls), (others, again, more) = found
    assert more == 2 * calls > 0
    assert max(row["grad_norm"] for row in rows) > 0
    for row, other in zip(rows, others, strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-6)
    assert all(torch.allclose(w, o, rtol=1e-4, atol=1e-6) for w, o in zip(weights, again, strict=True))


@pytest.mark.slow
def test_the_start_is_copied_only_for_its_kl(model, tokenizer, monkeypatch):
    deepcopy = copy.deepcopy

    def refused(what, *rest):
        if what is model:
            raise MemoryError("a second model")
        return deepcopy(what, *rest)

    monkeypatch.setattr(grpo.copy, "deepcopy", refused)
    assert "kl" not in trained(model, tokenizer, steps=1)[0]
    with pytest.raises(MemoryError, match="a second model"):
        trained(model, tokenizer, steps=1, kl_every=1)


def test_defaults_are_paper_1s():
    assert str(precision.scheme_of("qaft")) == "w8pt-sym"
    assert str(precision.scheme_of("qlora")) == "nf4"
    assert str(precision.scheme_of("qlora", double=True)) == "nf4-dq"
    assert precision.scheme_of("full") is precision.scheme_of("lora") is None
    assert precision.step_name("full", "dr_grpo") == "dr_grpo"
    assert precision.step_name("qaft", "dr_grpo") == "qaft"


def on_a_fine_grid(model, bits):
    """Fake quantization with `2**bits` codes a row, more than any scheme has."""
    fake.insert(model, Scheme(8, "channel"))
    for layer in fake.layers(model).values():
        low, high = layer.weight.detach().aminmax(dim=1, keepdim=True)
        layer.scale = 2 * (high - low) / 2**bits  # with room for weights that move outwards
        layer.zero, layer.low, layer.high = torch.round(-low / layer.scale) + 2 ** (bits - 2), 0, 2**bits - 1
    return model


@pytest.mark.parametrize(("bits", "tolerance"), [(16, 5e-3), (20, 5e-4)])
@pytest.mark.parametrize("masked", [False, True])
def test_qaft_on_a_fine_grid_is_full_precision(model, tokenizer, masked, bits, tolerance):
    """The loss, its gradient, and one update, up to what rounding to 16 bits, and to 20, does."""
    fine = on_a_fine_grid(copy.deepcopy(model), bits)
    for layer in fake.layers(fine).values():
        layer.masked = masked
    text = torch.tensor([tokenizer(r"<user>1+2<assistant>\boxed{3}<eos>")["input_ids"]])
    losses, gradients = [], []
    for net in (model, fine):
        output = net(text, labels=text)
        output.loss.backward()
        losses.append(output.loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.001 * parameter.grad
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert (gradients[0] - gradients[1]).norm() < tolerance * gradients[0].norm()
    with torch.no_grad():
        after, fine_after = model(text).logits, fine(text).logits
    assert (after - fine_after).norm() < tolerance * after.norm()


def test_qaft_on_weights_of_the_grid_is_full_precision_exactly(model):
    scheme = Scheme(8, "group", 32)
    quantize(model, "rtn", scheme)
    low_bit = copy.deepcopy(model)
    fake.restore(model)
    policy = precision.apply(low_bit, "qaft", scheme)
    found = []
    for net in (model, policy):
        loss = net(IDS, labels=IDS).loss
        loss.backward()
        found.append((loss, *(p.grad for p in net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("policy", ["lora", "qlora"])
def test_an_adapter_of_no_effect_is_its_base_bit_for_bit(model, policy):
    base = copy.deepcopy(model)
    if policy == "qlora":
        quantize(base, "bnb", "nf4")
    adapted = precision.apply(model, policy, precision.scheme_of(policy))
    assert torch.equal(logits(adapted), logits(base))
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(linear_layers(base))
    assert all("lora_" in name for name in trainable)


def test_adapters_have_the_rank_alpha_dropout_and_targets_that_were_asked_for(model):
    adapted = precision.apply(model, "lora", rank=3, alpha=6, dropout=0.1, targets="attention")
    layers = adapters.adapted(adapters.base_of(adapted))
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {layer.lora_A["default"].weight.shape[0] for layer in layers.values()} == {3}
    assert {layer.scaling["default"] for layer in layers.values()} == {2.0}
    assert {layer.lora_dropout["default"].p for layer in layers.values()} == {0.1}


@pytest.mark.parametrize(
    ("policy", "scheme", "settings", "sentence"),
    [
        ("half", None, {}, r"policy = 'half' is unknown: choose one of full, qaft, ptq_rollout, lora, qlora\."),
        ("qlora", "w4g64", {}, r"policy = qlora does not fit scheme = w4g64: it needs nf4 or nf4-dq\."),
        ("qlora", "nf4-attn", {}, r"policy = qlora does not fit scheme = nf4-attn"),
        ("qaft", "nf4", {}, r"policy = qaft does not fit scheme = nf4: it needs a uniform grid"),
        ("qaft", None, {}, r"policy = qaft does not fit scheme = None: it needs a uniform grid"),
        ("full", "w4g64", {}, r"policy = full does not fit scheme = w4g64: it needs no scheme\."),
        ("lora", None, {"rank": 0}, r"rank = 0 is no rank"),
        ("lora", None, {"dropout": 1.0}, r"dropout = 1.0 is no share"),
    ],
)
def test_what_does_not_fit_together(model, policy, scheme, settings, sentence):
    before = logits(model)
    with pytest.raises(precision.PolicyError, match=sentence):
        precision.apply(model, policy, scheme, **settings)
    assert torch.equal(logits(model), before)


def test_targets_that_match_nothing(model):
    for block in model.model.layers:  # no layer is called attn
        block.mixer = block.self_attn
        del block.self_attn
    with pytest.raises(
        precision.PolicyError, match=r"policy = lora: targets = attention match no linear layer of Qwen3"
    ):
        precision.apply(model, "lora", targets="attention")
    with pytest.raises(SchemeError, match=r"has no linear layers for scheme = w4g64-attn"):
        precision.apply(model, "qaft", "w4g64-attn")


def test_nf4_without_bitsandbytes(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        precision.PolicyError, match=r"^policy = qlora needs the package bitsandbytes, which is not inst"
    ):
        precision.apply(model, "qlora", "nf4")


# ---------------------------------------------------------------- the sampler and the trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "scheme", "differ", "moves"),
    [
        ("full", None, False, False),
        ("qaft", "w4g64", False, True),
        ("ptq_rollout", "w4g64", True, True),
        ("lora", None, False, False),
        ("qlora", "nf4", False, False),
    ],
)
def test_a_policy_from_base_to_checkpoint(model, tokenizer, tmp_path, policy, scheme, differ, moves):
    policy_model = precision.apply(model, policy, scheme)
    history = trained(policy_model, tokenizer, steps=3)
    assert all(("codes_moved" in row) == moves for row in history)
    if moves:
        assert history[0]["codes_moved"] == 0  # the warm-up step has lr 0
        assert 0 < history[-1]["codes_moved"] < 1
    for row in history:  # a replay in one pass differs from token after token by rounding alone
        assert row["mismatch_mean"] <= row["mismatch_max"]
        assert (row["mismatch_mean"] > 1e-3) if differ else (row["mismatch_mean"] < 1e-5)
    finished = precision.finish(policy_model, policy)
    before = logits(finished)
    replies = sampling.sample(finished, tokenizer, tasks.load("arithmetic", "test", 3), max_new_tokens=16)
    assert len(replies) == 3
    folder = models.save(finished, tokenizer, tmp_path / "model", card="")
    loaded, _ = models.load(folder)
    assert torch.equal(logits(loaded), logits(finished))
    assert torch.allclose(logits(loaded), before, atol=0.2)  # a checkpoint has 16 bits of what is not quantized
    assert not loaded.training
    kinds = {"qaft": LowBitLinear, "full": nn.Linear, "ptq_rollout": nn.Linear}
    if policy in kinds:
        assert all(type(layer) is kinds[policy] for layer in linear_layers(loaded).values())
        assert not (folder / "adapter").exists()
    else:
        assert {f.name for f in (folder / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        with loaded.disable_adapter():
            base = models.load("base-xs")[0]
            if policy == "qlora":
                quantize(base, "bnb", "nf4")
            assert torch.equal(logits(loaded), logits(base))  # the base is as it was
    assert models.measure(finished) == models.measure(loaded)
    assert models.measure(loaded).packed == (policy in ("qaft", "qlora"))


def test_the_samplers_log_probabilities_are_those_of_generate(model, tokenizer):
    torch.manual_seed(0)
    ids = torch.tensor([[tokenizer.pad_token_id, 3, 12, 4], [3, 12, 13, 4]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with rollout.LogProbs(model, temperature=0.7) as sampler:
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=12,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    new = out.sequences[:, 4:]
    replies = []
    for row in new.tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        replies.append(row[:end])
    found = sampler.of(replies)
    scores = torch.stack(out.scores, dim=1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
    for row, reply, exact in zip(found, replies, scores, strict=True):
        assert row == pytest.approx(exact[: len(reply)].tolist(), abs=1e-5)
    assert not model._forward_hooks


def test_truncated_importance_weights_by_hand():
    ratio = torch.tensor([[0.5, 1.0, 2.0, 8.0]]).log()
    assert torch.allclose(rollout.weights(ratio, 2.0), torch.tensor([[0.5, 1.0, 2.0, 2.0]]))


def by_hand(tokenizer, model, tmp_path, monkeypatch, loss, truncate=0.0):
    """TRL's loss of two replies, of 3 tokens and of 1, at most 4 long; ratios to the rollout 1, 1.5, 0.5 and 0.9."""
    config = grpo.settings(loss, 1, 1, 2, 1e-3, 1.0, 4, 0, str(tmp_path))
    trainer = rollout.Trainer(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "1"}]), truncate=truncate,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ratio = torch.tensor([[1.0, 1.5, 0.5], [0.9, 1.0, 1.0]])
    logps = torch.full((2, 3), -1.0) + ratio.log()

    def of_texts(trainer, model, ids, attention, kept, **_):
        rows = [0 if n == 4 else 1 for n in attention.sum(1).tolist()]
        return logps[rows, :kept], torch.zeros(len(rows), kept), None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", of_texts)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    inputs = {
        "prompt_ids": torch.tensor([[3], [3]]),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.full((2, 3), 5),
        "completion_mask": mask,
        "advantages": torch.tensor([2.0, -1.0]),
        "old_per_token_logps": torch.full((2, 3), -1.0),
        "sampling_per_token_logps": logps - torch.tensor([[0.5, 1.0, 4.0], [3.0, 1.0, 1.0]]).log(),
        "num_items_in_batch": torch.tensor(4),
    }
    found = trainer._compute_loss(trainer.model, inputs).item()
    assert inputs["advantages"].tolist() == [2.0, -1.0]
    model.__dict__.pop("forward", None)
    return found, trainer.mismatch()


@pytest.mark.parametrize(
    ("loss", "truncate", "expected"),
    [
        # tokens of reply 1, A = 2: 2 x (1, min(1.5, 1.2), min(0.5, 0.8)) = 2, 2.4, 1; of reply 2, A = -1: -max(0.9, 0.9) = -0.9
        ("grpo", 0, -((2 + 2.4 + 1) / 3 - 0.9) / 2),
        ("dr_grpo", 0, -(2 + 2.4 + 1 - 0.9) / (2 * 4)),
        # p_trainer / p_sampler = 0.5, 1, 4 -> 2 and 3 -> 2
        ("grpo", 2, -((0.5 * 2 + 2.4 + 2 * 1) / 3 - 2 * 0.9) / 2),
        ("dr_grpo", 2, -(0.5 * 2 + 2.4 + 2 * 1 - 2 * 0.9) / (2 * 4)),
    ],
)
def test_losses_by_hand(model, tokenizer, tmp_path, monkeypatch, loss, truncate, expected):
    found, mismatch = by_hand(tokenizer, model, tmp_path, monkeypatch, loss, truncate)
    assert found == pytest.approx(expected, abs=1e-6)
    differences = torch.tensor([0.5, 1.0, 4.0, 3.0]).log().abs()
    assert mismatch["mismatch_mean"] == pytest.approx(differences.mean().item(), abs=1e-6)
    assert mismatch["mismatch_max"] == pytest.approx(differences.max().item(), abs=1e-6)


def test_texts_of_like_length_go_together():
    mask = torch.tensor(
        [[0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    )
    assert rollout.alike(mask) == [([1, 4], 0, 6), ([3, 2], 0, 6), ([0], 1, 3)]
    assert rollout.alike(mask, least=13) == [([1, 4, 3], 0, 6), ([2, 0], 0, 3)]
    assert rollout.alike(mask, least=100) == [([1, 4, 3, 2, 0], 0, 6)]
    assert rollout.alike(torch.ones(3, 5)) == [([0, 1, 2], 0, 5)]


@pytest.mark.parametrize("policy", ["full", "qaft"])
def test_log_probabilities_in_groups_are_those_of_all_texts_at_once(model, tokenizer, tmp_path, policy):
    config = grpo.settings("grpo", 1, 1, 4, 1e-3, 1.0, 6, 0, str(tmp_path))
    model = precision.apply(model, policy, "w4g64") if policy == "qaft" else model
    trainer = rollout.Trainer(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
    )  # fmt: skip
    ids = torch.randint(3, 40, (4, 9))
    mask = torch.tensor([[0, 0, 1] + [1] * 6, [1] * 3 + [1] * 1 + [0] * 5, [0, 1, 1] + [1] * 2 + [0] * 4, [1] * 9])
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 6, compute_entropy=True)
    expected = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, trainer.model, ids, mask, 6, compute_entropy=True
    )
    inside = mask[:, 3:].bool()
    without = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 6)
    assert without[1:] == (None, None)
    assert torch.equal(without[0], found[0])
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine.shape == theirs.shape == (4, 6)
        assert torch.allclose(mine[inside], theirs[inside], atol=1e-5)
    gradients = [torch.autograd.grad(x[0][inside].sum(), model.model.norm.weight)[0] for x in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-4)
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 6)
    assert torch.equal(logps, found[0])
    assert entropies is None
    model.__dict__.pop("forward", None)


@pytest.mark.slow
def test_truncation_does_nothing_where_sampler_and_trainer_agree(model, tokenizer):
    others = copy.deepcopy(model)
    plain, weighted = trained(model, tokenizer), trained(others, tokenizer, truncate=2.0)
    for a, b in zip(plain, weighted, strict=True):
        assert a["reward"] == b["reward"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_adapters_of_four_bit_models_are_trained_in_float32_as_all_others(model, tokenizer):
    """TRL rounds them to bfloat16 where the base has 4 bits, and only there."""
    adapted = precision.apply(model, "qlora", "nf4", dropout=0.1)
    trained(adapted, tokenizer, lr=1e-6)
    learned = [p for p in adapted.parameters() if p.requires_grad]
    assert {p.dtype for p in learned} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in learned)
    assert 0.1 in {m.p for m in adapted.modules() if isinstance(m, nn.Dropout)}  # it was not switched off


# ---------------------------------------------------------------- quantization shock


def test_quantized_steps():
    steps = precision.quantized_steps
    assert steps("qaft", 10) == range(1, 11)
    assert steps("qaft", 10, 4) == range(4, 11)
    assert steps("ptq_rollout", 10, 4, 6) == range(4, 7)
    assert steps("qaft", 10, 0, 99) == range(1, 11)
    assert steps("full", 10) == range(0)
    with pytest.raises(precision.PolicyError, match=r"quantize_from = 7 and quantize_until = 6 leave none of 10 steps"):
        steps("qaft", 10, 7, 6)
    with pytest.raises(precision.PolicyError, match=r"quantize_from = 11 and"):
        steps("qaft", 10, 11)
    with pytest.raises(precision.PolicyError, match=r"policy = lora is the same at every step"):
        steps("lora", 10, 3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["qaft", "ptq_rollout"])
def test_a_shock_begins_and_ends(model, tokenizer, policy):
    net = precision.apply(model, policy, "w4g64")
    on = precision.quantized_steps(policy, 4, 2, 3)
    seen = []

    def before_step(step):
        precision.switch(net, policy, step in on)
        seen.append((step, fake.where(net)))

    history = trained(net, tokenizer, steps=4, before_step=before_step)
    inside = precision.QUANTIZED[policy]
    assert seen == [(1, "nowhere"), (2, inside), (3, inside), (4, "nowhere")]
    assert ["codes_changed" in row for row in history] == [False, True, True, False]
    assert history[1]["codes_changed"] == history[1]["codes_moved"]
    finished = precision.finish(net, policy)  # the last step was in full precision
    assert all(type(layer) is nn.Linear for layer in linear_layers(finished).values())


# ---------------------------------------------------------------- adapters


def test_exact_merge_and_that_pefts_own_is_not(model):
    adapted = nudged(precision.apply(model, "qlora", "nf4"))
    unmerged, again = logits(adapted), copy.deepcopy(adapted)
    merged = models.merge(adapted)
    assert all(type(layer) is nn.Linear for layer in linear_layers(merged).values())
    assert (logits(merged) - unmerged).abs().max() < 2e-5
    assert not adapters.has_adapter(merged)
    assert merged.config.to_dict().get("quantization_config") is None
    rounded = again.merge_and_unload()
    assert (logits(rounded) - unmerged).abs().max() > 0.05
    quantize(merged, "rtn", "w4g64")  # it is an ordinary model again


def test_merging_lora_and_what_has_no_adapter(model):
    plain = logits(model)
    assert models.merge(model) is model
    adapted = nudged(precision.apply(model, "lora", targets="attention"))
    unmerged = logits(adapted)
    assert not torch.allclose(unmerged, plain, atol=1e-2)
    assert (logits(models.merge(adapted)) - unmerged).abs().max() < 2e-5


def test_four_bit_layers_without_an_adapter_are_merged_too(model):
    adapted = nudged(precision.apply(model, "qlora", "nf4", targets="attention"))
    unmerged = logits(adapted)
    merged = models.merge(adapted)
    assert all(layer.weight.dtype == torch.float32 for layer in linear_layers(merged).values())
    assert (logits(merged) - unmerged).abs().max() < 2e-5


def test_the_next_policy_starts_from_the_merged_model(model):
    adapted = nudged(precision.apply(model, "qlora", "nf4"))
    unmerged = logits(adapted)
    full = precision.apply(adapted, "full")
    assert (logits(full) - unmerged).abs().max() < 2e-5
    assert all(p.requires_grad for p in full.parameters())


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    adapted = nudged(precision.apply(model, "qlora", "nf4-dq"))
    return adapted, models.save(adapted, tokenizer, tmp_path / "model", card="")


def test_a_saved_adapter_is_attached_and_stays_beside_its_base(saved):
    adapted, folder = saved
    loaded, _ = models.load(folder)
    assert torch.equal(logits(loaded), logits(adapted))
    assert adapters.has_adapter(loaded)
    assert not any(p.requires_grad for name, p in loaded.named_parameters() if "lora_" in name)
    assert (logits(models.merge(loaded)) - logits(adapted)).abs().max() < 2e-5
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == ("..", 8, 16)
    assert "lora" not in " ".join(load_file(folder / "model.safetensors"))
    assert all(t.dtype == torch.bfloat16 for t in load_file(folder / "adapter" / adapters.FILE).values())
    assert str(folder) not in "".join(f.read_text() for f in folder.rglob("*.json"))


def test_a_base_whose_adapter_is_gone_is_not_loaded_as_if_it_were_all(saved):
    (saved[1] / "adapter" / adapters.FILE).unlink()
    with pytest.raises(
        models.CheckpointError, match=r"its adapter is missing, there is no adapter/adapter_model\.safe"
    ):
        models.load(saved[1])


def test_an_adapter_that_lacks_a_tensor_is_refused(saved):
    file = saved[1] / "adapter" / adapters.FILE
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(models.CheckpointError, match=r"its adapter lacks 1 tensors, the first of them base_model"):
        models.load(saved[1])


def test_an_adapter_that_is_not_finite_is_refused(saved):
    file = saved[1] / "adapter" / adapters.FILE
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(models.CheckpointError, match=r"has 1 weights that are not finite in .*lora_A"):
        models.load(saved[1])


def test_merging_needs_an_adapter_where_it_is_all_that_is_asked(model):
    with pytest.raises(
        adapters.AdapterError, match=r"Qwen3ForCausalLM has no adapter to merge: start from a run of lora"
    ):
        models.merge(model, needed=True)


@pytest.mark.slow
def test_the_stages_of_qaft_and_the_three_ways_to_finish_qlora(tmp_path, monkeypatch):
    """Unmerged, merged, and merged and quantized again, each evaluated."""
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    out = (tmp_path / "out").open("w")
    small = {"parent": "base-xs", "steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8}

    def done(stage, **given):
        made = runs.read(execute(stage, given, out=out).path)
        return made.run_id, made

    qaft = done("grpo", **small, policy="qaft", bits=4)[1]
    assert (qaft.model["recipe"], qaft.model["scheme"], qaft.memory.packed) == ("base > qaft", "w4pt-sym", True)
    run_id, qlora = done("grpo", **small, policy="qlora", lr=1e-3)
    assert (qlora.model["recipe"], qlora.model["scheme"], qlora.memory.packed) == ("base > qlora", "nf4", True)
    merged_id, merged = done("ptq", parent=run_id, method="merge", texts=40)
    assert (merged.model["recipe"], merged.model["scheme"]) == ("base > qlora > merge", "bf16")
    again_id, again = done("ptq", parent=run_id, method="bnb", bits=4, texts=40)
    assert (again.model["recipe"], again.model["scheme"]) == ("base > qlora > bnb", "nf4")
    scores = [done("eval", parent=one, n=5, k=0, max_new_tokens=8)[1].model for one in (run_id, merged_id, again_id)]
    assert [score["method"] for score in scores] == ["qlora", "merge", "bnb"]
