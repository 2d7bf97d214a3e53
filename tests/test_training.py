"""Pre-training and GRPO: losses by hand, settings that must not be TRL's defaults, and a run that learns."""

import copy
import signal
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer

from helpers import grading, models, tasks
from helpers.tasks import corpus
from helpers.training import grpo, pretrain


@pytest.fixture(scope="module")
def tokenizer():
    return models.build_tokenizer()


@pytest.fixture
def model(tokenizer):
    models.seed_everything(0)
    return models.build("xs", tokenizer)


def test_only_reply_tokens_count(tokenizer):
    encoded = pretrain.encode([("1+2", r"\boxed{3}"), ("10+20", r"\boxed{30}")], tokenizer)
    batch = pretrain.pack(encoded, tokenizer.pad_token_id, width=24)
    assert batch.ids.shape == batch.positions.shape == batch.labels.shape == (1, 24)
    assert (
        tokenizer.decode(batch.ids[0])
        == r"<user>1+2<assistant>\boxed{3}<eos><user>10+20<assistant>\boxed{30}<eos><pad><pad><pad>"
    )
    assert tokenizer.decode(batch.labels[0][batch.labels[0] != pretrain.IGNORED]) == r"\boxed{3}<eos>\boxed{30}<eos>"
    assert batch.positions[0].tolist() == [*range(9), *range(12), 0, 0, 0]


@given(st.integers(0, 1_000), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_packing_keeps_every_document_whole(seed, n):
    tokenizer = models.build_tokenizer()
    encoded = pretrain.encode(corpus.documents(n, seed=seed), tokenizer)
    batch = pretrain.pack(encoded, tokenizer.pad_token_id)
    flat = batch.ids.flatten().tolist()
    starts = [i for i, token in enumerate(flat) if token == tokenizer.convert_tokens_to_ids("<user>")]
    found = [tuple(flat[start : start + len(ids)]) for start, (ids, _) in zip(starts, encoded, strict=True)]
    assert found == [tuple(ids.tolist()) for ids, _ in encoded]


def test_packed_documents_do_not_see_one_another(model, tokenizer):
    """Loss of a packed batch against the documents one by one."""
    encoded = pretrain.encode(corpus.documents(12, seed=1), tokenizer)
    model.eval()
    packed = pretrain.loss_of(model, pretrain.pack(encoded, tokenizer.pad_token_id)).detach()
    alone = [pretrain.loss_of(model, pretrain.pack([one], tokenizer.pad_token_id)).detach() for one in encoded]
    weights = torch.tensor([float(len(ids) - head) for ids, head in encoded])
    assert packed.item() == pytest.approx(float((torch.stack(alone) * weights).sum() / weights.sum()), abs=1e-5)


def test_pretraining_lowers_the_loss_and_does_not_depend_on_workers(tokenizer):
    losses = []
    for workers in (0, 2):
        models.seed_everything(0)
        net = models.build("xs", tokenizer)
        history = pretrain.train(
            net, tokenizer, partial(corpus.documents, 50, 0), 40, 4e-3, warmup=5, workers=workers, log_every=10
        )
        losses.append([row["loss"] for row in history])
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.85 * losses[0][0]
    assert len(losses[0]) == 4


@pytest.mark.parametrize(("loss", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
def test_every_setting_that_differs_from_trl_is_set(loss, scale, tmp_path):
    config = grpo.settings(loss, 10, 4, 8, 1e-4, 1.0, 32, 3, str(tmp_path), 16)
    assert (config.loss_type, config.scale_rewards) == (loss, scale)
    assert (config.beta, config.num_iterations, config.epsilon) == (0.0, 1, 0.2)
    assert (config.temperature, config.top_p, config.top_k, config.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert not config.vllm_importance_sampling_correction
    assert not config.mask_truncated_completions
    assert (config.lr_scheduler_type, config.warmup_steps, config.max_grad_norm) == ("linear", 1, 1.0)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (16, 2)
    assert config.generation_batch_size == 32  # one rollout an update


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo"])
def test_the_update_is_the_formula(loss, model, tokenizer, monkeypatch):
    """The gradient of one TRL step against that of the objective written out, on replies of different lengths."""

    def short_documents(part):
        return [(p, "7" * (1 + len(p) % 5)) for p, _ in corpus.documents(30, 0, part)]

    pretrain.train(model, tokenizer, short_documents, 30, 4e-3, warmup=5)  # so that replies end, sooner or later
    seen = {}
    compute = GRPOTrainer._compute_loss

    def spy(self, net, inputs):
        theirs = compute(self, net, inputs)
        weights = [p for p in net.parameters() if p.requires_grad]
        seen["theirs"] = torch.autograd.grad(theirs, weights, retain_graph=True)
        ids, mask = inputs["completion_ids"], inputs["completion_mask"].float()
        whole = torch.cat([inputs["prompt_ids"], ids], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = net(input_ids=whole, attention_mask=attention).logits[:, -ids.shape[1] - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        terms = -(logps - logps.detach()).exp() * inputs["advantages"].unsqueeze(1) * mask
        ours = (terms.sum(1) / mask.sum(1)).mean() if loss == "grpo" else terms.sum() / (len(ids) * 8)
        seen["ours"] = torch.autograd.grad(ours, weights)
        seen.update(lengths=mask.sum(1).tolist(), advantages=inputs["advantages"])
        return theirs

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy)
    rewards = iter([1.0, 0.0, 0.1, 0.0, 1.1, 1.1, 0.0, 0.0])
    problems = tasks.load("arithmetic", "train", 2)
    grpo.train(
        model, tokenizer, problems, loss=loss, steps=1, prompts_per_step=2, group_size=4, max_new_tokens=8, kl_every=0,
        reward=lambda verdict: next(rewards),
    )  # fmt: skip
    r = torch.tensor([[1.0, 0.0, 0.1, 0.0], [1.1, 1.1, 0.0, 0.0]])
    advantage = r - r.mean(1, keepdim=True)
    if loss == "grpo":
        advantage = advantage / (r.std(1, keepdim=True) + 1e-4)
    # TRL shuffles the replies of a rollout
    assert torch.allclose(seen["advantages"].cpu().sort().values, advantage.flatten().sort().values, atol=1e-5)
    assert len(set(seen["lengths"])) > 1
    ours, theirs = (torch.cat([g.flatten() for g in seen[who]]) for who in ("ours", "theirs"))
    assert ours.norm() > 1e-3
    assert (ours - theirs).norm() < 1e-4 * ours.norm()


@pytest.mark.slow
def test_grpo_learns_the_form(model, tokenizer):
    """From a base that boxes some replies, a few steps must raise the reward and the share of boxes."""
    pretrain.train(model, tokenizer, partial(corpus.documents, 60, 0), 100, 4e-3, warmup=10)
    rows = []
    history = grpo.train(model, tokenizer, tasks.load("arithmetic", "train", 96), steps=12, prompts_per_step=8, group_size=8,
                         lr=2e-3, max_new_tokens=48, kl_every=4, log=lambda **row: rows.append(row))  # fmt: skip
    assert rows == history
    assert [row["step"] for row in history] == list(range(1, 13))
    assert set(grpo.LOGGED) <= set(history[0])
    first, last = (np.mean([row["reward"] for row in part]) for part in (history[:4], history[-4:]))
    assert last > first
    kl = [row["kl"] for row in history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # the warm-up step has lr 0
    assert kl[-1] > kl[0]
    assert not model.training
    # a copy computes with its own weights, not with the trained model's
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.zero_()
    ids = torch.tensor([[3, 4, 5, 6]])
    assert not torch.allclose(copied(ids).logits, model(ids).logits)


def test_kl_by_hand(model, tokenizer):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    chat = [{"role": "user", "content": "1+2"}]
    reply = tokenizer(r"\boxed{3}")["input_ids"]
    found = grpo.kl_to_start(model, other, tokenizer, [chat], [reply])
    ids = torch.tensor([tokenizer("<user>1+2<assistant>")["input_ids"] + reply])
    p, q = (net(ids).logits[0, 4:-1].softmax(-1) for net in (model, other))
    assert found == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert grpo.kl_to_start(model, model, tokenizer, [chat], [reply]) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": "dapo"}, "loss = 'dapo' is unknown: choose one of grpo, dr_grpo."),
        ({"group_size": 1}, "group_size = 1 has nothing to compare"),
        ({"micro_batch": 5}, "micro_batch = 5 does not divide the 128 replies"),
    ],
)
def test_settings_that_do_not_fit(changes, sentence, model, tokenizer):
    with pytest.raises(grpo.TrainingError, match=sentence):
        grpo.train(model, tokenizer, tasks.load("arithmetic", "train", 4), **changes)


# ---------------------------------------------------------------- rollouts that teach nothing, or go wrong

TINY = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "kl_every": 0, "lr": 1e-3}


def trained(model, tokenizer, **changes):
    return grpo.train(model, tokenizer, tasks.load("arithmetic", "train", 8), **(TINY | changes))


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo"])
def test_equal_rewards_change_nothing_and_are_counted(model, tokenizer, loss):
    before = weights_of(model)
    history = trained(model, tokenizer, loss=loss, reward=lambda verdict: 0.1)
    assert torch.equal(weights_of(model), before)
    assert {row["no_advantage"] for row in history} == {1.0}
    assert {row["grad_norm"] for row in history} == {0.0}
    assert history[0]["reward"] == pytest.approx(0.1)


@pytest.mark.slow
def test_replies_that_never_end_are_cut_off_and_earn_nothing(model, tokenizer):
    class NoEnd(torch.nn.Linear):
        """An output head to which the end mark is all but impossible."""

        def forward(self, hidden):
            return super().forward(hidden).index_fill(-1, torch.tensor(tokenizer.eos_token_id), -1e4)

    model.lm_head.__class__ = NoEnd
    history = trained(model, tokenizer, steps=1)
    assert history[0]["clipped"] == 1.0
    assert history[0]["reply_tokens"] == TINY["max_new_tokens"]
    assert history[0]["reward"] == 0.0
    assert history[0]["no_advantage"] == 1.0


def broken(verdict):
    raise KeyError("answer")


def endless(verdict):
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (broken, r"^the reward broken failed at step 1 on the reply '.*': KeyError: 'answer'\.$"),
        (endless, r"^the reward endless of step 1 took more than 0\.2 s: see reply 0\.$"),
        (lambda verdict: float("nan"), r"^the reward <lambda> gave nan at step 1 for the reply '.*'\.$"),
        (
            lambda verdict: "good",
            r"^the reward <lambda> failed at step 1 on the reply '.*': ValueError: could not convert",
        ),
    ],
)
def test_a_reward_that_goes_wrong_is_one_sentence(model, tokenizer, reward, sentence):
    with pytest.raises(grpo.TrainingError, match=sentence) as error:
        trained(model, tokenizer, reward=reward, reward_seconds=0.2)
    assert "\n" not in str(error.value)
    assert "forward" not in model.__dict__  # the model can be used, and copied, as before
    assert not model.training


def test_rewards_in_time_leave_the_alarm_clock_as_it_was():
    before = signal.getsignal(signal.SIGALRM)
    assert grpo.rewards(grading.reward, [r"\boxed{3}", "3"], ["3", "3"], 1, 5.0) == [1.1, 0.0]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_a_run_that_was_killed_starts_again_and_gives_the_same(tokenizer):
    """There is nothing to resume from: only whole runs are kept. A fresh start is not moved by what went before."""

    def fresh():
        models.seed_everything(3)
        return models.load("base-xs")[0]

    def killed(step, **_):
        if step == 2:
            raise KeyboardInterrupt

    whole = fresh()
    expected = trained(whole, tokenizer, steps=3)
    with pytest.raises(KeyboardInterrupt):
        trained(fresh(), tokenizer, steps=3, log=killed)
    torch.rand(100)  # whatever else the process did
    again = fresh()
    assert trained(again, tokenizer, steps=3) == expected
    assert torch.equal(weights_of(again), weights_of(whole))


def test_a_benchmarks_replies_earn_what_its_own_grading_says():
    replies = [r"\boxed{\frac{2}{4}}", r"\boxed{0.5}", r"\boxed{0.6}", "one half"]
    assert grpo.rewards(grading.reward, replies, ["1/2"] * 4, 1, 60, "maths") == pytest.approx([1.1, 1.1, 0.1, 0.0])
    assert grpo.rewards(grading.reward, replies, ["1/2"] * 4, 1, 60) == pytest.approx([0.1, 0.1, 0.1, 0.0])
