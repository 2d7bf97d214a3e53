"""Next-token training of a micro model on (prompt, reply) documents.

Only reply tokens and the end mark count in the loss: prompts are random numbers, there is nothing to learn from them. Documents are
packed one after another into rows, so almost nothing is padding; positions start again with each document, from which the
model's own mask keeps them from seeing one another. (Batches sorted by length would save as much padding and
learn far worse: every step would then see short replies only, or long ones only.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
WIDTH = 256  # tokens a row
Document = tuple[np.ndarray, int]  # token ids (T,), length of the prompt


@dataclass(frozen=True)
class Batch:
    """Packed rows, each `(B, T)`: token ids, positions within each document, labels."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(x.to(device, non_blocking=True) for x in (self.ids, self.positions, self.labels)))


def encode(documents: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Give (token ids of prompt, reply and end mark; length of the prompt) for each document."""
    prompts = [[{"role": "user", "content": prompt}] for prompt, _ in documents]
    heads = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    head_ids = tokenizer(heads, add_special_tokens=False)["input_ids"]
    reply_ids = tokenizer([reply for _, reply in documents], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [(np.array(head + reply + end), len(head)) for head, reply in zip(head_ids, reply_ids, strict=True)]


def pack(documents: Sequence[Document], pad: int, width: int = WIDTH) -> Batch:
    """Put documents into rows of `width` tokens in the given order, each whole, a new row where the next does not fit."""
    starts, row, column = [], 0, 0
    for ids, _ in documents:
        if column + len(ids) > width:
            row, column = row + 1, 0
        starts.append((row, column))
        column += len(ids)
    shape = (row + 1, width)
    tokens, positions, labels = np.full(shape, pad), np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED)
    for (row, start), (ids, head) in zip(starts, documents, strict=True):
        end = start + len(ids)
        tokens[row, start:end] = ids
        positions[row, start:end] = np.arange(len(ids))
        labels[row, start + head : end] = ids[head:]
    return Batch(*(torch.from_numpy(x) for x in (tokens, positions, labels)))


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats a reply token."""
    logits = model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


class Batches(Dataset):
    """Batch `i` of a corpus, made on demand: the same whichever worker makes it."""

    def __init__(
        self, documents: Callable[[int], list[tuple[str, str]]], steps: int, tokenizer: PreTrainedTokenizerBase
    ):
        self.documents, self.steps, self.tokenizer = documents, steps, tokenizer

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        return pack(encode(self.documents(index), self.tokenizer), self.tokenizer.pad_token_id)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Callable[[int], list[tuple[str, str]]],
    steps: int,
    lr: float,
    warmup: int = 50,
    weight_decay: float = 0.01,
    workers: int = 0,
    log: Callable[..., None] = lambda **row: None,
    log_every: int = 50,
) -> list[dict[str, float]]:
    """Train for `steps` batches, `documents(i)` being the (prompt, reply) pairs of batch `i`; AdamW, cosine decay to a tenth.

    Batches are made by `workers` processes beside the training (0: in between). On a GPU the matrix products run in bfloat16;
    weights and optimizer state stay in float32. Gives the logged rows {step, loss, lr}; loss is the mean over the last
    `log_every` steps, in nats a reply token.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))),
    )
    model.train()
    history, recent = [], []
    batches = DataLoader(Batches(documents, steps, tokenizer), batch_size=None, num_workers=workers)
    for step, batch in enumerate(batches, start=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        recent.append(loss.detach())
        if step % log_every == 0 or step == steps:
            history.append({"step": step, "loss": torch.stack(recent).mean().item(), "lr": scheduler.get_last_lr()[0]})
            recent.clear()
            log(**history[-1])
    model.eval()
    return history
