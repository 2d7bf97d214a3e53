"""Texts to calibrate a quantizer on, and texts to train on: what a model itself writes, on the task or off it, or given replies.

GPTQ for reasoning models is best calibrated on the model's own traces (2601.14888 and the study before it); the other sources are
there to be compared with.
"""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.errors import UserError
from helpers.sampling.generate import prompt_ids, sample
from helpers.tasks import TRAINING, Problem, load
from helpers.tasks.corpus import documents, solution

WRITERS = ("gold", "teacher")  # of the replies to train on; "gold": of the task itself
DOMAINS = ("arithmetic", "recall", "corpus", *TRAINING)
Document = tuple[list[int], int]  # token ids of prompt and reply, length of the prompt
SOURCES = {
    "traces": "arithmetic",
    "recall": "recall",
    "corpus": "",
    **{name: name for name in TRAINING},
}  # -> the task asked


def calibration_texts(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    seed: int = 0,
    max_new_tokens: int = 96,
) -> list[list[int]]:
    """`n` texts as token ids, prompt and reply: the model's own at temperature 1 (`traces`, `recall`, or a
    training set by its name), or the corpus's (`corpus`).

    Prompts of all but the corpus are of the calibration split, on which nothing is measured.

    Errors: `UserError` for an unknown source.
    """
    if source not in SOURCES:
        raise UserError(f"calibration = {source!r} is unknown: choose one of {', '.join(SOURCES)}.")
    if source == "corpus":
        pairs = documents(n, seed, part=-1)  # a part that no pre-training draws
        heads = prompt_ids(tokenizer, [Problem("", prompt, "", 1) for prompt, _ in pairs])
        replies = tokenizer([reply for _, reply in pairs], add_special_tokens=False)["input_ids"]
        return [head + reply + [tokenizer.eos_token_id] for head, reply in zip(heads, replies, strict=True)]
    problems = load(SOURCES[source], "calibration", n, seed)
    replies = sample(model, tokenizer, problems, temperature=1.0, max_new_tokens=max_new_tokens, seed=seed)
    heads = prompt_ids(tokenizer, problems)
    return [head + list(reply.ids) for head, reply in zip(heads, replies, strict=True)]


def training_texts(
    writer: str,
    domain: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    seed: int = 0,
    max_new_tokens: int = 96,
) -> list[Document]:
    """Texts to train on, about `n` of them: prompts of the training split of a domain, with replies of `writer`.

    `gold`: the written-out solutions of a task, or the corpus's own replies (some of them wrong). `teacher`: what `model` writes at
    temperature 1; replies that it did not finish within `max_new_tokens` are left out, and longer solutions of a training set too.

    Errors: `UserError` for an unknown writer or domain, and where no reply is left.
    """
    for name, value, allowed in (("writer", writer, WRITERS), ("domain", domain, DOMAINS)):
        if value not in allowed:
            raise UserError(f"{name} = {value!r} is unknown: choose one of {', '.join(allowed)}.")
    if domain == "corpus":
        pairs = documents(n, seed, part=-2)  # a part that neither pre-training nor calibration draws
        problems = [Problem(f"corpus-{i}", prompt, "", 1) for i, (prompt, _) in enumerate(pairs)]
        gold = [reply for _, reply in pairs]
    else:
        problems = load(domain, "train", n, seed)
        gold = [solution(problem) for problem in problems] if writer == "gold" else []
    if writer == "teacher":
        found = replies_of(model, tokenizer, problems, seed, max_new_tokens)
        if not found:
            raise UserError(f"the teacher finished none of {n} replies within max_new_tokens = {max_new_tokens}.")
        return found
    heads = prompt_ids(tokenizer, problems)
    ids = tokenizer(gold, add_special_tokens=False)["input_ids"]
    texts = [(head + reply + [tokenizer.eos_token_id], len(head)) for head, reply in zip(heads, ids, strict=True)]
    if domain in TRAINING:
        texts = [(text, head) for text, head in texts if len(text) - head <= max_new_tokens]
        if not texts:
            raise UserError(f"none of {n} solutions of {domain} is as short as max_new_tokens = {max_new_tokens}.")
    return texts


def replies_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    seed: int,
    max_new_tokens: int,
    unfinished: bool = False,
) -> list[Document]:
    """What a model writes to problems at temperature 1; without those that it did not finish, unless `unfinished`."""
    replies = sample(model, tokenizer, problems, temperature=1.0, max_new_tokens=max_new_tokens, seed=seed)
    heads = prompt_ids(tokenizer, problems)
    kept = [(head, reply) for head, reply in zip(heads, replies, strict=True) if reply.finished or unfinished]
    return [(head + list(reply.ids), len(head)) for head, reply in kept]
