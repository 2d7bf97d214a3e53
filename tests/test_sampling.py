"""Sampling: order, repeatability, end marks, and agreement with a decoding loop written out."""

import pytest
import torch

from helpers import models, sampling, tasks
from helpers.errors import UserError
from helpers.sampling.traces import replies_of
from helpers.tasks.problem import split_of


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


# --- texts to train on ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return models.load("base-xs")


@pytest.mark.parametrize("domain", ["arithmetic", "recall", "corpus"])
@pytest.mark.parametrize("writer", ["gold", "teacher"])
def test_training_texts_are_a_prompt_and_a_reply_of_the_training_split(writer, domain, shipped):
    texts = sampling.training_texts(writer, domain, *shipped, 30, seed=1)
    tokenizer = shipped[1]
    assert len(texts) == 30 if writer == "gold" else 0 < len(texts) <= 30
    for ids, head in texts:
        assert 0 < head < len(ids)
        prompt, reply = tokenizer.decode(ids[:head]), ids[head:]
        assert prompt.startswith("<user>")
        assert prompt.endswith("<assistant>")
        assert split_of(prompt.removeprefix("<user>").removesuffix("<assistant>")) == "train"
        assert reply[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in reply[:-1]
    assert texts == sampling.training_texts(writer, domain, *shipped, 30, seed=1)
    assert texts != sampling.training_texts(writer, domain, *shipped, 30, seed=2)


def test_gold_texts_by_hand(shipped):
    problem = tasks.load("recall", "train", 1)[0]
    ids, head = sampling.training_texts("gold", "recall", *shipped, 1)[0]
    assert shipped[1].decode(ids[:head]) == f"<user>{problem.prompt}<assistant>"
    assert shipped[1].decode(ids[head:]) == rf"\boxed{{{problem.gold}}}<eos>"


def test_replies_that_were_not_finished_are_left_out_unless_they_are_asked_for(pair):
    all_of_them = replies_of(*pair, PROBLEMS, seed=0, max_new_tokens=5, unfinished=True)
    finished = replies_of(*pair, PROBLEMS, seed=0, max_new_tokens=5)
    assert len(all_of_them) == len(PROBLEMS)
    ended = [text for text in all_of_them if text[0][-1] == pair[1].eos_token_id]
    assert finished == ended
    assert len(finished) < len(PROBLEMS)
    assert all(len(ids) <= head + 5 for ids, head in all_of_them)


def test_training_texts_that_cannot_be_had(shipped):
    for writer, domain, sentence in (
        ("student", "arithmetic", r"writer = 'student' is unknown: choose one of gold, teacher\."),
        ("gold", "algebra", r"domain = 'algebra' is unknown: choose one of arithmetic, recall, corpus, math"),
    ):
        with pytest.raises(UserError, match=sentence):
            sampling.training_texts(writer, domain, *shipped, 3)
    with pytest.raises(UserError, match=r"the teacher finished none of 3 replies within max_new_tokens = 1\."):
        sampling.training_texts("teacher", "arithmetic", *shipped, 3, max_new_tokens=1)
