"""`lowbit bench rollout`: new tokens per second, our engine against transformers, and low-bit policies against full ones.

All replies run to the same length, whatever they say, so that contenders do equal work. The limit of a step is what it must read,
weights once and the keys and values of each row, over the measured bandwidth of the device. `error` is the mean difference, in
nats, between the engine's log-probabilities and those of the model's own forward over the whole text.

The contenders of `micro` take turns. At the larger shapes ours is measured first, and then each peer once, after a call of a few
tokens; what a quantized model is compared with was measured before it.
"""

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from helpers import models, sampling, tasks
from helpers.bench import measure, random_models
from helpers.kernels import LowBitLinear
from helpers.quant import Scheme, fake
from helpers.sampling import backends
from helpers.shapes import SHAPES

TARGET = 20_000.0  # tokens per second, Qwen3-0.6B shape, 64 sequences
OF_FULL = 0.95  # a fake-quantized policy against the full-precision one
PACKED = 2.0  # a packed 4-bit policy against the bfloat16 one, at Qwen3-8B shape
Prompts = list[list[int]]


def rows(ref: str = "base-s", replies: int = 128, tokens: int = 64, repeats: int = 9) -> list[dict[str, Any]]:
    """On a CPU the micro model `ref` alone; on a GPU also the shapes of Qwen3-0.6B and 8B."""
    models.seed_everything(0)
    found = micro(ref, replies, tokens, repeats)
    if torch.cuda.is_available():
        bandwidth = measure.bandwidth()
        found += small(bandwidth, repeats) + large(bandwidth, min(repeats, 5))
    return found


def micro(ref: str, replies: int, tokens: int, repeats: int, scheme: str = "w4g32") -> list[dict[str, Any]]:
    """A micro model, in full precision and fake-quantized."""
    model, tokenizer = models.load(ref)
    prompts = sampling.prompt_ids(tokenizer, tasks.load("arithmetic", split="train", n=replies, seed=0))
    quantized = copy.deepcopy(model)
    fake.insert(quantized, Scheme.parse(scheme))
    shape, work = f"{ref}, {{}}, {replies} sequences, {tokens} new tokens", "rollout"
    errors = [difference(model, prompts, tokens)]
    with fake.materialized(quantized):
        errors.append(difference(quantized, prompts, tokens))
        found = speeds(
            {
                "ours": lambda: ours(model, prompts, tokens),
                "transformers generate": lambda: generate(model, prompts, tokens),
                "fake-quantized": lambda: ours(quantized, prompts, tokens),
            },
            replies * tokens,
            repeats,
        )
    low_bit = {"ours": found.pop("fake-quantized"), "full precision": found["ours"]}
    options = {"better": "higher", "error_unit": "nats"}
    return [
        measure.row(work, shape.format("full precision"), "tokens/s", found, "ours", error=errors[0], **options),
        measure.row(
            f"{work}, fake-quantized",
            shape.format(f"{scheme} fake-quantized"),
            "tokens/s",
            low_bit,
            "ours",
            error=errors[1],
            **options,
        ),
    ]


def small(bandwidth: float, repeats: int, count: int = 64, length: int = 64, tokens: int = 128) -> list[dict[str, Any]]:
    """Qwen3-0.6B shape in bfloat16 against transformers, and fake-quantized."""
    model, prompts = qwen3("Qwen3-0.6B"), random_prompts(count, length)
    shape = f"Qwen3-0.6B shape, {{}}, {count} sequences, prompts of {length} tokens, {tokens} new tokens"
    options = {"better": "higher", "limit": limit(model, prompts, tokens, bandwidth), "error_unit": "nats"}
    error = difference(model, prompts, 64)
    found = speeds({"ours": lambda: ours(model, prompts, tokens)}, count * tokens, repeats)
    left_out = {}
    for name, work in PEERS.items():
        try:
            work(model, prompts, 4)
        except Exception as reason:  # a peer may not run here
            left_out[name] = (str(reason).splitlines() or [type(reason).__name__])[0]
            continue
        found[name] = [count * tokens / measure.once(lambda work=work: work(model, prompts, tokens))]
    rows = [
        measure.row("rollout", shape.format("bf16"), "tokens/s", found, "ours", target=TARGET, error=error,
            left_out=left_out, **options)
    ]  # fmt: skip
    full = found["ours"]
    fake.insert(model, Scheme.parse("w4g128"))
    with fake.materialized(model):
        error = difference(model, prompts, 64)
        found = speeds({"ours": lambda: ours(model, prompts, tokens)}, count * tokens, repeats)
    found["bf16"] = full
    target, shape = OF_FULL * median(full), shape.format("w4g128 fake-quantized")
    return [
        *rows,
        measure.row("rollout, fake-quantized", shape, "tokens/s", found, "ours", target=target, error=error, **options),
    ]


def large(bandwidth: float, repeats: int, counts: Sequence[int] = (16, 64), tokens: int = 64) -> list[dict[str, Any]]:
    """Qwen3-8B shape: packed in 4 and 2 bits against bfloat16."""
    model, rows, full = qwen3("Qwen3-8B"), [], {}
    for bits in (16, 4, 2):
        if bits < 16:
            pack_randomly(model, bits)
        for count in counts:
            prompts = random_prompts(count, 64)
            error = difference(model, prompts, 8)
            found = speeds({"ours": lambda prompts=prompts: ours(model, prompts, tokens)}, count * tokens, repeats)
            if bits == 16:
                full[count] = found["ours"]
            else:
                found["bf16"] = full[count]
            name = "bf16" if bits == 16 else f"w{bits}g128"
            shape = f"Qwen3-8B shape, {name}, {count} sequences, prompts of 64 tokens, {tokens} new tokens"
            options = {"better": "higher", "limit": limit(model, prompts, tokens, bandwidth)}
            options |= {"error": error, "error_unit": "nats"}
            target = PACKED * median(full[count]) if bits == 4 else None
            work = "rollout" if bits == 16 else "rollout, packed"
            rows.append(measure.row(work, shape, "tokens/s", found, "ours", target=target, **options))
    return rows


# ---------------------------------------------------------------- contenders


def settings(prompts: Prompts, tokens: int) -> backends.Settings:
    return backends.Settings(tokens, (), 0, len(prompts), temperature=1.0)


def ours(model: PreTrainedModel, prompts: Prompts, tokens: int) -> list:
    return backends.with_logprobs(model, prompts, settings(prompts, tokens))


def generate(model: PreTrainedModel, prompts: Prompts, tokens: int) -> list:
    return backends.by_generate(model, prompts, settings(prompts, tokens))


def continuous(model: PreTrainedModel, prompts: Prompts, tokens: int) -> Any:
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
    return model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)


PEERS = {"transformers generate": generate, "transformers continuous batching": continuous}


def speeds(contenders: dict[str, Callable], tokens: int, repeats: int) -> measure.Times:
    """Tokens per second of each."""
    seconds = measure.timed(contenders, repeats)
    return {name: [tokens / t for t in found] for name, found in seconds.items()}


@torch.no_grad()
def difference(model: PreTrainedModel, prompts: Prompts, tokens: int, texts: int = 8) -> float:
    """Mean difference of the log-probabilities of the engine's replies to those of the model's own forward, in nats.

    `texts` of the replies are compared, in one forward padded on the right.
    """
    drawn = ours(model, prompts, tokens)[:texts]
    whole = [prompt + ids for prompt, (ids, _) in zip(prompts, drawn, strict=False)]
    longest = max(map(len, whole))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in whole], device=model.device)
    logs, found = model(input_ids=padded).logits, []
    for n, (ids, own) in enumerate(drawn):
        end = len(whole[n]) - 1
        theirs = logs[n, end - len(ids) : end].float().log_softmax(-1)[range(len(ids)), ids]
        found.append((theirs - torch.tensor(own, device=theirs.device)).abs())
    return float(torch.cat(found).mean())


# ---------------------------------------------------------------- models


def qwen3(name: str) -> PreTrainedModel:
    """A model of this shape with random weights, in bfloat16, without an end mark."""
    return random_models.build(SHAPES[name], eos_token_id=None, pad_token_id=0, bos_token_id=None)


@torch.no_grad()
def pack_randomly(model: PreTrainedModel, bits: int, group: int = 128) -> None:
    """Put packed layers of random codes in place of the decoder's linear layers."""
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear | LowBitLinear):
            device = next(layer.parameters(), next(layer.buffers(), None)).device
            new = LowBitLinear(
                layer.in_features, layer.out_features, bits, layer.in_features // group, True, device=device
            )
            new.codes.random_(-(2**31), 2**31 - 1)
            new.scale.fill_(0.02 / 2 ** (bits - 1))
            model.model.set_submodule(name, new)


def random_prompts(count: int, length: int) -> Prompts:
    return torch.randint(
        5, SHAPES["Qwen3-0.6B"].vocabulary - 5, (count, length), generator=torch.Generator().manual_seed(0)
    ).tolist()


def limit(model: PreTrainedModel, prompts: Prompts, tokens: int, bandwidth: float) -> float:
    """Tokens per second if a step took no longer than to read its weights, and each row's keys and values."""
    config = model.config
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    if not config.tie_word_embeddings:
        tensors.pop(model.get_input_embeddings().weight.data_ptr())  # a few rows of it are read
    size = model.get_input_embeddings().weight.element_size()
    cached = len(prompts) * (len(prompts[0]) + tokens / 2)
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    return len(prompts) * bandwidth / (sum(tensors.values()) + cached * each)
