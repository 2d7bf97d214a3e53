"""The loss kernels against float64: on a GPU or in Triton's interpreter."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from helpers.kernels.fused import kl as fused  # noqa: E402
from helpers.training import objective  # noqa: E402

SIZES = [(3, 40), (5, 97), (2, 5000), (4, 8192)]  # tokens, words: within a block and over several
KINDS = {"forward": (0.0, 1.0), "reverse": (1.0, 1.0), "mixture": (0.3, 2.0), "cold": (0.5, 0.7)}


def plain(logits, of_teacher, reverse, temperature):
    """(value, slope) by autograd in float64."""
    x = logits.double().requires_grad_()
    log_q, log_p = ((t / temperature).log_softmax(-1) for t in (x, of_teacher.double()))
    forward, backward = (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    value = temperature**2 * ((1 - reverse) * forward + reverse * backward)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def off(one, other):
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_kl_and_its_slope(size, loss, kind):
    torch.manual_seed(0)
    logits, of_teacher = ((3 * torch.randn(size, device=DEVICE) + shift).to(kind) for shift in (20, -5))
    value, slope = plain(logits, of_teacher, *KINDS[loss])
    found = fused.kl_(logits, of_teacher, *KINDS[loss])
    assert found.dtype == torch.float32
    assert off(found, value) < 1e-5
    assert off(logits, slope) < (2e-5 if kind == torch.float32 else 4e-3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_and_its_slope(size, kind):
    torch.manual_seed(0)
    logits = (3 * torch.randn(size, device=DEVICE) + 20).to(kind)
    targets = torch.randint(size[1], size[:1], device=DEVICE)
    x = logits.double().requires_grad_()
    value = F.cross_entropy(x, targets, reduction="none")
    (slope,) = torch.autograd.grad(value.sum(), x)
    found = fused.cross_entropy_(logits, targets)
    assert off(found, value.detach()) < 1e-5
    assert off(logits, slope) < (2e-5 if kind == torch.float32 else 4e-3)


def test_certain_teachers_give_finite_losses():
    logits, of_teacher = torch.randn(2, 50, device=DEVICE), torch.zeros(2, 50, device=DEVICE)
    of_teacher[:, 3] = 1000.0
    for reverse in (0.0, 0.5, 1.0):
        slopes = logits.clone()
        assert torch.isfinite(fused.kl_(slopes, of_teacher, reverse, 1.0)).all()
        assert torch.isfinite(slopes).all()


@pytest.mark.parametrize("loss", ["sft", *KINDS])
def test_gradients_are_no_worse_than_the_plain_ones(loss, monkeypatch):
    """Of hidden states, head and bias in bfloat16, in three chunks; by the kernels on a GPU."""
    torch.manual_seed(0)
    tokens, words, width = 300, 1000, 64
    monkeypatch.setattr(objective, "LOGITS", (100 * words, 100 * words))
    heads = [nn.Linear(width, words, device=DEVICE).bfloat16() for _ in range(2)]
    hidden, of_teacher = (4 * torch.randn(tokens, width, device=DEVICE).bfloat16() for _ in range(2))
    targets = torch.randint(words, (tokens,), device=DEVICE)

    def value(h, head, kind):
        """The loss of all logits at once, computed in `kind`."""
        x, y = head(h).to(kind), heads[1].to(h.dtype)(of_teacher.to(h.dtype)).to(kind)
        if loss == "sft":
            return F.cross_entropy(x, targets, reduction="sum")
        r, t = KINDS[loss]
        log_q, log_p = (x / t).log_softmax(-1), (y / t).log_softmax(-1).detach()
        forward = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        backward = F.kl_div(log_p, log_q, reduction="sum", log_target=True)
        return t * t * ((1 - r) * forward + r * backward)

    def ours(h, head, _):
        heads[1].bfloat16()
        if loss == "sft":
            return objective.sft(h, head, targets)
        return objective.kd(h, head, of_teacher, heads[1], *KINDS[loss])

    found = {}
    for name, work, dtype, kind in (
        ("exact", value, torch.float64, torch.float64),
        ("plain", value, torch.bfloat16, torch.float32),
        ("ours", ours, torch.bfloat16, None),
    ):
        h, head = hidden.to(dtype).requires_grad_(), nn.Linear(width, words, device=DEVICE).to(dtype)
        head.load_state_dict(heads[0].state_dict())
        total = work(h, head, kind)
        found[name] = [total.detach(), *torch.autograd.grad(total / tokens, (h, head.weight, head.bias))]
    for exact, plain, one in zip(*found.values(), strict=True):
        worse = 1.1 if DEVICE == "cuda" else 1.5  # on a CPU the product of a chunk is rounded before it is added
        assert off(one, exact) < worse * off(plain, exact) + 1e-5
