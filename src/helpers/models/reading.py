"""What a model makes of a text that is given to it: its distribution over the next token, at each token that counts.

Texts are token ids; of text i the tokens from `starts[i]` on count (the reply, say, and not the prompt). A token is predicted by
those before it, so the first of a text never counts. Texts of like length go together, padded on the right: attention is causal,
so no token sees padding. A batch holds so few texts that its logits stay below half a gigabyte.

    log p(. | o_<t) = log_softmax(logits_(t-1))        KL(p || q) = sum over v of p(v) (log p(v) - log q(v)), nats
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from helpers.errors import UserError

BATCH = 32  # texts
LOGITS = 2**27  # numbers in the logits of a batch


@dataclass(frozen=True)
class Batch:
    """Some texts: `ids` `(B, T)`, `counts` `(B, T)` true where a token counts, `texts` the place of each in the whole list."""

    ids: torch.Tensor
    counts: torch.Tensor
    texts: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """The text of each of the N tokens that count, in the order of `log_probs`."""
        return self.texts[self.counts.nonzero()[:, 0]]

    @property
    def tokens(self) -> torch.Tensor:
        """These tokens' ids `(N,)`."""
        return self.ids[self.counts]


def batches(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> Iterator[Batch]:
    """The texts, batch by batch; without `starts` every token counts but the first.

    Errors: `UserError` for no text, one without a token that counts, one longer than the model's positions, and unknown ids.
    """
    starts = [1] * len(texts) if starts is None else [max(1, start) for start in starts]
    refuse_bad_texts(model, texts, starts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    while order:
        size = BATCH
        while size > 1 and len(order[:size]) * len(texts[order[:size][-1]]) * model.config.vocab_size > LOGITS:
            size //= 2
        rows, order = order[:size], order[size:]
        ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(list(texts[i])) for i in rows], batch_first=True)
        place = torch.arange(ids.shape[1])
        begin, end = (torch.tensor([x[i] for i in rows])[:, None] for x in (starts, list(map(len, texts))))
        counts = (place >= begin) & (place < end)
        yield Batch(*(x.to(model.device) for x in (ids, counts, torch.tensor(rows))))


@torch.inference_mode()
def log_probs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """`(N, vocabulary)` log-probabilities in float32, one row for each token that counts, text by text."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits[batch.counts[:, 1:]].float(), dim=-1)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats of each row of two `(N, vocabulary)` log-probabilities; rounding never makes it negative."""
    return torch.where(p.isinf(), 0.0, p.exp() * (p - q)).sum(-1).clamp(min=0)


def entropy(p: torch.Tensor) -> torch.Tensor:
    """- sum of p log p in nats, of each row of `(N, vocabulary)` log-probabilities."""
    return -torch.where(p.isinf(), 0.0, p.exp() * p).sum(-1)


def refuse_bad_texts(model: PreTrainedModel, texts: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
    """Raise `UserError` on the first text that cannot be read, or of which nothing counts."""
    if not texts:
        raise UserError("there is no text to read: give at least one.")
    most, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    for index, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        if len(ids) <= start:
            raise UserError(f"text {index} has {len(ids)} tokens, and none of them counts: replies must not be empty.")
        if len(ids) > most:
            raise UserError(f"text {index} has {len(ids)} tokens, and the model has {most} positions.")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise UserError(f"text {index} holds a token id outside 0..{vocabulary - 1}.")
