"""Precision policies: what is quantized while a policy is trained, and what is saved when it is.

    policy         rollouts          training forward    trained            saved
    full           full precision    full precision      all weights        full precision
    qaft           fake-quantized    fake-quantized      latent weights     packed codes
    ptq_rollout    fake-quantized    full precision      all weights        full precision
    lora           full precision    full precision      A, B               base and adapter
    qlora          NF4 + adapter     NF4 + adapter       A, B               NF4 base and adapter

`qaft` (quantization-aware fine-tuning) is paper 1's, through a straight-through estimator; `ptq_rollout` samples from a copy that
is rounded anew for every rollout, so sampler and trainer differ, which truncated importance sampling can correct (`grpo.train`).
`lora` is the control that separates "low rank" from "4 bit" in `qlora`. Sources: arXiv:2511.15694; QLoRA (2305.14314).

Quantization shock: `qaft` and `ptq_rollout` may be quantized in a part of the run only, from one step to another. Grids that are
found once are found when quantization begins.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.errors import UserError
from helpers.models import adapters, lowbit
from helpers.quant import Scheme, bitsandbytes, fake, linear_layers, quantize
from helpers.quant.layers import is_low_bit

POLICIES = ("full", "qaft", "ptq_rollout", "lora", "qlora")
AFTERWARDS = {  # what becomes of a parent's low-bit layers
    "full": "trained and saved in full precision",
    "qaft": "rounded to {} anew",
    "ptq_rollout": "rounded to {} anew",
    "lora": "adapted in full precision",
    "qlora": "rounded to {} anew",
}
QUANTIZED = {"qaft": "everywhere", "ptq_rollout": "rollouts"}  # forwards that fake quantization is for


class PolicyError(UserError):
    """A precision policy that does not exist, or that does not fit the scheme, the model or the length of the run."""


def scheme_of(
    policy: str,
    bits: int = 8,
    granularity: str = "tensor",
    group_size: int = 64,
    symmetric: bool = True,
    targets: str = "all",
    double: bool = False,
) -> Scheme | None:
    """The scheme that a policy is trained on: a uniform grid, NF4 for `qlora`, None in full precision. Defaults are paper 1's.

    Errors: those of `Scheme`.
    """
    if policy in QUANTIZED:
        return Scheme(bits, granularity, group_size, symmetric, targets)
    return bitsandbytes(4, double=double) if policy == "qlora" else None


def apply(
    model: PreTrainedModel,
    policy: str,
    scheme: Scheme | str | None = None,
    *,
    grids: str = "fixed",
    masked: bool = False,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets: str = "all",
    latents: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """`model`, made ready in place to be trained by `policy`; adapters are merged first, and low-bit layers made plain.

    A packed layer on a grid of the scheme keeps that grid, unless `grids` is `step`; where other low-bit layers become plain, a
    line is printed that says so.

    `scheme`: for `qaft` and `ptq_rollout` a uniform one (with its own targets), for `qlora` `nf4` or `nf4-dq`. `grids` and `masked`
    are those of `quant.fake`, and `latents` too: what the codes of a packed model were rounded from. `rank`, `alpha`, `dropout`
    and `targets` (all linear layers, or the attention's) are the adapter's.

    Errors: `PolicyError` for a policy that is unknown or does not fit the scheme, and for an adapter that fits no layer;
    `SchemeError` for a scheme that does not fit the model.
    """
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    refuse(policy, scheme, rank, dropout)
    quantized, packed = sum(map(is_low_bit, model.modules())), lowbit.low_bit_layers(model)
    model = adapters.merge(model)
    if policy in QUANTIZED:
        fake.insert(model, scheme, grids, masked, latents)
        quantized -= len(kept(packed, fake.layers(model)))
    else:
        fake.restore(model)
    if quantized:
        print(f"{quantized} low-bit layers of the parent are made plain, and {AFTERWARDS[policy].format(scheme)}.")
    if policy in QUANTIZED:
        fake.switch(model, QUANTIZED[policy])
        return model
    if policy == "full":
        return model
    names = sorted({name.rpartition(".")[2] for name in linear_layers(model, targets)})
    if not names:
        raise PolicyError(f"policy = {policy}: targets = {targets} match no linear layer of {type(model).__name__}.")
    if policy == "qlora":
        quantize(model, "bnb", scheme)
    from peft import LoraConfig, get_peft_model  # takes a second to import

    kind = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": names}
    return get_peft_model(model, LoraConfig(**kind, task_type="CAUSAL_LM"))


def kept(packed: Mapping[str, lowbit.LowBitLinear], layers: Mapping[str, fake.FakeQuantLinear]) -> list[str]:
    """The layers whose grids are those that they were packed on."""
    return [
        name
        for name, layer in layers.items()
        if name in packed
        and layer.grids != "step"
        and fake.same_grids(packed[name], layer)
        and torch.equal(packed[name].unpacked()[1], layer.scale)
    ]


def refuse(policy: str, scheme: Scheme | None, rank: int = 1, dropout: float = 0.0) -> None:
    """Raise the `PolicyError` that says what does not fit together, if something does not."""
    if policy not in POLICIES:
        raise PolicyError(f"policy = {policy!r} is unknown: choose one of {', '.join(POLICIES)}.")
    numbers = scheme.numbers if scheme else None
    wanted = {"qlora": "nf4", "lora": None, "full": None}.get(policy, "uniform")
    if numbers != wanted:
        needs = {None: "no scheme", "nf4": "nf4 or nf4-dq", "uniform": "a uniform grid, such as w8pt-sym"}[wanted]
        raise PolicyError(f"policy = {policy} does not fit scheme = {scheme}: it needs {needs}.")
    if policy == "qlora" and scheme.targets != "all":
        raise PolicyError(f"policy = qlora does not fit scheme = {scheme}: its base is quantized everywhere.")
    if policy == "qlora" and not _installed("bitsandbytes"):
        raise PolicyError("policy = qlora needs the package bitsandbytes, which is not installed.")
    if rank < 1:
        raise PolicyError(f"rank = {rank} is no rank: it must be at least 1.")
    if not 0 <= dropout < 1:
        raise PolicyError(f"dropout = {dropout} is no share: it must be at least 0 and below 1.")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # sys.modules says that it is not to be imported
        return False


def quantized_steps(policy: str, steps: int, first: int = 0, last: int = 0) -> range:
    """The steps, counted from 1, whose forwards are quantized: from `first` to `last`, 0 meaning the run's first and last.

    Errors: `PolicyError` where there is no such step.
    """
    if policy not in QUANTIZED:
        if first or last:
            raise PolicyError(f"policy = {policy} is the same at every step: leave quantize_from and quantize_until 0.")
        return range(0)
    found = range(first or 1, min(last or steps, steps) + 1)
    if not found:
        raise PolicyError(
            f"quantize_from = {first} and quantize_until = {last} leave none of {steps} steps to be quantized."
        )
    return found


def switch(model: nn.Module, policy: str, on: bool) -> None:
    """Quantize the forwards that `policy` quantizes, or none; called before each step, does nothing where nothing changes."""
    where = QUANTIZED.get(policy, "nowhere") if on else "nowhere"
    if fake.where(model) != where:
        fake.switch(model, where)


def finish(model: nn.Module, policy: str) -> nn.Module:
    """What is saved: packed if the last forward in training was quantized, else full precision, adapters unmerged."""
    if policy == "qaft" and fake.where(model) == "everywhere":
        fake.pack(model)
    elif policy in QUANTIZED:
        fake.remove(model)
    return model


def step_name(policy: str, loss: str) -> str:
    """What a recipe calls the step: the policy, or the loss in full precision."""
    return loss if policy == "full" else policy
