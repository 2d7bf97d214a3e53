"""QAT: the same run twice, in parts, after a kill and out of its package; what it learns, and what it refuses."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from helpers import models, sampling, tasks
from helpers.kernels import LowBitLinear
from helpers.quant import Scheme, fake, quantize
from helpers.training import qat, student

SCHEME = Scheme(3, "group", 32)


@pytest.fixture(scope="module")
def shipped():
    model, tokenizer = models.load("base-xs")
    return model.requires_grad_(False), tokenizer


@pytest.fixture(scope="module")
def tokenizer(shipped):
    return shipped[1]


@pytest.fixture(scope="module")
def teacher(shipped):
    return shipped[0]


@pytest.fixture(scope="module")
def lessons(teacher, tokenizer):
    return sampling.training_texts("gold", "arithmetic", teacher, tokenizer, 40)


@pytest.fixture
def pupil(teacher):
    """Fake-quantized layers on 3-bit grids."""
    return made(teacher)


def made(teacher, grids="fixed", scheme=SCHEME):
    model = copy.deepcopy(teacher).requires_grad_(True)
    student.prepare(model, "full", scheme, grids=grids)
    return model


def train(model, tokenizer, texts, teacher, **how):
    """A few small steps, which last half a second."""
    return qat.train(model, tokenizer, texts, **({"teacher": teacher, "steps": 4, "batch_size": 8} | how))


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other, atol=0.0):
    return one.keys() == other.keys() and all(torch.allclose(one[n], other[n], rtol=0, atol=atol) for n in one)


# --- what a run is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"objective": "sft"}, {"reverse": 0.5, "temperature": 2.0}])
def test_the_same_seed_gives_the_same_run_and_another_does_not(how, teacher, tokenizer, lessons):
    found = []
    for seed in (0, 0, 1):
        model = made(teacher, "learned")
        found.append((train(model, tokenizer, lessons, teacher, seed=seed, **how), weights_of(model)))
    (history, weights), (again, weights_again), (other, _) = found
    assert history == again
    assert same(weights, weights_again)
    assert history != other
    assert [row["step"] for row in history] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 and row["tokens"] > 0 for row in history)
    assert "codes_moved" in history[-1]
    assert not model.training


def test_the_first_loss_is_that_of_the_whole_logits_text_by_text(pupil, teacher, tokenizer, lessons):
    """Packed into rows, and over hidden states in chunks: the number is the mean KL over reply tokens of each text alone."""
    texts = lessons[:8]
    sums, count = 0.0, 0
    with torch.no_grad():
        for ids, head in texts:
            q, p = (m(torch.tensor([ids])).logits[0, head - 1 : -1].log_softmax(-1) for m in (pupil, teacher))
            sums += float((p.exp() * (p - q)).sum())
            count += len(ids) - head
    (row,) = train(pupil, tokenizer, texts, teacher, steps=1)
    assert row["tokens"] == count
    assert row["loss"] == pytest.approx(sums / count, rel=1e-4)


@pytest.mark.parametrize("objective", ["sft", "kd"])
def test_a_batch_in_parts_is_the_batch(objective, teacher, tokenizer, lessons):
    """40 texts in batches of 16: the third step of an epoch has 8, so with 4 at a time two parts instead of four."""
    found = {}
    for micro_batch in (0, 4):
        model = made(teacher)
        how = {"batch_size": 16, "micro_batch": micro_batch, "steps": 4, "lr": 1e-4, "objective": objective}
        found[micro_batch] = train(model, tokenizer, lessons, teacher, **how), weights_of(model)
    for whole, parts in zip(found[0][0], found[4][0], strict=True):
        assert whole["tokens"] == parts["tokens"]
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    assert same(found[0][1], found[4][1], atol=1e-4)


@pytest.mark.parametrize("grids", fake.GRIDS)
def test_checkpointing_computes_again_what_it_does_not_keep(grids, teacher, tokenizer, lessons):
    found = {}
    for checkpointing in (False, True):
        model, calls = made(teacher, grids), []
        layer = model.get_decoder().layers[1].mlp
        layer.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(module.training))
        rows = train(model, tokenizer, lessons, teacher, checkpointing=checkpointing, steps=3)
        found[checkpointing] = rows, weights_of(model), sum(calls)
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert found[True][2] == 2 * found[False][2] == 6
    for row, again in zip(found[False][0], found[True][0], strict=True):
        assert again == pytest.approx(row, rel=1e-5)
    assert same(found[False][1], found[True][1], atol=1e-5)


def test_every_text_is_read_once_in_each_epoch(pupil, teacher, tokenizer, lessons):
    history = train(pupil, tokenizer, lessons, teacher, steps=10)
    tokens = sum(len(ids) - head for ids, head in lessons)
    assert sum(row["tokens"] for row in history[:5]) == sum(row["tokens"] for row in history[5:]) == tokens
    assert [row["tokens"] for row in history[:5]] != [row["tokens"] for row in history[5:]]


@pytest.mark.parametrize("schedule", qat.SCHEDULES)
def test_the_learning_rate_follows_its_schedule(schedule, pupil, teacher, tokenizer, lessons):
    history = train(pupil, tokenizer, lessons, teacher, steps=10, schedule=schedule, warmup=0.2, lr=1e-4)
    rates = [row["lr"] for row in history]
    assert rates[:3] == pytest.approx([0, 0.5e-4, 1e-4])
    assert rates[-1] == pytest.approx(1e-4) if schedule == "constant" else 0 < rates[-1] < 0.2e-4


def test_measured_before_the_first_step_now_and_then_and_after_the_last(pupil, teacher, tokenizer, lessons):
    asked = []

    def measure():
        assert not pupil.training
        assert all(layer.held is not None for layer in fake.layers(pupil).values())
        asked.append(torch.rand(1))  # a measurement that draws numbers does not change the training
        return {"accuracy": len(asked) / 10}

    logged = []
    how = {"measure": measure, "measure_every": 2, "steps": 5}
    history = train(pupil, tokenizer, lessons, teacher, log=lambda **row: logged.append(row), **how)
    assert {row["step"]: row["accuracy"] for row in history if "accuracy" in row} == {0: 0.1, 2: 0.2, 4: 0.3, 5: 0.4}
    assert logged == history
    plain = train(made(teacher), tokenizer, lessons, teacher, steps=5)
    assert [row["loss"] for row in history if "loss" in row] == [row["loss"] for row in plain]


# --- what is learned --------------------------------------------------------------------------------------------------


def test_sft_on_gold_texts_lowers_the_loss_and_moves_codes(pupil, tokenizer, lessons):
    history = train(pupil, tokenizer, lessons, None, objective="sft", steps=30, batch_size=20, lr=1e-3)
    assert np.mean([row["loss"] for row in history[-5:]]) < 0.7 * history[0]["loss"]
    assert 0.01 < history[-1]["codes_moved"] < 0.9


def test_kd_in_full_precision_has_nothing_to_learn_from_itself_and_something_to_learn_after_noise(
    teacher, tokenizer, lessons
):
    model = copy.deepcopy(teacher).requires_grad_(True)
    student.prepare(model, "full", None)
    history = train(model, tokenizer, lessons, teacher, steps=1)
    assert history[0]["loss"] == pytest.approx(0, abs=1e-6)
    assert "codes_moved" not in history[-1]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    history = train(model, tokenizer, lessons, teacher, steps=20, lr=1e-3)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert not fake.layers(model)


def test_the_teacher_stands_still(pupil, teacher, tokenizer, lessons):
    before = weights_of(teacher)
    train(pupil, tokenizer, lessons, teacher)
    assert same(before, weights_of(teacher))
    assert all(p.grad is None for p in teacher.parameters())


def test_a_larger_teacher(pupil, tokenizer, lessons):
    larger = models.load("base-s")[0].requires_grad_(False)
    assert larger.config.hidden_size != pupil.config.hidden_size
    history = train(pupil, tokenizer, lessons, larger, steps=30, lr=1e-3)
    assert history[-1]["loss"] < history[0]["loss"]


def test_on_policy_texts_are_the_students_own_and_new_at_each_step(pupil, teacher, tokenizer, monkeypatch):
    problems = tasks.load("arithmetic", "train", 8)
    seen = []
    replies_of = qat.replies_of

    def spy(model, *rest, **how):
        assert model is pupil
        assert all(layer.held is not None for layer in fake.layers(model).values())
        seen.append(replies_of(model, *rest, **how))
        return seen[-1]

    monkeypatch.setattr(qat, "replies_of", spy)
    history = train(pupil, tokenizer, problems, teacher, steps=3, lr=1e-3, max_new_tokens=20)
    assert len(seen) == 3
    assert seen[0] != seen[1]
    heads = sampling.prompt_ids(tokenizer, problems)
    for texts, row in zip(seen, history, strict=True):
        assert sorted(ids[:head] for ids, head in texts) == sorted(heads)
        assert row["tokens"] == sum(len(ids) - head for ids, head in texts) <= 8 * 20


def test_an_on_policy_batch_in_parts_is_the_batch(teacher, tokenizer):
    problems = tasks.load("arithmetic", "train", 8)
    found = [
        train(made(teacher), tokenizer, problems, teacher, micro_batch=size, lr=1e-5, max_new_tokens=20)
        for size in (0, 2)
    ]
    for whole, parts in zip(*found, strict=True):
        assert whole["tokens"] == parts["tokens"]
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-3)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grids", fake.GRIDS)
def test_the_package_is_the_model_that_was_trained(grids, teacher, tokenizer, lessons, tmp_path):
    model = made(teacher, grids)
    train(model, tokenizer, lessons, teacher, lr=1e-3)
    qat.finish(model)
    ids = torch.tensor([lessons[0][0]])
    with torch.no_grad(), fake.materialized(model):
        logits = model(ids).logits
        replies = sampling.sample(model, tokenizer, tasks.load("arithmetic", "test", 8))
    latent = {name: layer.weight.detach().clone() for name, layer in fake.layers(model).items()}
    fake.pack(model)
    folder = models.save(model, tokenizer, tmp_path / "model", card="")
    again = models.load(folder)[0]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
    assert sampling.sample(again, tokenizer, tasks.load("arithmetic", "test", 8)) == replies
    assert same(models.latents(folder), latent)


def test_a_model_with_biases_is_its_package_too(tokenizer, lessons, tmp_path):
    """Queries, keys and values of Qwen2 have them: they are trained, and are stored in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **sizes, **ends)
    model = AutoModelForCausalLM.from_config(config)
    student.prepare(model, "full", SCHEME)
    train(model, tokenizer, lessons, None, objective="sft", lr=1e-2)
    qat.finish(model)
    ids = torch.tensor([lessons[0][0]])
    logits = model(ids).logits
    fake.pack(model)
    again = models.load(models.save(model, tokenizer, tmp_path / "model", card=""))[0]
    biases = [m.bias for m in again.modules() if isinstance(m, LowBitLinear) and m.bias is not None]
    assert len(biases) == 3
    assert all(bias.abs().max() > 0 for bias in biases)
    assert torch.equal(again(ids).logits, logits)


# --- a run that is killed, and run again ------------------------------------------------------------------------------


class Killed(Exception):
    pass


def until(step):
    def log(**row):
        if row["step"] == step:
            raise Killed

    return log


def interrupted(teacher, tokenizer, texts, folder, at, grids="fixed", **how):
    """History, weights and logged rows of a run that died at the given steps, and of the same run undisturbed."""
    how = {"lr": 1e-3, "measure": lambda: {"accuracy": 0.5}, "measure_every": 3, **how}
    undisturbed = made(teacher, grids)
    history = train(undisturbed, tokenizer, texts, teacher, **how)
    for step in at:
        with pytest.raises(Killed):
            train(
                made(teacher, grids),
                tokenizer,
                texts,
                teacher,
                checkpoints=folder,
                save_every=2,
                log=until(step),
                **how,
            )
    model, logged = made(teacher, grids), []
    found = train(
        model,
        tokenizer,
        texts,
        teacher,
        checkpoints=folder,
        save_every=2,
        log=lambda **row: logged.append(row),
        **how,
    )
    assert not model.training
    return (found, weights_of(model), logged), (history, weights_of(undisturbed))


@pytest.mark.parametrize("grids", fake.GRIDS)
def test_resumed_it_is_the_run_that_was_not_killed(grids, teacher, tokenizer, lessons, tmp_path):
    """16 texts, 2 steps an epoch: killed in the second epoch, and again in the fourth."""
    resumed, undisturbed = interrupted(teacher, tokenizer, lessons[:16], tmp_path, (4, 7), grids, steps=8)
    assert resumed[0] == undisturbed[0]
    assert same(resumed[1], undisturbed[1])
    assert resumed[2] == undisturbed[0]  # also what is logged: the file of an earlier attempt is gone


@pytest.mark.parametrize("kind", ["on-policy", "in parts"])
def test_resumed_in_the_midst_of_an_epoch(kind, teacher, tokenizer, lessons, tmp_path):
    how = {"max_new_tokens": 12} if kind == "on-policy" else {"micro_batch": 4}
    texts = tasks.load("arithmetic", "train", 40) if kind == "on-policy" else lessons
    resumed, undisturbed = interrupted(teacher, tokenizer, texts, tmp_path, (4,), "learned", steps=7, **how)
    assert resumed[0] == undisturbed[0]
    assert same(resumed[1], undisturbed[1])


def test_killed_after_its_last_step(teacher, tokenizer, lessons, tmp_path):
    """What remains is to be packed and measured: no step is taken a second time, or beyond the last."""
    model = made(teacher)
    history = train(model, tokenizer, lessons, teacher, steps=4, save_every=2, checkpoints=tmp_path)
    again = made(teacher)
    assert train(again, tokenizer, lessons, teacher, steps=4, save_every=2, checkpoints=tmp_path) == history
    assert same(weights_of(again), weights_of(model))


@pytest.mark.parametrize("missing", ["trainer_state.json", "optimizer.pt", "model.safetensors", "rows.pt"])
def test_killed_while_it_kept_its_state(missing, teacher, tokenizer, lessons, tmp_path):
    """Files of a checkpoint are written one after another, the rows last; a state that is not whole is not gone on from."""
    undisturbed = made(teacher)
    history = train(undisturbed, tokenizer, lessons, teacher, steps=6, lr=1e-3)
    with pytest.raises(Killed):
        train(
            made(teacher),
            tokenizer,
            lessons,
            teacher,
            steps=6,
            lr=1e-3,
            save_every=2,
            checkpoints=tmp_path,
            log=until(5),
        )
    order = ["model.safetensors", "optimizer.pt", "trainer_state.json", "rows.pt"]
    last = tmp_path / "checkpoint-4"
    for name in order[order.index(missing) :]:
        (last / name).unlink()
    if missing != "rows.pt":
        (last / missing).write_bytes(b"{")
    model = made(teacher)
    how = {"steps": 6, "lr": 1e-3, "save_every": 2, "checkpoints": tmp_path}
    assert train(model, tokenizer, lessons, teacher, **how) == history
    assert same(weights_of(model), weights_of(undisturbed))


def test_nothing_is_written_unless_asked(pupil, teacher, tokenizer, lessons, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(pupil, tokenizer, lessons, teacher, save_every=2)
    train(pupil, tokenizer, lessons, teacher, checkpoints=tmp_path / "kept")
    assert not list(tmp_path.rglob("*.*"))


# --- what it refuses --------------------------------------------------------------------------------------------------


def quantized_teacher(kind, teacher):
    model = copy.deepcopy(teacher)
    if kind == "packed":
        quantize(model, "rtn", SCHEME)
    elif kind == "bitsandbytes":
        quantize(model, "bnb", "nf4")
    else:
        fake.insert(model, SCHEME)
    return model


@pytest.mark.parametrize("kind", ["packed", "bitsandbytes", "fake"])
def test_a_teacher_that_is_quantized_is_refused(kind, pupil, teacher, tokenizer, lessons):
    with pytest.raises(qat.QatError, match="the teacher is quantized itself"):
        train(pupil, tokenizer, lessons, quantized_teacher(kind, teacher))


def test_another_vocabulary_is_refused(pupil, teacher, tokenizer, lessons):
    other = copy.deepcopy(teacher)
    other.resize_token_embeddings(len(tokenizer) + 3)
    with pytest.raises(qat.QatError, match="the teacher's vocabulary has 63 tokens and the student's 60"):
        train(pupil, tokenizer, lessons, other)


PROMPT, REPLY = [3, 9, 10, 4], [20, 1]
GOOD = (PROMPT + REPLY, 4)


@pytest.mark.parametrize(
    ("texts", "how", "sentence"),
    [
        ([GOOD, (PROMPT, 4)], {}, "text 1 has an empty reply"),
        ([GOOD, (REPLY, 0)], {}, "text 1 has no prompt"),
        ([(PROMPT + [20] * 253, 4), GOOD], {}, "text 0 has 257 tokens, and the model has 256 positions"),
        ([GOOD], {}, r"batch_size = 2 is more than the 1 texts"),
        ([], {}, r"batch_size = 2 is more than the 0 texts"),
        ([GOOD] * 4, {"batch_size": 4, "micro_batch": 3}, "micro_batch = 3 does not divide batch_size = 4"),
        ([GOOD] * 4, {"batch_size": 2, "micro_batch": 4}, "micro_batch = 4 does not divide batch_size = 2"),
        ([GOOD] * 2, {"objective": "rl"}, "objective = 'rl' is unknown: choose one of sft, kd"),
        ([GOOD] * 2, {"schedule": "step"}, "schedule = 'step' is unknown: choose one of cosine, linear, constant"),
        ([GOOD] * 2, {"teacher": None}, "objective = kd needs a teacher"),
    ],
)
def test_bad_input(texts, how, sentence, pupil, teacher, tokenizer):
    before = weights_of(pupil)
    with pytest.raises(qat.QatError, match=sentence):
        train(pupil, tokenizer, texts, **({"teacher": teacher, "batch_size": 2} | how))
    assert same(before, weights_of(pupil))


def test_problems_that_do_not_fit(pupil, teacher, tokenizer):
    problems = tasks.load("arithmetic", "train", 2)
    with pytest.raises(qat.QatError, match="objective = sft cannot learn from the student's own replies"):
        train(pupil, tokenizer, problems, None, objective="sft", batch_size=2)
    long = [problems[0], replace(problems[1], prompt="1+" * 100 + "1")]
    with pytest.raises(qat.QatError, match=r"max_new_tokens = 96 makes texts of 299 tokens, and the model has 256"):
        train(pupil, tokenizer, long, teacher, batch_size=2)


def test_a_loss_that_is_not_finite(teacher, tokenizer, lessons):
    model = made(teacher)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(qat.QatError, match=r"not finite at step 1: lower lr = 0\.0005"):
        train(model, tokenizer, lessons, teacher)
    model = made(teacher, scheme=None)
    with pytest.raises(qat.QatError, match=r"not finite at step \d+: lower lr = 1e\+30"):
        train(model, tokenizer, lessons, teacher, objective="sft", lr=1e30, steps=8, warmup=0.0)


def test_tokens_must_mean_the_same_to_both(tokenizer):
    qat.refuse_other_tokens(tokenizer, copy.deepcopy(tokenizer))
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<step>"])
    for pair in ((tokenizer, other), (other, tokenizer)):
        with pytest.raises(qat.QatError, match="different vocabularies: '<step>' is not the same token to both"):
            qat.refuse_other_tokens(*pair)


def test_parameters_that_are_not_read():
    for bits, init, objective, replies, changed, sentence in (
        (2, "full", "kd", "gold", "calibration", "init = full does not read calibration: leave it as it is"),
        (2, "parent", "kd", "gold", "calibration_texts", "init = parent does not read calibration_texts"),
        (2, "gptq", "sft", "gold", "reverse", "objective = sft does not read reverse"),
        (2, "gptq", "sft", "teacher", "temperature", "objective = sft does not read temperature"),
        (2, "gptq", "sft", "gold", "teacher", "objective = sft with replies = gold does not read teacher"),
        (16, "full", "kd", "gold", "grids", "bits = 16 does not read grids"),
    ):
        with pytest.raises(qat.QatError, match=sentence):
            qat.refuse_unread(bits, init, objective, replies, "arithmetic", [changed, "lr"])
    qat.refuse_unread(
        2, "gptq", "kd", "student", "recall", ["calibration", "calibration_texts", "reverse", "temperature", "grids"]
    )
    with pytest.raises(qat.QatError, match="choose domain = arithmetic or recall"):
        qat.refuse_unread(2, "gptq", "kd", "student", "corpus", [])
    qat.refuse_unread(3, "awq", "sft", "teacher", "arithmetic", ["calibration", "teacher", "symmetric"])
    qat.refuse_unread(16, "full", "sft", "gold", "arithmetic", ["lr", "texts", "activation_bits"])
