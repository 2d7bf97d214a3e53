"""What a student is trained to do: values by hand, the plain loss over all logits, and memory that the tokens do not fill."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.quant import Scheme, fake, round_to_nearest
from helpers.training import objective

TOKENS, WORDS = 50, 97
KINDS = {  # name -> (share of the reverse KL, temperature)
    "forward": (0.0, 1.0),
    "reverse": (1.0, 1.0),
    "mixture": (0.3, 1.0),
    "warm": (0.0, 2.0),
    "cold mixture": (0.5, 0.7),
}


def student_and_teacher(seed=0, width=8, teacher_width=12):
    torch.manual_seed(seed)
    heads = nn.Linear(width, WORDS, bias=False), nn.Linear(teacher_width, WORDS, bias=False)
    for head in heads:
        nn.init.normal_(head.weight)
    return *heads, torch.randn(TOKENS, width), torch.randn(TOKENS, teacher_width)


def plain_kd(logits, teacher_logits, reverse, temperature):
    """The definition, over all logits at once."""
    q, p = (x.div(temperature).softmax(-1) for x in (logits, teacher_logits))
    forward, backward = (p * (p.log() - q.log())).sum(), (q * (q.log() - p.log())).sum()
    return temperature**2 * ((1 - reverse) * forward + reverse * backward)


def gradients(loss, *of):
    return torch.autograd.grad(loss, of)


def chunks_of(rows, monkeypatch):
    monkeypatch.setattr(objective, "LOGITS", (rows * WORDS, rows * WORDS))


@pytest.mark.parametrize("rows", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_kd_is_the_plain_one_with_its_gradient_however_it_is_cut(kind, rows, monkeypatch):
    chunks_of(rows, monkeypatch)
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    hidden.requires_grad_()
    naive = plain_kd(head(hidden), teacher_head(of_teacher).detach(), *KINDS[kind])
    ours = objective.kd(hidden, head, of_teacher, teacher_head, *KINDS[kind])
    assert ours.item() == pytest.approx(naive.item(), rel=1e-5)
    pairs = zip(gradients(ours, hidden, head.weight), gradients(naive, hidden, head.weight), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_sft_is_the_plain_one_with_its_gradient_however_it_is_cut(rows, monkeypatch):
    chunks_of(rows, monkeypatch)
    head, _, hidden, _ = student_and_teacher()
    hidden.requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,))
    naive = -head(hidden).log_softmax(-1)[torch.arange(TOKENS), targets].sum()
    ours = objective.sft(hidden, head, targets)
    assert ours.item() == pytest.approx(naive.item(), rel=1e-5)
    pairs = zip(gradients(ours, hidden, head.weight), gradients(naive, hidden, head.weight), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def by_hand():
    """Two tokens, three words; the head is the identity, so hidden states are logits.

    Teacher: p = (1/2, 1/4, 1/4) at both; student: q = (1/4, 1/2, 1/4), then q = p.
    """
    head = nn.Linear(3, 3, bias=False)
    nn.init.eye_(head.weight)
    p, q = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    return head, torch.stack([q, p]), torch.stack([p, p])


def test_by_hand():
    head, q, p = by_hand()
    forward = 0.5 * math.log(2) + 0.25 * math.log(1 / 2)  # = 1/4 log 2, and here as much in reverse
    for reverse in (0.0, 0.4, 1.0):
        assert objective.kd(q, head, p, head, reverse).item() == pytest.approx(forward)
    # at T = 1/2 probabilities are squared and made to sum to 1: p = (4, 1, 1) / 6, q = (1, 4, 1) / 6; times T^2
    cold = 0.25 * (4 / 6 * math.log(4) + 1 / 6 * math.log(1 / 4))
    assert objective.kd(q, head, p, head, temperature=0.5).item() == pytest.approx(cold)
    assert objective.sft(q, head, torch.tensor([1, 0])).item() == pytest.approx(2 * math.log(2))


def test_the_slope_by_hand():
    """At the logits, forward KL has the slope T (q - p), cross-entropy q - 1 at the token's place."""
    head, q, p = by_hand()
    q.requires_grad_()
    (slope,) = gradients(objective.kd(q, head, p, head), q)
    assert torch.allclose(slope, torch.tensor([[-0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]), atol=1e-6)
    (slope,) = gradients(objective.kd(q, head, p, head, temperature=0.5), q)
    assert torch.allclose(slope[0], 0.5 * torch.tensor([-3 / 6, 3 / 6, 0.0]), atol=1e-6)
    (slope,) = gradients(objective.sft(q, head, torch.tensor([1, 0])), q)
    assert torch.allclose(slope, torch.tensor([[0.25, -0.5, 0.25], [-0.5, 0.25, 0.25]]), atol=1e-6)


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0.3, 5))
@settings(max_examples=40, deadline=None)
def test_kl_is_never_negative_and_zero_for_equal_models(seed, reverse, temperature):
    head, teacher_head, hidden, of_teacher = student_and_teacher(seed)
    assert objective.kd(hidden, head, of_teacher, teacher_head, reverse, temperature) > 0
    assert objective.kd(hidden, head, hidden.clone(), head, reverse, temperature).item() == pytest.approx(0, abs=1e-4)


class Capped(nn.Linear):
    """A head that keeps its logits for its backward pass."""

    def forward(self, x):
        return 5 * torch.tanh(super().forward(x) / 5)


def heads_of_all_sorts():
    torch.manual_seed(1)
    plain = nn.Linear(32, WORDS)
    yield "with a bias", plain
    yield "fake-quantized", fake.FakeQuantLinear(copy.deepcopy(plain), Scheme(3, "group", 32), "learned", masked=True)
    yield "packed", round_to_nearest(plain.weight.detach(), Scheme(3, "group", 32)).pack()
    capped = Capped(32, WORDS)
    yield "capped", capped
    frozen = copy.deepcopy(plain).requires_grad_(False)
    yield "frozen", frozen
    frozen.bias.requires_grad_(True)
    yield "frozen but for its bias", frozen


@pytest.mark.parametrize("kind", ["sft", *KINDS])
@pytest.mark.parametrize("of_hidden", [True, False])
def test_any_head_can_be_trained_or_stand_still(kind, of_hidden, monkeypatch):
    """Tied to an embedding as well: its parameter gets both gradients."""
    chunks_of(7, monkeypatch)
    targets, of_teacher = torch.randint(0, WORDS, (TOKENS,)), torch.randn(TOKENS, WORDS)
    for name, head in heads_of_all_sorts():
        hidden = torch.randn(TOKENS, 32, requires_grad=of_hidden)
        found = []
        for ours in (True, False):
            if kind == "sft":
                loss = (
                    objective.sft(hidden, head, targets)
                    if ours
                    else F.cross_entropy(head(hidden), targets, reduction="sum")
                )
            elif ours:
                loss = objective.kd(hidden, head, of_teacher, nn.Identity(), *KINDS[kind])
            else:
                loss = plain_kd(head(hidden), of_teacher, *KINDS[kind])
            trained = [t for t in (hidden, *head.parameters()) if t.requires_grad]
            assert loss.requires_grad == bool(trained), name
            found.append([loss.detach(), *(torch.autograd.grad(3 * loss, trained) if trained else ())])
        for one, other in zip(*found, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max(), name


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_a_head_count_for_value_and_gradient(before):
    head, _, hidden, _ = student_and_teacher()
    hidden.requires_grad_()
    if before:
        head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        head.register_forward_hook(lambda module, args, output: 5 * torch.tanh(output / 5))
    targets = torch.randint(0, WORDS, (TOKENS,))
    found = []
    for loss in (objective.sft(hidden, head, targets), F.cross_entropy(head(hidden), targets, reduction="sum")):
        found.append([loss.detach(), *gradients(loss, hidden, head.weight)])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_no_token_costs_nothing():
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    nothing = hidden[:0].requires_grad_()
    for loss in (
        objective.kd(nothing, head, of_teacher[:0], teacher_head),
        objective.sft(nothing, head, torch.zeros(0).long()),
    ):
        assert loss.item() == 0
        assert not gradients(loss, head.weight)[0].any()


def test_a_tied_head_gets_both_gradients():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
    head.weight = embedding.weight
    ids = torch.randint(0, WORDS, (TOKENS,))
    found = []
    for loss in (objective.sft, lambda h, head, ids: F.cross_entropy(head(h), ids, reduction="sum")):
        found += gradients(loss(embedding(ids), head, ids.flip(0)), head.weight)
    assert torch.allclose(*found, atol=1e-5)


def test_without_gradients_only_the_value_is_found(monkeypatch):
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    loss = objective.kd(hidden, head, of_teacher, teacher_head)
    monkeypatch.delattr(objective, "_add_product")
    with torch.no_grad():
        assert torch.equal(objective.kd(hidden, head, of_teacher, teacher_head), loss)


@pytest.mark.parametrize("rows", [7, 1000])
def test_no_gradient_reaches_the_teacher(rows, monkeypatch):
    chunks_of(rows, monkeypatch)
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    of_teacher.requires_grad_()
    objective.kd(hidden, head, of_teacher, teacher_head, 0.5).backward()
    assert of_teacher.grad is None
    assert teacher_head.weight.grad is None
    assert head.weight.grad is not None


def test_sharp_teachers_give_finite_losses():
    """Logits of 1,000 apart: the teacher's other words have probability 0 in float32."""
    head, q, p = by_hand()
    p = 1000 * F.one_hot(torch.tensor([0, 1]), 3).float()
    for reverse in (0.0, 0.5, 1.0):
        assert torch.isfinite(objective.kd(q, head, p, head, reverse))


def test_low_precision_hidden_states_are_compared_in_float32():
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    found = objective.kd(hidden.bfloat16(), head.bfloat16(), of_teacher, teacher_head)
    assert found.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that any operation gave."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


@pytest.mark.parametrize("kind", ["sft", "kd"])
def test_no_tensor_holds_all_tokens_times_the_vocabulary(kind, monkeypatch):
    chunks_of(7, monkeypatch)
    head, teacher_head, hidden, of_teacher = student_and_teacher()
    hidden.requires_grad_()
    with Largest() as largest:
        if kind == "sft":
            loss = objective.sft(hidden, head, torch.zeros(TOKENS, dtype=torch.long))
        else:
            loss = objective.kd(hidden, head, of_teacher, teacher_head, 0.5)
        loss.backward()
    assert head.weight.grad is not None
    assert largest.numbers <= max(7 * WORDS, teacher_head.weight.numel())
    assert largest.numbers < TOKENS * WORDS / 3
