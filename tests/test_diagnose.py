"""Diagnostics: KL and entropy by hand, a model against itself, kinds of tokens, where replies part, layers alone, the stage."""

from math import log
from types import SimpleNamespace

import numpy as np
import pandas as pd
import peft
import pytest
import torch

from helpers import models, quant, runs, tasks
from helpers.errors import UserError
from helpers.evaluation import diagnose, layers, parting
from helpers.evaluation.bootstrap import ratio
from helpers.execute import execute
from helpers.models import reading
from helpers.quant import Scheme, SchemeError
from helpers.quant.sensitivity import alone, changed_layers
from helpers.report import figures
from helpers.sampling import Reply

TOKENIZER = models.build_tokenizer()
TEXTS = (r"<think>12</think>\boxed{12}", r"\boxed{7}", r"<think>2+3*4=2+12=14</think>\boxed{14}", r"\boxed{305}", "9")


def build():
    torch.manual_seed(0)
    return models.build("xs", TOKENIZER).eval()


@pytest.fixture
def full():
    return build()


@pytest.fixture
def low():
    model = build()
    quant.quantize(model, "rtn", Scheme(2))
    return model


@pytest.fixture(scope="module")
def problems():
    return tasks.load("arithmetic", "test", len(TEXTS), seed=0)


@pytest.fixture(scope="module")
def replies(problems):
    return [reply(p.id, text) for p, text in zip(problems, TEXTS, strict=True)]


def reply(problem_id, text):
    ids = (*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)
    return Reply(problem_id, text, ids, True)


# --- reading ------------------------------------------------------------------------------------------------------------


def test_kl_and_entropy_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert reading.divergence(p, q).item() == pytest.approx(0.5 * log(2))
    assert reading.divergence(p, p).item() == 0
    assert reading.entropy(p).item() == pytest.approx(log(2))


def test_batches_change_nothing_and_count_what_they_should(full, monkeypatch):
    texts, starts = [[9, 10, 11, 12, 13], [9, 10], [11, 12, 13]], [2, 0, 1]
    together = list(reading.batches(full, texts, starts))
    (batch,) = together
    assert batch.rows.tolist() == [1, 2, 2, 0, 0, 0]  # by length; the first token of a text never counts
    assert batch.tokens.tolist() == [10, 12, 13, 11, 12, 13]
    found = reading.log_probs(full, batch)
    monkeypatch.setattr(reading, "LOGITS", 1)
    one_by_one = torch.cat([reading.log_probs(full, b) for b in reading.batches(full, texts, starts)])
    assert torch.allclose(found, one_by_one, atol=1e-5)
    logits = full(torch.tensor([texts[0]])).logits[0]
    assert torch.allclose(found[-1], torch.log_softmax(logits[3], -1), atol=1e-5)  # token 4 is told from those up to 3


@pytest.mark.parametrize(
    ("texts", "starts", "sentence"),
    [
        ([], [], "there is no text to read"),
        ([[9, 10]], [2], "text 0 has 2 tokens, and none of them counts"),
        ([[9] * 300], [1], "text 0 has 300 tokens, and the model has 256 positions"),
        ([[9, 999]], [1], r"text 0 holds a token id outside 0\.\."),
    ],
)
def test_texts_that_cannot_be_read(full, texts, starts, sentence):
    with pytest.raises(UserError, match=sentence):
        list(reading.batches(full, texts, starts))


# --- by token -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((x, "structure") for x in ("<think>", "</think>", "\\boxed{", "}", "=", " =", "boxed", "{\\")),
        *((x, "digits") for x in ("7", " 12", "3.5", "x2")),
        *((x, "operators") for x in ("+", " * ", "(", "-(")),
        *((x, "others") for x in ("the", " ", "", "a-b", "\n", ".")),
    ],
)
def test_kinds_of_characters_and_of_pieces(text, kind):
    assert diagnose.kind_of(text) == kind


def test_special_tokens_are_structure():
    assert set(diagnose.kinds(TOKENIZER, [TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]).values()) == {"structure"}


def test_a_model_does_not_differ_from_itself(full, problems, replies):
    table = diagnose.read(full, full, TOKENIZER, problems, replies)
    assert table["kl"].max() == 0
    assert (table["surprise_full"] == table["surprise_low"]).all()
    for m in [*diagnose.by_kind(table, "t"), *diagnose.by_place(table, "t"), diagnose.whole(table, "t")[0]]:
        if m.metric == "kl":
            assert (m.value, m.ci_low, m.ci_high) == ((0, 0, 0) if m.n > 1 else (0, None, None))


def test_the_table_is_what_the_models_say(full, low, problems, replies):
    table = diagnose.read(full, low, TOKENIZER, problems, replies)
    assert list(table.groupby("text")["token"].apply(tuple)) == [r.ids for r in replies]
    heads, starts = diagnose.with_prompts(TOKENIZER, problems, replies)
    text, start = torch.tensor([heads[2]]), starts[2]
    p, q = (torch.log_softmax(m(text).logits[0, start - 1 : -1], -1) for m in (full, low))
    rows = table[table["text"] == 2]
    assert np.allclose(
        rows["kl"], torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).detach(), atol=1e-5
    )
    assert np.allclose(rows["surprise_low"], -q[range(len(rows)), text[0, start:]].detach(), atol=1e-5)
    assert np.allclose(rows["entropy_full"], torch.distributions.Categorical(logits=p).entropy().detach(), atol=1e-5)
    assert list(rows["place"]) == list(range(len(replies[2].ids)))


def test_metrics_by_hand():
    table = pd.DataFrame(
        {
            "text": [0, 0, 1, 1, 1, 1], "place": [0, 1, 0, 1, 2, 3], "length": [2, 2, 4, 4, 4, 4],
            "kind": ["digits", "structure", "digits", "digits", "digits", "structure"], "kl": [0.4, 0.0, 0.1, 0.1, 0.2, 0.1],
            "surprise_full": [0.0] * 6, "surprise_low": [log(2)] * 6, "entropy_full": [0.1] * 6, "entropy_low": [0.2] * 6,
        }
    )  # fmt: skip
    whole = {m.metric: m for m in diagnose.whole(table, "t")}
    assert whole["kl"].value == pytest.approx(0.9 / 6)
    assert whole["kl"].n == 2
    assert whole["perplexity"].value == pytest.approx(2.0)
    assert whole["perplexity_full"].value == 1.0
    kinds = diagnose.by_kind(table, "t")
    assert diagnose.by_label(kinds, "kl")["digits"][0] == pytest.approx(0.2)
    assert diagnose.shares(kinds)["structure"] == pytest.approx((2 / 6, 0.1 / 0.9))
    places = diagnose.by_label(diagnose.by_place(table, "t", parts=2), "kl")
    assert places["part1"][0] == pytest.approx((0.4 + 0.1 + 0.1) / 3)
    assert places["part2"][0] == pytest.approx((0.0 + 0.2 + 0.1) / 3)


def test_intervals_resample_texts_and_not_tokens():
    rng = np.random.default_rng(0)
    each = rng.exponential(size=60)
    value, low, high = ratio(10 * each, [10] * 60)  # ten equal tokens a text tell no more than one
    assert value == pytest.approx(each.mean())
    assert (low, high) == pytest.approx(ratio(each, [1] * 60)[1:])
    assert 0 < low < value < high
    assert high - low == pytest.approx(2 * 1.96 * each.std() / 60**0.5, rel=0.25)
    assert ratio([3.0], [2.0]) == (1.5, None, None)
    assert ratio([1.0, 2.0], [2.0, 4.0]) == (0.5, 0.5, 0.5)


def test_models_with_other_vocabularies_are_not_compared(full, problems, replies):
    other = SimpleNamespace(config=SimpleNamespace(vocab_size=7))
    with pytest.raises(UserError, match="vocabularies of 60 and 7 tokens"):
        diagnose.read(full, other, TOKENIZER, problems, replies)


# --- parting ------------------------------------------------------------------------------------------------------------


def test_where_replies_part():
    first = [reply("a", r"\boxed{12}"), reply("b", r"\boxed{12}"), reply("c", "12"), reply("d", "1")]
    second = [reply("a", r"\boxed{12}"), reply("b", r"\boxed{15}"), reply("c", "1"), reply("d", "12")]
    found = parting.partings(first, second, TOKENIZER)
    assert [p.place for p in found] == [None, 2, 1, 1]
    assert [p.kind for p in found] == ["", "digits", "digits", "structure"]  # where d ends, the other goes on
    assert parting.by_kind(found) == ({"digits": [3, 2], "operators": [], "structure": [2], "others": []}, 1)
    metrics = {(m.metric, m.benchmark): m for m in parting.parting_metrics(found, "t")}
    assert metrics["parted", "t"].value == 0.75
    assert (metrics["parted", "t/digits"].value, metrics["parted", "t/digits"].n) == (2 / 3, 3)
    assert metrics["parted_token", "t"].value == pytest.approx(7 / 3)
    assert metrics["parted_place", "t"].value == pytest.approx((2 / 5 + 1 / 3 + 1 / 2) / 3)


def test_a_reply_that_is_cut_off_parts_where_the_other_goes_on():
    whole = reply("a", "123")
    cut = Reply("a", "12", whole.ids[:2], False)
    assert parting.partings([whole], [cut], TOKENIZER)[0].place == 2
    assert parting.partings([cut], [whole], TOKENIZER)[0].place == 2
    assert [m.metric for m in parting.parting_metrics(parting.partings([cut], [cut], TOKENIZER), "t")] == ["parted"]


def test_replies_that_never_part_are_drawn_as_none():
    same = [reply("a", "1")] * 3
    axis = figures.partings(*parting.by_kind(parting.partings(same, same, TOKENIZER)), "t").axes[0]
    assert axis.get_title("left") == "t; 3 never part"
    assert not axis.patches


def test_replies_to_other_problems_cannot_be_laid_side_by_side():
    with pytest.raises(UserError, match="different problems"):
        parting.partings([reply("a", "1")], [reply("b", "1")], TOKENIZER)


# --- by layer -----------------------------------------------------------------------------------------------------------


def test_a_layer_alone(full, low, problems, replies):
    texts, starts = diagnose.with_prompts(TOKENIZER, problems, replies)
    names = changed_layers(full, low)
    assert len(names) == 21
    found = alone(full, low, ["", names[0]], texts, starts)
    table = diagnose.read(full, low, TOKENIZER, problems, replies)
    assert np.allclose(found[""][:, 0], table.groupby("text")["kl"].sum(), atol=1e-5)
    assert list(found[""][:, 1]) == [len(r.ids) for r in replies]
    by_hand = build()
    quant.quantize(by_hand, "rtn", {names[0]: Scheme(2)})
    expected = diagnose.read(full, by_hand, TOKENIZER, problems, replies).groupby("text")["kl"].sum()
    assert np.allclose(found[names[0]][:, 0], expected, atol=1e-6)
    assert all(isinstance(m, torch.nn.Linear) for m in quant.linear_layers(full).values()), "put back as it was"


def test_layers_blocks_and_the_whole_are_measured(full, low, problems, replies):
    metrics = layers.by_layer(full, low, TOKENIZER, problems, replies, "t")
    labels = list(diagnose.by_label(metrics, "kl_alone"))
    assert labels[:4] == ["0", "1", "2", "0.self_attn.q_proj"]
    assert len(labels) == 3 + 21
    assert metrics[0].benchmark == "t"
    assert all(m.ci_low <= m.value <= m.ci_high and m.n == 5 for m in metrics)
    table = layers.sums(metrics)
    assert list(table["parts"]) == [21, 3, 1]
    assert float(table["sum of KL, nats a token"].iloc[2]) == pytest.approx(metrics[0].value, abs=1e-4)
    same = layers.by_layer(full, build(), TOKENIZER, problems, replies, "t")
    assert [m.value for m in same] == [0] * 4  # no layer differs


def test_after_awq_only_blocks_are_measured(full):
    low = build()
    rng = np.random.default_rng(0)
    quant.quantize(low, "awq", Scheme(3), [list(rng.integers(8, 50, 40)) for _ in range(10)])
    assert changed_layers(full, low) == []


def test_with_an_adapter_only_blocks_are_measured(full, problems, replies):
    low = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    metrics = layers.by_layer(full, low, TOKENIZER, problems, replies, "t")
    assert [m.benchmark for m in metrics] == ["t", "t/0", "t/1", "t/2"]
    assert all(m.value > 0 for m in metrics)


def test_models_that_do_not_belong_together(full, problems, replies):
    wider, shorter = build(), build()
    wider.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 100)
    del shorter.model.layers[2]
    with pytest.raises(SchemeError, match=r"1\.mlp\.up_proj is \(192, 64\) in one model and \(100, 64\) in the other"):
        layers.by_layer(full, wider, TOKENIZER, problems, replies, "t")
    for pair in ((full, shorter), (shorter, full)):
        with pytest.raises(SchemeError, match=r"model\.layers\.2 is not in both models"):
            layers.by_layer(*pair, TOKENIZER, problems, replies, "t")


# --- the stage ------------------------------------------------------------------------------------------------------------


def test_the_reference_is_what_the_parent_was_made_from():
    base = runs.load_parent("base-s")
    made = SimpleNamespace(label="x", result=SimpleNamespace(model={"made_from": base.id}))
    assert diagnose.reference_of(made, "").id == base.id
    assert diagnose.reference_of(made, "base-xs").id == runs.load_parent("base-xs").id
    with pytest.raises(runs.RunError, match="reference is empty, and base-s does not say"):
        diagnose.reference_of(base, "")
    with pytest.raises(runs.RunError, match="The reference base-z is unknown"):
        diagnose.reference_of(base, "base-z")


@pytest.mark.slow
def test_the_stage_at_its_smallest(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    out = (tmp_path / "out").open("w")
    low = execute("ptq", {"parent": "base-xs", "method": "rtn", "bits": 2, "texts": 5}, out=out)
    small = {"n": 5, "layer_texts": 2, "max_new_tokens": 8}
    made = execute("diagnose", {"parent": low.run_id, **small}, out=out)
    result = runs.read(made.path)
    assert result.model["scheme"] == "w2g64"
    assert result.model["reference"] == runs.load_parent("base-xs").id
    assert {m.metric for m in result.metrics} >= {
        "kl",
        "perplexity",
        "entropy",
        "perplexity_full",
        "parted",
        "kl_alone",
    }
    assert result.memory == runs.read(low.path).memory
