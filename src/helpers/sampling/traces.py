"""Texts to calibrate a quantizer on: what the model itself writes, on the task or off it, or what it was trained to write.

GPTQ for reasoning models is best calibrated on the model's own traces (2601.14888 and the study before it); the other sources are
there to be compared with.
"""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.errors import UserError
from helpers.sampling.generate import prompt_ids, sample
from helpers.tasks import Problem, load
from helpers.tasks.corpus import documents

SOURCES = {"traces": "arithmetic", "recall": "recall", "corpus": ""}  # -> the task whose problems are asked


def calibration_texts(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    seed: int = 0,
    max_new_tokens: int = 96,
) -> list[list[int]]:
    """`n` texts as token ids, prompt and reply: the model's own at temperature 1 (`traces`, `recall`), or the corpus's (`corpus`).

    Prompts of `traces` and `recall` are of the calibration split, on which nothing is measured.

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
