"""Tiny models: a tokenizer and a chat template of Qwen's kind, three architectures, and replies that end."""

import pytest

from helpers import models, quant, sampling
from helpers.models import tiny
from helpers.tasks import Problem, prompts

PROBLEMS = [Problem(str(i), f"What is $x_{{{i}}}$ — 27 or π?", "1", 0) for i in range(40)]


@pytest.fixture(scope="module", params=tiny.KINDS)
def loaded(request, tmp_path_factory):
    models.seed_everything(0)
    return models.load(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


def test_the_tokenizer_reads_and_writes_any_text():
    tokenizer = tiny.build_tokenizer()
    for text in ("Let $x$ be — π²\n\n  \\boxed{42}", "<think>1234</think>"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer("1234", add_special_tokens=False)["input_ids"]) == 4
    ids = tokenizer("<think>a<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"  # so that a reward can see it


def test_the_chat_template_is_of_qwens_kind():
    tokenizer = tiny.build_tokenizer()
    shown = {style: prompts.texts(tokenizer, PROBLEMS[:1], style)[0] for style in ("raw", "thinking", "no-thinking")}
    assert shown["raw"] == f"<|im_start|>user\n{PROBLEMS[0].prompt}<|im_end|>\n<|im_start|>assistant\n"
    assert shown["no-thinking"] == shown["thinking"] + "<think>\n\n</think>\n\n"


def test_replies_end_at_either_of_two_tokens(loaded):
    model, tokenizer = loaded
    assert len(model.generation_config.eos_token_id) == 2
    replies = sampling.sample(model, tokenizer, PROBLEMS, temperature=1.0, max_new_tokens=40)
    finished = [reply for reply in replies if reply.finished]
    assert len(finished) > 20
    assert {reply.ids[-1] for reply in finished} <= set(model.generation_config.eos_token_id)


def test_a_quantized_one_comes_back_from_the_disk(loaded, tmp_path):
    model, tokenizer = loaded
    quant.quantize(model, "rtn", "w4g32", [])
    before = sampling.sample(model, tokenizer, PROBLEMS[:4], max_new_tokens=8)
    again, _ = models.load(models.save(model, tokenizer, tmp_path / "m", card="A tiny one."))
    assert sampling.sample(again, tokenizer, PROBLEMS[:4], max_new_tokens=8) == before


def test_the_same_files_each_time(tmp_path):
    folders = [tiny.save("qwen3", tmp_path / name) for name in ("a", "b")]
    for file in folders[0].iterdir():
        assert (folders[1] / file.name).read_bytes() == file.read_bytes(), file.name
