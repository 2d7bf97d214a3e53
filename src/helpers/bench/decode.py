"""`lowbit bench decode`: tokens a second of the micro models at each width, by the rollout engine.

Speed does not depend on what the weights are, so all sizes have random ones, put on the grid by rounding to nearest. Replies are
sampled at temperature 1 and none ends before the limit. What the hardware allows is to read every weight once a token:

    tokens/s = sequences * bandwidth / bytes of the weights
"""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from helpers import models, quant, sampling, tasks
from helpers.bench import measure
from helpers.models import micro

SCHEMES = ("w8g64", "w4g64", "w3g64", "w2g64")
COMPARED = 8  # greedy tokens of each text


def rows(
    sizes: tuple[str, ...] = (), sequences: tuple[int, ...] = (1, 64), tokens: int = 0, repeats: int = 9
) -> list[dict[str, Any]]:
    """One row a size, width and number of sequences; on a CPU the two small sizes and few tokens unless told otherwise.

    The peer of a low-bit model is its own size in full precision. The error is the share of greedy tokens that differ from those
    of transformers' `generate`.
    """
    device = models.seed_everything(0)
    sizes = sizes or (tuple(micro.SIZES) if device.type == "cuda" else ("xs", "s"))
    tokens = tokens or (128 if device.type == "cuda" else 16)
    bandwidth = measure.bandwidth()
    found = []
    for size in sizes:
        full: dict[int, list[float]] = {}  # tokens/s in full precision
        for scheme in ("", *SCHEMES):
            model, precision = made(size, scheme)
            nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            for count in sequences:
                error = differing(model, count)
                values = {precision: tokens_per_second(model, count, tokens, repeats)}
                full.setdefault(count, values[precision])
                found.append(
                    measure.row(
                        "decoding, micro models",
                        f"{size}, {precision}, {count} sequence{'s' * (count > 1)}, {tokens} new tokens",
                        "tokens/s",
                        values | ({"full precision": full[count]} if scheme else {}),
                        precision,
                        better="higher",
                        limit=count * bandwidth / nbytes,
                        error=error,
                    )
                )
    return found


def made(size: str, scheme: str) -> tuple[PreTrainedModel, str]:
    """A micro model that never ends a reply, and what its precision is called; an empty `scheme` is full precision."""
    torch.manual_seed(0)
    model = micro.build(size, micro.build_tokenizer()).eval().to(models.device())
    model.generation_config.eos_token_id = None
    precision = "fp32"
    if model.device.type == "cuda":
        model, precision = model.to(torch.bfloat16), "bf16"
    if scheme:
        quant.quantize(model, "rtn", scheme)
    return model, scheme or precision


def asked(model: PreTrainedModel, count: int) -> partial:
    """What samples replies to `count` problems, one each; it takes the other settings of `sampling.sample`."""
    problems = tasks.load("arithmetic", split="test", n=count, seed=0)
    return partial(sampling.sample, model, micro.build_tokenizer(), problems)


def tokens_per_second(model: PreTrainedModel, count: int, tokens: int, repeats: int) -> list[float]:
    """Of `count` sequences at a time, for each repeat; one model after another, so that an engine is kept from one call to the next."""
    work = partial(asked(model, count), temperature=1.0, max_new_tokens=tokens)
    return [count * tokens / seconds for seconds in measure.timed({"": work}, repeats)[""]]


def differing(model: PreTrainedModel, count: int) -> float:
    """The share of the first greedy tokens that are not those of `generate`."""
    sample = partial(asked(model, count), max_new_tokens=COMPARED)
    ours, theirs = ([i for r in sample(backend=name) for i in r.ids] for name in ("auto", "hf"))
    return sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
