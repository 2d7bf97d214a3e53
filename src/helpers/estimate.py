"""What the runs of a study will take, before one has started: GPU hours and GPU memory, from shapes and parameters alone.

A model has N weights; c numbers a token go into its cache. Weights and arithmetic are float32 (4 bytes), as `models.load` has them,
but for an evaluation in bfloat16; low-bit layers are their codes. The largest parts, in bytes:

    sampling       weights + B (P + T) 4c                     B replies at once of T tokens to prompts of P
    training       16 N (weight, gradient, two moments of AdamW), 4 more for a fake-quantized weight, 4 N for a second model (the
                   teacher; GRPO's start, where its KL is measured), what a micro-batch keeps for its backward pass, with its
                   logits, three times T V 4 a reply, and the rollout's cache, which stays meanwhile; with checkpointing each
                   layer keeps its input, and one at a time all else
    adapters       the weights alone instead of 16 N; A and B are small
    quantizing     weights + the squares of the widest layer's inputs + four times what a layer makes of all texts

The caches of B replies are at most `CACHE` of a GPU's memory; the other replies wait. And their time on a machine that reads R
bytes and computes F operations a second:

    a token        max((weights + cache) / R, 2 N B / F) for each of T tokens, batch after batch
    training       6 N operations a token (4 N where only adapters learn), 2 N more for a teacher, and for checkpointing
    quantizing     two passes over the texts, and for GPTQ 2 C^3 + R C^2 a layer of R x C

Assumed is one H200, of whose rates half is reached, replies as long as their limit or `LONGEST` tokens, prompts of `PROMPT`, and
`START` seconds a run. Most replies end earlier; those of a model that very few bits have broken may run to their limit, which can
be several times `LONGEST`. Layers of bitsandbytes, which unpack themselves at each step, are slower than is said here. Read hours
as an order of magnitude, and memory within a quarter.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import params, runs
from helpers.errors import UserError
from helpers.shapes import SHAPES, Shape, of_config
from helpers.study import Job
from helpers.tasks.benchmarks import GROUPS, SETS
from helpers.tasks.benchmarks import decoding as of_paper

GIB = 2**30
GPU_GIB = 139  # of an H200
READ = 0.5 * 4.2e12  # bytes a second
COMPUTE = {4: 0.5 * 67e12, 2: 0.5 * 790e12}  # operations a second, by the bytes of a number: float32 and bfloat16
LAUNCH = 1e-4  # seconds a layer of a decoding step, at least
START = 60  # seconds
PROMPT, LONGEST = 200, 8192  # tokens
CACHE = 0.4  # of a GPU's memory, as in `sampling.engine`, which the command line does not import
FLOAT = 4
FULL = 32.0  # bits of a float32 weight
TRAINED = 16  # bytes a weight
CHUNK = 2**30  # bytes of the logits that distillation has at once, of which there are four
CHANGES = (  # of parameters, that need less memory
    {"micro_batch": 1},
    {"checkpointing": True},
    {"checkpointing": True, "micro_batch": 1},
    *({"batch_size": n} for n in (64, 16, 4, 1)),
    {"max_new_tokens": 1024, "checkpointing": True, "micro_batch": 1},
    {"texts": 20},
    {"policy": "qlora", "micro_batch": 1},
)


Model = tuple[Shape, float]  # and the bits of its linear layers


@dataclass(frozen=True)
class Estimate:
    """Hours of a GPU and GiB of its memory; `start` is the model that the run starts from."""

    hours: float
    gib: float
    start: Model


def of_study(jobs: Sequence[Job], gib: float = GPU_GIB) -> dict[str, Estimate | None]:
    """The estimate of each job by name, on a GPU with `gib` of memory.

    None where the model's shape is not known here, and for stages that need no GPU.
    """
    found: dict[str, Estimate | None] = {}
    made: dict[str, Model | None] = {}
    outside: dict[str, Model | None] = {}
    ids = {job.run_id: job.name for job in jobs}
    waiting = list(jobs)
    while waiting:  # the order of a file is free
        names = {job.name for job in waiting}
        job = next(job for job in waiting if not names & set(job.parents))
        waiting.remove(job)
        if (ref := job.parameters.get("parent")) in ids:  # not the first of its parents, which may be the teacher
            start = made[ids[ref]]
        else:
            start = outside[ref] if ref in outside else external(job.parameters)
            outside |= {ref: start} if ref else {}
        found[job.name] = of_job(job.stage, job.parameters, start, gib) if start else None
        made[job.name] = (start[0], bits_after(job.stage, job.parameters, start[1])) if start else None
    return found


def external(given: Mapping[str, Any]) -> Model | None:
    """Shape and bits of the model that a run starts from whose parent is there already, or that it makes."""
    if "size" in given:
        shape = SHAPES.get(given["size"])
        return (shape, FULL) if shape else None
    if not (ref := given.get("parent")):
        return None
    try:
        parent = runs.load_parent(ref)
        config = Path(parent.model_path) / "config.json"
    except UserError:  # a published run has no model
        return None
    try:
        shape = of_config(json.loads(config.read_text())) if config.is_file() else SHAPES.get(ref.rpartition("/")[2])
    except ValueError:  # not JSON: the run itself says so
        return None
    bits = parent.result.model.get("bits", FULL) if parent.result else FULL
    return (shape, bits if bits < 16 else FULL) if shape else None


def bits_after(stage: str, given: Mapping[str, Any], before: float) -> float:
    """Bits of the linear layers of the model that a job makes."""
    if stage == "ptq":
        return FULL if given["method"] == "merge" else given["bits"]
    if stage == "grpo":
        return {"qaft": given["bits"], "qlora": 4}.get(given["policy"], FULL)
    if stage == "qat":
        return given["bits"] if given["bits"] < 16 else FULL
    return before


def of_job(stage: str, given: Mapping[str, Any], start: Model, gib: float = GPU_GIB) -> Estimate | None:
    """What one run takes that starts from a model, or makes it. None for a stage that needs no GPU, or has other parameters."""
    parts = {"base": base, "grpo": grpo, "ptq": ptq, "qat": qat, "eval": evaluation}
    try:
        seconds, held = parts[stage](given, *start, gib)
    except KeyError:
        return None
    return Estimate((seconds + START) / 3600, held / GIB, start)


def weights(shape: Shape, bits: float, size: int = FLOAT) -> float:
    """Bytes of a loaded model; a low-bit layer has half a bit more a weight, for scales and zero points."""
    return shape.linear * (size if bits == FULL else (bits + 0.5) / 8) + shape.embeddings * size


def sampling(
    shape: Shape, bits: float, gib: float, replies: int, batch: int, tokens: int, size: int = FLOAT
) -> tuple[float, float]:
    """(seconds, bytes beside the weights) of so many replies, `batch` at a time or as many as fit, with numbers of `size` bytes."""
    cache = (PROMPT + tokens) * shape.cache * size
    batch, written = max(1, min(batch, replies, int(CACHE * gib * GIB / cache))), min(tokens, LONGEST)
    moved = weights(shape, bits, size) + batch * (PROMPT + written / 2) * shape.cache * size
    token = max(moved / READ, 2 * shape.read * batch / COMPUTE[size], shape.layers * LAUNCH)
    seconds = -(-replies // batch) * written * token + replies * PROMPT * 2 * shape.linear / COMPUTE[size]
    return seconds, batch * (cache + 3 * shape.vocabulary * FLOAT)


def backward(shape: Shape, texts: int, tokens: int, logits: bool, checkpointing: bool) -> float:
    """Bytes of a micro-batch beside the weights."""
    kept = shape.kept / shape.layers + shape.layers * shape.hidden if checkpointing else shape.kept
    return texts * FLOAT * ((PROMPT + tokens) * kept + (3 * tokens * shape.vocabulary if logits else 0))


def problems(given: Mapping[str, Any]) -> int:
    """Problems of an evaluation."""
    members = GROUPS.get(given["task"], (given["task"],))
    return sum(min(given["n"], SETS[name].rows) if name in SETS else given["n"] for name in members)


def evaluation(given: Mapping[str, Any], shape: Shape, bits: float, gib: float) -> tuple[float, float]:
    how = of_paper(given["task"]) if given["decoding"] == "paper" else None
    k, tokens = (how.k, how.max_new_tokens) if how else (given["k"], given["max_new_tokens"])
    size = 2 if given["precision"] == "bfloat16" else FLOAT
    seconds, held = sampling(shape, bits, gib, problems(given) * (1 + k), given["batch_size"], tokens, size)
    return seconds, weights(shape, bits, size) + held


def grpo(given: Mapping[str, Any], shape: Shape, bits: float, gib: float) -> tuple[float, float]:
    replies, tokens = given["prompts_per_step"] * given["group_size"], given["max_new_tokens"]
    micro, policy = given["micro_batch"] or replies, given["policy"]
    adapted = policy in ("lora", "qlora")
    sampled = {"qlora": 4}.get(policy, FULL)  # a fake-quantized weight is float32
    seconds, cached = sampling(shape, sampled, gib, replies, replies, tokens)
    passes = (4 if adapted else 6) + 2 * given["checkpointing"]
    seconds += replies * (PROMPT + tokens) * passes * shape.read / COMPUTE[FLOAT]
    own = weights(shape, sampled) if adapted else TRAINED * shape.parameters
    own += weights(shape, sampled) if given["kl_every"] else 0  # the start's copy
    own += shape.linear * FLOAT if policy in ("qaft", "ptq_rollout") else 0
    looks = sampling(shape, FULL, gib, 2 * 205, 256, tokens)[0]  # the notebook's, before and after
    return given["steps"] * seconds + looks, own + cached + backward(shape, micro, tokens, True, given["checkpointing"])


def ptq(given: Mapping[str, Any], shape: Shape, bits: float, gib: float) -> tuple[float, float]:
    texts, tokens = given["texts"], given["max_new_tokens"]
    seconds, cached = sampling(shape, bits, gib, texts, 256, tokens)
    held = weights(shape, FULL)
    if given["method"] in ("gptq", "awq", "autoawq"):
        read = texts * (PROMPT + min(tokens, LONGEST))
        seconds += read * 4 * shape.linear / COMPUTE[FLOAT]
        cached = max(cached, 3 * FLOAT * shape.intermediate**2 + 4 * FLOAT * read * shape.hidden)
    if given["method"] == "gptq":
        per_layer = 6 * (2 * shape.hidden**3 + shape.hidden**2 * shape.intermediate) + 2 * shape.intermediate**3
        seconds += shape.layers * (per_layer + shape.intermediate**2 * shape.hidden) / COMPUTE[FLOAT]
    return seconds, held + cached


def qat(given: Mapping[str, Any], shape: Shape, bits: float, gib: float) -> tuple[float, float]:
    tokens, batch, taught = given["max_new_tokens"], given["batch_size"], given["objective"] == "kd"
    written = min(tokens, LONGEST)
    passes = (8 if taught else 6) + 2 * given["checkpointing"]
    seconds = given["steps"] * batch * (PROMPT + written) * passes * shape.read / COMPUTE[FLOAT]
    asked = {"teacher": (given["texts"], 256), "student": (given["steps"] * batch, batch)}
    cached = {"teacher": 0.0, "student": 0.0}  # a cache for each model
    looks = given["steps"] // given["watch_every"] + 2 if given["watch_every"] else 0
    calibrated = given["calibration_texts"] if given["init"] in ("gptq", "awq") else 0
    drawn = [("student", calibrated, 256), ("student", looks * given["watched"], given["watched"])]
    drawn += [(given["replies"], *asked[given["replies"]])] if given["replies"] in asked else []
    for model, replies, at_once in drawn:
        if replies:
            more, held = sampling(shape, FULL, gib, replies, at_once, tokens)
            seconds, cached[model] = seconds + more, max(cached[model], held)
    own = (
        TRAINED + FLOAT
    ) * shape.parameters + shape.linear * FLOAT  # with the teacher, and W' of fake-quantized layers
    own += sum(cached.values()) + 4 * CHUNK
    return seconds, own + backward(shape, given["micro_batch"] or batch, tokens, False, given["checkpointing"])


def base(given: Mapping[str, Any], shape: Shape, bits: float, gib: float) -> tuple[float, float]:
    tokens = given["batch_size"] * 60
    seconds = given["steps"] * max(tokens * 6 * shape.read / COMPUTE[FLOAT], 3 * shape.layers * 10 * LAUNCH)
    return seconds, TRAINED * shape.parameters + FLOAT * tokens * (shape.kept + 3 * shape.vocabulary)


def what_fits(stage: str, given: Mapping[str, Any], own: Estimate, gib: float) -> str:
    """What to do about a run that needs more than `gib`: the first of `CHANGES` with which it fits, else a larger GPU."""
    for changes in CHANGES:
        smaller = {**given, **{name: new for name, new in changes.items() if name in given}}
        told = ", ".join(
            f"{name} = {params.text(smaller[name])}" for name in changes if given.get(name) != smaller.get(name)
        )
        if told and (found := of_job(stage, smaller, own.start, gib)).gib <= gib:
            return f"{told} would fit ({found.gib:.0f} GiB)"
    return f"it takes a GPU of {own.gib:.0f} GiB or a smaller model"


def after_the_fact(stage: str, given: Mapping[str, Any], told: str) -> str:
    """What to say of a run that ran out of GPU memory; `told` is PyTorch's message, which has the size of the GPU."""
    found = re.search(r"total capacity of ([\d.]+) GiB", told)
    gib = float(found[1]) if found else gpu_gib() or GPU_GIB
    start = external(given)
    own = of_job(stage, given, start, gib) if start else None
    if own is None or own.gib <= gib:
        smaller = (
            ", ".join(name for name in ("micro_batch", "batch_size", "max_new_tokens") if name in given) or "model"
        )
        return f"{gib:.0f} GiB of GPU memory were too little, or other work holds some of it: take a smaller {smaller}"
    advice = what_fits(stage, given, own, gib)
    return f"{gib:.0f} GiB of GPU memory are too little, it needs about {own.gib:.0f}: {advice}"


def gpu_gib() -> float | None:
    """Memory of the smallest GPU here in GiB, None where there is none; asked of its driver, without starting it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(float(mib) for mib in told) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
