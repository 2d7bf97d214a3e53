"""Where in the text a quantized model differs from the full-precision one: token by token, on what the full model wrote.

Both models read the same prompts and replies. At each reply token, with p the full and q the quantized model's distribution,

    KL = sum over v of p(v) (log p(v) - log q(v))      surprise = -log p(o_t), -log q(o_t)      entropy = -sum p log p

in nats. On replies that the full model sampled at temperature 1, the mean KL a token is what quantizing costs it a token in
likelihood of its own texts. Perplexity is exp of the mean surprise. Everything is first a table with one row a token (`read`);
the rest groups it: by kind of token, by place in the reply. Intervals resample texts (see `bootstrap`).
"""

from collections.abc import Iterable, Sequence
from math import exp

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers import runs
from helpers.errors import UserError
from helpers.evaluation.bootstrap import ratio
from helpers.models import reading
from helpers.runs import Metric, RunRef
from helpers.sampling import Reply, prompt_ids
from helpers.tasks import Problem

KINDS = ("digits", "operators", "structure", "others")
STRUCTURE = ("=", "{", "}", "\\", "boxed", "think>")  # any of these makes a token one of structure
OPERATORS = frozenset("+-*/^()×÷·−")
PARTS = 10  # of a reply


def kind_of(text: str) -> str:
    """The kind of a token by its decoded text: `structure` (`<think>`, `\\boxed{`, `}`, `=`, ...), `digits`, `operators`, `others`.

    Tokens of longer pieces go by what they hold: any digit makes digits, and operators may hold nothing else but spaces.
    """
    if any(mark in text for mark in STRUCTURE):
        return "structure"
    if any(c.isdigit() for c in text):
        return "digits"
    return "operators" if text.strip() and set(text.strip()) <= OPERATORS else "others"


def kinds(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> dict[int, str]:
    """The kind of each id; the end mark and other special tokens are structure."""
    special = set(tokenizer.all_special_ids)
    return {i: "structure" if i in special else kind_of(tokenizer.decode([i])) for i in set(ids)}


def read(
    full: PreTrainedModel,
    low: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    replies: Sequence[Reply],
) -> pd.DataFrame:
    """One row a reply token, in order: text, place, length, token, kind, kl, and surprise and entropy of both models.

    Errors: `UserError` where the models' vocabularies differ in size, or a reply is empty or too long for them.
    """
    if full.config.vocab_size != low.config.vocab_size:
        sizes = f"{full.config.vocab_size} and {low.config.vocab_size} tokens"
        raise UserError(f"the two models have vocabularies of {sizes}: compare a model with the one it was made from.")
    texts, starts = with_prompts(tokenizer, problems, replies)
    parts = []
    for batch in reading.batches(full, texts, starts):
        p, q = (reading.log_probs(model, batch) for model in (full, low))
        columns = {
            "text": batch.rows,
            "token": batch.tokens,
            "kl": reading.divergence(p, q),
            "surprise_full": -p.gather(1, batch.tokens[:, None])[:, 0],
            "surprise_low": -q.gather(1, batch.tokens[:, None])[:, 0],
            "entropy_full": reading.entropy(p),
            "entropy_low": reading.entropy(q),
        }
        parts.append(pd.DataFrame({name: x.cpu().numpy() for name, x in columns.items()}))
    table = pd.concat(parts).sort_values("text", kind="stable", ignore_index=True)
    grouped = table.groupby("text")["text"]
    table["place"], table["length"] = grouped.cumcount(), grouped.transform("size")
    table["kind"] = table["token"].map(kinds(tokenizer, table["token"]))
    return table


def with_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], replies: Sequence[Reply]
) -> tuple[list[list[int]], list[int]]:
    """(token ids of prompt and reply of each, where the reply starts)."""
    heads = prompt_ids(tokenizer, problems)
    texts = [head + list(reply.ids) for head, reply in zip(heads, replies, strict=True)]
    return texts, [len(head) for head in heads]


def per_token(table: pd.DataFrame, column: str) -> tuple[float, float | None, float | None, int]:
    """(mean of a column over tokens, its interval over texts, number of texts)."""
    sums = table.groupby("text")[column].agg(["sum", "size"])
    return *ratio(sums["sum"], sums["size"]), len(sums)


def _metric(name: str, table: pd.DataFrame, column: str, task: str, part: str = "", **detail) -> Metric:
    value, low, high, n = per_token(table, column)
    benchmark = f"{task}/{part}" if part else task
    detail = {"tokens": len(table)} | detail
    return Metric(
        metric=name, value=value, n=n, ci_low=low, ci_high=high, task=task, benchmark=benchmark, detail=detail
    )


def whole(table: pd.DataFrame, task: str) -> list[Metric]:
    """`kl`, and `perplexity` and `entropy` of the quantized model and (`_full`) the full one, over all tokens."""
    found = [_metric("kl", table, "kl", task)]
    for suffix, column in (("", "low"), ("_full", "full")):
        surprise = _metric("", table, f"surprise_{column}", task)
        bounds = {k: None if (x := getattr(surprise, k)) is None else exp(x) for k in ("value", "ci_low", "ci_high")}
        found.append(surprise.model_copy(update={"metric": f"perplexity{suffix}", **bounds}))
        found.append(_metric(f"entropy{suffix}", table, f"entropy_{column}", task))
    return found


def by_kind(table: pd.DataFrame, task: str) -> list[Metric]:
    """`kl`, `entropy` and `entropy_full` of each kind of token that occurs; the detail says its shares of tokens and of all KL."""
    found = []
    for kind in (kind for kind in KINDS if (table["kind"] == kind).any()):
        part = table[table["kind"] == kind]
        share = part["kl"].sum() / max(table["kl"].sum(), 1e-30)
        found.append(_metric("kl", part, "kl", task, kind, of_tokens=len(part) / len(table), of_kl=float(share)))
        for suffix, column in (("", "low"), ("_full", "full")):
            found.append(_metric(f"entropy{suffix}", part, f"entropy_{column}", task, kind))
    return found


def by_place(table: pd.DataFrame, task: str, parts: int = PARTS) -> list[Metric]:
    """`kl` in each tenth of a reply, as benchmarks `task/part1` to `task/part10`; shorter replies have no token in some."""
    part = np.floor(parts * (table["place"] + 0.5) / table["length"]).astype(int) + 1
    return [_metric("kl", rows, "kl", task, f"part{i}") for i, rows in table.groupby(part)]


def by_label(metrics: Sequence[Metric], name: str) -> dict[str, tuple[float, float, float]]:
    """label -> (value, low, high) of the metrics of that name for parts of a task: `arithmetic/digits` is `digits`."""
    return {
        m.benchmark.removeprefix(f"{m.task}/"): tuple(
            m.value if x is None else x for x in (m.value, m.ci_low, m.ci_high)
        )
        for m in metrics
        if m.metric == name and m.benchmark != m.task
    }


def shares(metrics: Sequence[Metric]) -> dict[str, tuple[float, float]]:
    """kind -> (its share of all tokens, its share of all KL), from the metrics of `by_kind`."""
    found = [m for m in metrics if m.metric == "kl" and "of_kl" in m.detail]
    return {m.benchmark.removeprefix(f"{m.task}/"): (m.detail["of_tokens"], m.detail["of_kl"]) for m in found}


def table(metrics: Sequence[Metric]) -> pd.DataFrame:
    """One row a metric: value, 95 % interval, n texts, tokens."""
    spans = ["" if m.ci_low is None else f"{m.ci_low:.4f} to {m.ci_high:.4f}" for m in metrics]
    rows = [[m.metric, f"{m.value:.4f}", span, m.n, m.detail["tokens"]] for m, span in zip(metrics, spans, strict=True)]
    return pd.DataFrame(rows, columns=["metric", "value", "95 % interval", "n", "tokens"]).set_index("metric")


def reference_of(parent: RunRef, reference: str) -> RunRef:
    """The run to compare `parent` with: the one named, or else the one that `parent` was made from.

    Errors: `RunError` where `parent` does not say what it was made from, or nothing has the name.
    """
    made_from = parent.result.model.get("made_from") if parent.result else None
    if not reference and (not made_from or made_from.startswith("folder:")):
        raise runs.RunError(
            f"reference is empty, and {parent.label} does not say which run it was made from: name the full-precision model."
        )
    return runs.load_parent(reference or made_from, what="reference")
