"""What draws replies, by name, and which of them a model is sampled with.

    graph   the engine of this project (`engine`): any decoder whose step it can take, whatever its linear layers
    hf      the stock `generate` of transformers: any model
    vllm    vLLM, where it is installed, for a full-precision policy, which is saved for it. Written from its documentation and
            tested with a stand-in: it was not run against vLLM itself

Each takes prompts as token ids and gives the tokens that follow, in the same order; a reply may have padding after its end mark.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from helpers.errors import UserError
from helpers.models import adapters
from helpers.sampling.decoder import obstacle
from helpers.sampling.engine import engine_for

BACKENDS = ("graph", "hf", "vllm")
SWITCH = "LOWBIT_SAMPLER"  # environment variable that names the back end where `auto` is asked for
COLDEST = 1e-6  # the lowest temperature above 0: logits divided by it are still finite


@dataclass(frozen=True)
class Settings:
    """How replies are drawn: `rows` at a time, `top_k` 0 and `top_p` 1 without these filters, `ends` the end marks.

    Errors: `UserError` for a value that nothing can be drawn with.
    """

    max_new_tokens: int
    ends: tuple[int, ...]
    pad: int
    rows: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed, sentence in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or COLDEST <= self.temperature < inf, f"0 or at least {COLDEST}"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not allowed:
                raise UserError(f"{name} = {getattr(self, name)} is out of range: it must be {sentence}.")


def backend_of(model: nn.Module, asked: str = "auto") -> str:
    """The back end to sample with: as `asked`, else as the environment says, else `graph`; `hf` where a step cannot be taken.

    Errors: `UserError` for an unknown name, and where one is asked that cannot sample this model.
    """
    base = adapters.base_of(model)
    named = os.environ.get(SWITCH, "graph") if asked == "auto" else asked
    if named not in BACKENDS:
        raise UserError(f"the sampler {named!r} is unknown: choose one of {', '.join(BACKENDS)}.")
    reason = {"graph": obstacle, "hf": lambda base: "", "vllm": no_vllm}[named](base)
    if reason and (asked == named or named == "vllm"):
        raise UserError(f"backend = {named!r} cannot sample this model: {reason}; use 'hf'.")
    return "hf" if reason else named


def no_vllm(base: PreTrainedModel) -> str:
    """Why vLLM cannot sample this model; empty where it can."""
    if find_spec("vllm") is None:
        return "vllm is not installed"
    linear = (m for m in base.modules() if hasattr(m, "in_features"))
    if any(type(m) is not nn.Linear for m in linear) or adapters.adapted(base):
        return "it computes with low-bit or adapted layers, which only a full-precision checkpoint would hide from vllm"
    return ""


def draw(model: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings, backend: str) -> list[list[int]]:
    """The tokens that follow each prompt, from the back end of this name."""
    return {"graph": by_engine, "hf": by_generate, "vllm": by_vllm}[backend](model, prompts, settings)


def by_engine(model: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
    return [ids for ids, _ in with_logprobs(model, prompts, settings)]


def with_logprobs(
    model: nn.Module, prompts: Sequence[list[int]], settings: Settings
) -> list[tuple[list[int], list[float]]]:
    """The engine's replies, each with the log-probability of every token.

    Errors: `UserError` for a prompt without tokens.
    """
    if not all(map(len, prompts)):
        raise UserError("a prompt has no tokens: nothing follows from it.")
    width = max(map(len, prompts), default=0) + settings.max_new_tokens
    rows = min(settings.rows, len(prompts))
    engine = engine_for(
        model, rows, width, settings.max_new_tokens, settings.ends, settings.temperature, settings.top_k, settings.top_p
    )
    return engine.generate(prompts)


def by_generate(model: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
    """Prompts padded on the left, `rows` at a time."""
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
    config = GenerationConfig(do_sample=settings.temperature > 0, **(sampling if settings.temperature > 0 else {}))
    config.update(
        max_new_tokens=settings.max_new_tokens, pad_token_id=settings.pad, eos_token_id=list(settings.ends) or None
    )
    replies = []
    for start in range(0, len(prompts), settings.rows):
        batch = prompts[start : start + settings.rows]
        longest = max(map(len, batch))
        ids = torch.tensor([[settings.pad] * (longest - len(p)) + list(p) for p in batch], device=model.device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=model.device)
        found = model.generate(input_ids=ids, attention_mask=seen, generation_config=config)
        replies += found[:, longest:].tolist()
    return replies


def by_vllm(model: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
    """The policy as a checkpoint in a folder that is gone afterwards."""
    import vllm

    sampling = vllm.SamplingParams(
        temperature=settings.temperature, top_k=settings.top_k or -1, top_p=settings.top_p, max_tokens=settings.max_new_tokens,
        stop_token_ids=list(settings.ends), seed=int(torch.randint(2**31, ())), detokenize=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = vllm.LLM(model=folder, skip_tokenizer_init=True, max_num_seqs=settings.rows)
        found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling)
    return [list(each.outputs[0].token_ids) for each in found]
