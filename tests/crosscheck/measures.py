"""What is measured of two models: how far their blocks are apart, how well they predict held-out replies, how many codes agree."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers import sampling, tasks
from helpers.sampling.generate import prompt_ids

BATCH = 64  # texts


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its reply; the first `prompt` of them are the prompt."""

    ids: list[int]
    prompt: int


def traces(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: str, n: int) -> list[Text]:
    """`n` arithmetic prompts of `split`, each with a reply that the model samples."""
    problems = tasks.load("arithmetic", split, n)
    replies = sampling.sample(model, tokenizer, problems, temperature=1.0)
    prompts = prompt_ids(tokenizer, problems)
    return [Text([*p, *r.ids], len(p)) for p, r in zip(prompts, replies, strict=True)]


def batches(texts: list[Text]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids, tokens, replies) `(B, T)`, padded on the right; the latter two are true on tokens, and on a reply's tokens."""
    made = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(t.ids) for t in batch], batch_first=True)
        at = torch.arange(ids.shape[1])
        tokens = at < torch.tensor([[len(t.ids)] for t in batch])
        made.append((ids, tokens, tokens & (at >= torch.tensor([[t.prompt] for t in batch]))))
    return made


@torch.inference_mode()
def losses(model: PreTrainedModel, texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each text: the negative log-likelihood of its reply, and the reply's tokens. exp(sum / sum) is the perplexity."""
    sums, counts = [], []
    for ids, tokens, replies in batches(texts):
        logs = model(input_ids=ids, attention_mask=tokens.long()).logits[:, :-1].double().log_softmax(-1)
        sums.append((-logs.gather(-1, ids[:, 1:, None])[..., 0] * replies[:, 1:]).sum(1))
        counts.append(replies[:, 1:].sum(1))
    return torch.cat(sums), torch.cat(counts)


@torch.inference_mode()
def layer_error(full: PreTrainedModel, other: PreTrainedModel, texts: list[Text]) -> float:
    """Mean over blocks of |block'(x) - block(x)| / |block(x) - x|, x = what the full-precision model feeds the block."""
    blocks = full.model.layers
    off, moved = torch.zeros(len(blocks)), torch.zeros(len(blocks))
    for ids, tokens, _ in batches(texts):

        def compare(block: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor, tokens=tokens) -> None:
            index = list(blocks).index(block)
            off[index] += (other.model.layers[index](*args, **kwargs) - output)[tokens].square().sum()
            moved[index] += (output - args[0])[tokens].square().sum()

        hooks = [block.register_forward_hook(compare, with_kwargs=True) for block in blocks]
        full(input_ids=ids, attention_mask=tokens.long(), use_cache=False)
        for hook in hooks:
            hook.remove()
    return float((off / moved).sqrt().mean())


@torch.no_grad()
def equal_codes(full: PreTrainedModel, one: PreTrainedModel, other: PreTrainedModel, bits: int, group: int) -> float:
    """The share of weights that both put on the same point: nearer to each other than half a step of the min-max grid."""
    equal, total = 0, 0
    for name, layer in full.named_modules():
        if not isinstance(layer, nn.Linear) or "lm_head" in name:
            continue
        groups = layer.weight.reshape(-1, group)
        step = (groups.amax(1, keepdim=True).clamp(min=0) - groups.amin(1, keepdim=True).clamp(max=0)) / (2**bits - 1)
        apart = (one.get_submodule(name).weight - other.get_submodule(name).weight).reshape(-1, group).abs()
        equal += int((apart < step / 2).sum())
        total += apart.numel()
    return equal / total
