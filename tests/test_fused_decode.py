"""The kernels of a decoding step against their references: on a GPU as they are, on a CPU through Triton's interpreter."""

import os

import pytest
import torch
from scipy import stats

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from helpers.kernels import backend
from helpers.kernels import decode as reference
from helpers.kernels.fused import decode as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The module under `kernels` is the reference here, also on a GPU."""
    monkeypatch.setenv(backend.SWITCH, "torch")
    torch.manual_seed(0)


def normal(*shape, kind=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(kind)


def close(found, expected, kind):
    assert found.dtype == expected.dtype == kind
    assert torch.allclose(found.float(), expected.float(), atol=CLOSE[kind], rtol=CLOSE[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [48, 128, 1000])
@pytest.mark.parametrize("first", [False, True])
def test_norm(n, first, kind):
    hidden, change, weight = normal(5, n, kind=kind), normal(5, n, kind=kind), normal(n, kind=kind)
    change = None if first else change
    kept = hidden.clone()
    expected = reference.add_norm(kept, change, weight, 1e-6)
    close(fused.add_norm(hidden, change, weight, 1e-6), expected, kind)
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv", "d"), [(4, 2, 32), (9, 3, 64), (2, 2, 12)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store(heads, kv, d, normed, kind):
    rows, width = 3, 20
    query, key, value = (
        normal(rows, heads, d, kind=kind),
        normal(rows, kv, d, kind=kind),
        normal(rows, kv, d, kind=kind),
    )
    weights = (normal(d, kind=kind), normal(d, kind=kind)) if normed else None
    angle = torch.rand(width, d // 2, device=DEVICE).repeat(1, 2) * 6
    cos, sin = angle.cos().to(kind), angle.sin().to(kind)
    places, positions = torch.tensor([[2, 0, 1], [0, 7, 19]], device=DEVICE).unbind()
    caches = [[normal(rows, kv, width, d, kind=kind) for _ in range(2)]]
    caches.append([c.clone() for c in caches[0]])
    found, expected = (
        module.rotate_store(query, key, value, weights, 1e-6, cos, sin, places, positions, *cache)
        for module, cache in zip((fused, reference), caches, strict=True)
    )
    close(found, expected, kind)
    for mine, theirs in zip(*caches, strict=True):
        close(mine, theirs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv", "d"), [(4, 2, 32), (9, 3, 64), (2, 2, 12)])
@pytest.mark.parametrize(("rows", "width"), [(3, 70), (1, 400), (140, 66)])
def test_attention(heads, kv, d, rows, width, kind):
    """With few rows the cache is split among programs, with many it is not; unwritten places hold what must not be read."""
    rows = min(rows, 20) if DEVICE == "cpu" else rows
    query = normal(rows, heads, d, kind=kind)
    keys, values = normal(2, rows, kv, width, d, kind=kind)
    lengths = torch.randint(0, width, (rows,), device=DEVICE)
    lengths[0] = width - 1
    expected = reference.attend(query, keys, values, lengths, d**-0.5)
    unseen = (torch.arange(width, device=DEVICE) > lengths.unsqueeze(1))[:, None, :, None].expand_as(keys)
    keys[unseen] = values[unseen] = 1e4
    close(fused.attend(query, keys, values, lengths, d**-0.5), expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_gate(kind):
    gate, up = normal(3, 777, kind=kind), normal(3, 777, kind=kind)
    close(fused.gate(gate, up), reference.gate(gate, up), kind)


# ---------------------------------------------------------------- drawing


def numbers(seed, clock=0):
    return torch.tensor([seed], device=DEVICE), torch.tensor([clock], device=DEVICE)


@pytest.mark.parametrize("vocabulary", [50, 9_001])
def test_greedy_takes_the_likeliest(vocabulary):
    logits = normal(6, vocabulary)
    found, expected = (module.draw(logits, 0.0, 0, 1.0, *numbers(0)) for module in (fused, reference))
    assert torch.equal(found[0], expected[0])
    close(found[1], expected[1], torch.float32)


@pytest.mark.parametrize(
    ("vocabulary", "temperature", "top_k", "top_p"),
    [(50, 1.0, 0, 1.0), (9_001, 0.25, 0, 1.0), (50, 0.7, 7, 1.0), (50, 0.7, 0, 0.8), (9_001, 0.3, 40, 0.9), (50, 1.0, 1, 1.0)],
)  # fmt: skip
def test_draws_follow_the_distribution(vocabulary, temperature, top_k, top_p):
    """By a chi-square test at a level that fails once in ten thousand; log-probabilities are those before the filters."""
    rows, steps = (2_000, 2) if DEVICE == "cuda" else (120, 1)  # the interpreter is slow
    logits = normal(1, vocabulary).expand(rows, -1).contiguous()
    drawn = [fused.draw(logits, temperature, top_k, top_p, *numbers(5, step)) for step in range(steps)]
    tokens = torch.cat([token for token, _ in drawn])
    logs = (logits[0] / temperature).log_softmax(-1)
    close(torch.cat([logprob for _, logprob in drawn]), logs[tokens], torch.float32)
    p = reference.allowed(logits[:1], temperature, top_k, top_p)[0].double().softmax(-1).cpu()
    counts = torch.bincount(tokens.cpu(), minlength=vocabulary)
    assert counts[p == 0].sum() == 0
    common = p * len(tokens) > 5
    expected, found = p[common] * len(tokens), counts[common].double()
    rest = torch.tensor([1 - p[common].sum(), 0]).double().clamp(min=0) * len(tokens)
    if rest[0] > 5:
        expected, found = torch.cat([expected, rest[:1]]), torch.cat([found, counts[~common].sum().double().view(1)])
    if len(expected) > 1:
        assert stats.chisquare(found.numpy(), (expected / expected.sum() * found.sum()).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (20, 0.7)])
def test_no_token_outside_and_none_left_out(kind, top_k, top_p):
    logits = (normal(4, 60) * 2).to(kind)
    kept = reference.allowed(logits, 0.9, top_k, top_p) > -torch.inf
    floors = torch.empty(4, dtype=torch.int32, device=DEVICE)
    last = {torch.bfloat16: 16, torch.float16: 13}.get(kind, 0)
    fused._floor[(4,)](logits, floors, 0.9, top_k, top_p, 60, 64, last, top_k > 0, top_p < 1)
    bits = logits.float().view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    assert torch.equal(keys >= floors.unsqueeze(1), kept)


def test_numbers_repeat_with_seed_and_step_and_differ_otherwise():
    logits = normal(1, 50).expand(64, -1).contiguous()
    draws = [
        fused.draw(logits, 1.0, 0, 1.0, *numbers(*which))[0].tolist() for which in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert draws[0] == draws[1]
    assert len({tuple(d) for d in draws}) == 3
    assert len(set(draws[0])) > 5


def test_a_state_advances_as_in_the_reference():
    rows, limit = 6, 5
    states = []
    for module in (fused, reference):
        torch.manual_seed(1)
        token, lengths = torch.zeros(rows, dtype=torch.long), torch.arange(rows)
        counts = torch.tensor([0, 1, 2, 3, 4, 2])
        ended = torch.tensor([False, False, True, False, False, False])
        tokens, logprobs = torch.full((rows, limit + 1), 9), torch.zeros(rows, limit + 1)
        state = [t.to(DEVICE) for t in (token, lengths, counts, ended, tokens, logprobs)]
        drawn = torch.tensor([3, 4, 5, 6, 7, 8], device=DEVICE)
        clock = torch.zeros(1, dtype=torch.long, device=DEVICE)
        module.advance(*state, drawn, torch.rand(rows).to(DEVICE), torch.tensor([4, 8, 2], device=DEVICE), clock)
        states.append([*state, clock])
    for mine, theirs in zip(*states, strict=True):
        assert torch.equal(mine, theirs)
    assert states[0][3].tolist() == [False, True, True, False, True, True]
