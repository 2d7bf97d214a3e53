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
    """One row a size, number of sequences and width; on a CPU the two small sizes and few tokens unless told otherwise.

    The peer of a low-bit model is its own size in full precision. The error is the share of greedy tokens that differ from those
    of transformers' `generate`.
    """
    device = models.seed_everything(0)
    sizes = sizes or (tuple(micro.SIZES) if device.type == "cuda" else ("xs", "s"))
    tokens = tokens or (128 if device.type == "cuda" else 16)
    bandwidth = measure.bandwidth()
    found = []
    for size in sizes:
        contenders = dict(made(size, scheme) for scheme in ("", *SCHEMES))
        full = next(iter(contenders))
        for count in sequences:
            errors = {name: differing(model, count) for name, model in contenders.items()}
            work = {
                name: asked(model, count, temperature=1.0, max_new_tokens=tokens) for name, model in contenders.items()
            }
            seconds = measure.timed(work, repeats)
            speeds = {name: [count * tokens / s for s in taken] for name, taken in seconds.items()}
            for name, model in contenders.items():
                nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
                found.append(
                    measure.row(
                        "decoding, micro models",
                        f"{size}, {name}, {count} sequence{'s' * (count > 1)}, {tokens} new tokens",
                        "tokens/s",
                        {name: speeds[name]} | ({"full precision": speeds[full]} if name != full else {}),
                        name,
                        better="higher",
                        limit=count * bandwidth / nbytes,
                        error=errors[name],
                        error_unit="of the tokens",
                    )
                )
    return found


def made(size: str, scheme: str) -> tuple[str, PreTrainedModel]:
    """What its precision is called, and a micro model that never ends a reply; an empty `scheme` is full precision."""
    torch.manual_seed(0)
    model = micro.build(size, micro.build_tokenizer()).eval().to(models.device())
    model.generation_config.eos_token_id = None
    precision = "fp32"
    if model.device.type == "cuda":
        model, precision = model.to(torch.bfloat16), "bf16"
    if scheme:
        quant.quantize(model, "rtn", scheme)
    return scheme or precision, model


def asked(model: PreTrainedModel, count: int, **settings: Any) -> partial:
    """What samples a reply to each of `count` problems with these settings of `sampling.sample`, and any more that it is given."""
    problems = tasks.load("arithmetic", split="test", n=count, seed=0)
    return partial(sampling.sample, model, micro.build_tokenizer(), problems, **settings)


def differing(model: PreTrainedModel, count: int) -> float:
    """The share of the first greedy tokens that are not those of `generate`."""
    sample = asked(model, count, max_new_tokens=COMPARED)
    ours, theirs = ([i for r in sample(backend=name) for i in r.ids] for name in ("auto", "hf"))
    return sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
