"""`lowbit bench rollout`: replies sampled from a quantized policy against those of the full-precision one."""

import copy
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from helpers import models, sampling, tasks
from helpers.bench import measure
from helpers.quant import Scheme, fake

TARGET = 1.1  # times the full-precision rollout


def rows(
    ref: str = "base-s", scheme: str = "w8pt-sym", replies: int = 128, tokens: int = 64, repeats: int = 9
) -> list[dict[str, Any]]:
    """Rollouts of a fake-quantized policy against the full-precision one: `replies` replies of exactly `tokens` tokens.

    Ours materializes the quantized weights once a rollout, as in training; the peer `quantized at every token` does not. Replies
    run to the limit, whatever they say, so that all contenders do equal work.
    """
    models.seed_everything(0)
    full, tokenizer = models.load(ref)
    low_bit = copy.deepcopy(full)
    fake.insert(low_bit, Scheme.parse(scheme))
    problems = tasks.load("arithmetic", split="train", n=replies, seed=0)
    ids = tokenizer.pad({"input_ids": sampling.prompt_ids(tokenizer, problems)}, return_tensors="pt").to(full.device)
    config = GenerationConfig(
        do_sample=True, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=full.generation_config.eos_token_id,
    )  # fmt: skip

    @torch.no_grad()
    def generate(model: torch.nn.Module) -> None:
        model.generate(**ids, generation_config=config)

    def materialized() -> None:
        with fake.materialized(low_bit):
            generate(low_bit)

    contenders = {
        "full precision": lambda: generate(full),
        "materialized": materialized,
        "quantized at every token": lambda: generate(low_bit),
    }
    seconds = measure.timed(contenders, repeats)
    shape = f"{ref} at {scheme}, {replies} replies of {tokens} tokens"
    target = TARGET * median(seconds["full precision"])
    return [
        measure.row("rollout of a fake-quantized policy", shape, "s a rollout", seconds, "materialized", target=target)
    ]
