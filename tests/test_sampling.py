"""Sampling: order, repeatability, end marks, and agreement with a decoding loop written out."""

import pytest
import torch

from helpers import models, sampling, tasks
from helpers.errors import UserError


@pytest.fixture(scope="module")
def pair():
    tokenizer = models.build_tokenizer()
    models.seed_everything(0)
    return models.build("xs", tokenizer).eval(), tokenizer


PROBLEMS = tasks.load("arithmetic", "test", 12, seed=0)


def test_greedy_is_the_loop_written_out(pair):
    model, tokenizer = pair
    replies = sampling.sample(model, tokenizer, PROBLEMS, max_new_tokens=10, batch_size=5)
    for problem, reply in zip(PROBLEMS, replies, strict=True):
        ids = tokenizer(f"<user>{problem.prompt}<assistant>", add_special_tokens=False)["input_ids"]
        written = []
        while len(written) < 10 and tokenizer.eos_token_id not in written:
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
        assert list(reply.ids) == written
        assert reply.finished == (written[-1] == tokenizer.eos_token_id)
        assert reply.text == tokenizer.decode(written, skip_special_tokens=True)


def test_replies_stay_with_their_problem(pair):
    replies = sampling.sample(*pair, PROBLEMS, k=3, temperature=1.0, max_new_tokens=8, batch_size=7, seed=1)
    assert [r.problem_id for r in replies] == [p.id for p in PROBLEMS for _ in range(3)]
    assert len({r.ids for r in replies[:3]}) > 1


def test_sampling_repeats_with_its_seed(pair):
    def draw(seed):
        return sampling.sample(*pair, PROBLEMS, k=2, temperature=1.0, max_new_tokens=8, seed=seed)

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_sampling_follows_the_model(pair):
    """First tokens at temperature 1 against the softmax, by a chi-square test at a level that fails once in ten thousand."""
    from scipy import stats

    model, tokenizer = pair
    problem = PROBLEMS[0]
    n = 4_000
    replies = sampling.sample(model, tokenizer, [problem], k=n, temperature=1.0, max_new_tokens=1, batch_size=n, seed=0)
    ids = tokenizer(f"<user>{problem.prompt}<assistant>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    expected = model(ids).logits[0, -1].detach().double().softmax(-1).numpy() * n
    counts = torch.bincount(torch.tensor([r.ids[0] for r in replies]), minlength=len(expected)).numpy()
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_equal_replies_are_not_sampled_twice(pair):
    with pytest.raises(UserError, match="k = 3 with temperature 0 would give 3 equal replies"):
        sampling.sample(*pair, PROBLEMS, k=3)
