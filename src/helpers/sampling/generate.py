"""Sample replies to problems, with one of the `backends`.

Prompts of like length go together. Replies of one problem stay together, in the problems' order, whatever the batches were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.errors import UserError
from helpers.sampling import backends
from helpers.tasks import Problem, prompts


@dataclass(frozen=True)
class Reply:
    """One reply: its text, its token ids (end mark included, padding not), and whether it ended by itself."""

    problem_id: str
    text: str
    ids: tuple[int, ...]
    finished: bool


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], style: str = "raw") -> list[list[int]]:
    """The token ids of each problem's prompt, up to where the reply begins.

    Errors: `UserError` for a prompt with characters that the tokenizer does not know: the model could not read it.
    """
    ids = tokenizer(prompts.texts(tokenizer, problems, style), add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    for problem, row in zip(problems, ids, strict=True):
        if unknown is not None and unknown in row:
            written = "".join(turn["content"] for turn in prompts.messages(problem, style))
            odd = next(c for c in written if unknown in tokenizer(c, add_special_tokens=False)["input_ids"])
            raise UserError(
                f"The model's tokenizer has no {odd!r}, which the prompt of {problem.id} needs: take another model."
            )
    return ids


def refuse_long(
    model: PreTrainedModel, problems: Sequence[Problem], lengths: Sequence[int], max_new_tokens: int
) -> None:
    """Raise `UserError` where a prompt and its reply are longer than the texts that the model knows."""
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if positions and longest is not None and lengths[longest] + max_new_tokens > positions:
        raise UserError(
            f"The prompt of {problems[longest].id} has {lengths[longest]} tokens, which with max_new_tokens = "
            f"{max_new_tokens} is more than the {positions} that the model can read: take a smaller limit or another model."
        )


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    k: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 96,
    batch_size: int = 256,
    seed: int = 0,
    backend: str = "auto",
    prompt: str = "raw",
) -> list[Reply]:
    """Give `k` replies a problem, problem by problem; temperature 0 is greedy decoding, with `k` = 1.

    `batch_size` counts replies; `top_k` 0 and `top_p` 1 leave nothing out. The same seed, batch size and back end give the same
    replies on one machine; on a GPU up to rounding, since an engine kept from a longer rollout splits its attention otherwise.
    `prompt` is one of `tasks.STYLES`.

    Errors: `UserError` for equal replies, for settings that nothing can be drawn with, and for prompts that the model cannot read.
    """
    if temperature == 0 and k > 1:
        raise UserError(
            f"k = {k} with temperature 0 would give {k} equal replies: use k = 1, or a temperature above 0."
        )
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    chosen = backends.backend_of(model, backend)
    torch.manual_seed(seed)
    asked = prompt_ids(tokenizer, problems, prompt)
    lengths = [len(ids) for ids in asked]
    refuse_long(model, problems, lengths, max_new_tokens)
    order = [i for i in sorted(range(len(problems)), key=lengths.__getitem__) for _ in range(k)]
    settings = backends.Settings(
        max_new_tokens, tuple(ends), tokenizer.pad_token_id, batch_size, temperature, top_k, top_p
    )
    replies: dict[int, list[Reply]] = {}
    for i, ids in zip(order, backends.draw(model, [asked[i] for i in order], settings, chosen), strict=True):
        end = next((n for n, token in enumerate(ids) if token in ends), None)
        kept = tuple(ids if end is None else ids[: end + 1])
        text = tokenizer.decode(kept, skip_special_tokens=True)
        replies.setdefault(i, []).append(Reply(problems[i].id, text, kept, end is not None))
    return [reply for i in range(len(problems)) for reply in replies[i]]
