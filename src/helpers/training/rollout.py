"""What TRL's trainer is told here: sample from the quantized policy, and note how far the sampler was from the trainer.

For each token o of a reply both give a probability: the sampler when it drew o, one token after another with a key-value cache, and
the trainer in the forward that the loss is computed from. In exact arithmetic they are equal unless the sampler alone is quantized;
on a GPU both multiply TF32 numbers, in another order.

    mismatch   |log p_trainer(o) - log p_sampler(o)|, mean and largest over the tokens of all replies
    weight     min(p_trainer(o) / p_sampler(o), C) on the token's loss: truncated importance sampling (TIS); C = 0: none

Without the weight the gradient is that of the objective under the sampler's distribution, not the trainer's; the truncation bounds
its variance. Source: Yao et al., Your efficient RL framework secretly brings you off-policy RL training (2025).
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from trl import GRPOTrainer

from helpers.models import adapters
from helpers.quant import fake
from helpers.sampling import backends
from helpers.training import parallel

LIKE = 0.7  # how much shorter than another a text may be that is padded to its length
FILLS = 2**13  # tokens of a group on a GPU: with fewer, launching the kernels takes longer than to compute the padding


class LogProbs:
    """While open, notes the log-probability of each token that `model.generate` draws at `temperature`."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        self.model, self.temperature = adapters.base_of(model), temperature
        self.drawn: list[torch.Tensor] = []  # (B,) a token
        self.ahead: torch.Tensor | None = None  # log-probabilities (B, V) of the token to come

    def __enter__(self) -> "LogProbs":
        self.handle = self.model.register_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

    def _note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._draw(kwargs["input_ids"][:, -1])  # the last token that was drawn is the next forward's input
        self.ahead = (output.logits[:, -1].float() / self.temperature).log_softmax(-1)

    def _draw(self, tokens: torch.Tensor) -> None:
        if self.ahead is not None:
            self.drawn.append(self.ahead.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))

    def of(self, replies: list[list[int]]) -> list[list[float]]:
        """One row a reply, as long as the reply; call it once, after `generate`."""
        longest = max(map(len, replies))
        last = [reply[-1] if len(reply) == longest else 0 for reply in replies]  # no forward has read these
        self._draw(torch.tensor(last, device=self.ahead.device))
        rows = torch.stack(self.drawn, dim=1).tolist()
        return [row[: len(reply)] for row, reply in zip(rows, replies, strict=True)]


class Trainer(parallel.Shared, GRPOTrainer):
    """`truncate` is C. Between two calls of `mismatch` the differences of all tokens are gathered."""

    def __init__(self, *args: Any, truncate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truncate = truncate
        self.inputs: dict[str, Any] | None = None  # of the loss that is being computed
        self.differences: list[torch.Tensor] = []

    # Not TRL's experimental `rollout_func`: it is given messages, so the chat template would be ours to apply, and TRL's own
    # `generate`, which `hf` needs, cannot be called from there.
    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list, list]:
        """TRL's, with W' computed once, without dropout, and with the sampler's log-probabilities, which TRL then keeps."""
        self.model.eval()
        try:
            with fake.materialized(self.model):
                if backends.backend_of(self.model) == "graph":
                    return self._by_engine(prompt_ids)
                with LogProbs(self.model, self.temperature) as sampler:
                    replies, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                return replies, sampler.of(replies)
        finally:
            self.model.train()

    def _by_engine(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Replies and their log-probabilities, as `_generate_single_turn` gives them."""
        settings = backends.Settings(
            self.max_completion_length, tuple(self.eos_token_ids), self._tokenizer.pad_token_id, len(prompts),
            self.temperature, self.top_k, self.top_p,
        )  # fmt: skip
        drawn = backends.with_logprobs(self.model, prompts, settings)
        return [ids for ids, _ in drawn], [logprobs for _, logprobs in drawn]

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self.inputs = dict(inputs)
        try:
            return super()._compute_loss(model, self.inputs)
        finally:
            self.inputs = None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """TRL's, with texts of like length together, so that little padding is computed.

        In the loss it is followed by a look at the advantages, which may then be one a token: `(B, T)`.
        """
        parts, rows = [], []
        start = input_ids.shape[1] - logits_to_keep  # of the replies
        for group, first, last in alike(attention_mask, FILLS if attention_mask.is_cuda else 0):
            last = max(last, start + 1)
            cut = (x[group, first:last] for x in (input_ids, attention_mask))
            found = super()._get_per_token_logps_and_entropies(model, *cut, last - start, *args, **kwargs)
            padding = 0, input_ids.shape[1] - last
            parts.append([x if x is None else functional.pad(x, padding) for x in found[:2]])
            rows += group
        back = torch.tensor(rows, device=input_ids.device).argsort()
        wholes = (None if each[0] is None else torch.cat(each)[back] for each in zip(*parts, strict=True))
        found = *wholes, None
        if self.inputs is not None and "sampling_per_token_logps" in self.inputs:
            mask = self.inputs["completion_mask"].bool()
            ratio = (found[0].detach() - self.inputs["sampling_per_token_logps"]).masked_fill(~mask, 0.0)
            self.differences.append(ratio[mask].abs())
            if self.truncate:
                self.inputs["advantages"] = self.inputs["advantages"].unsqueeze(1) * weights(ratio, self.truncate)
        return found

    def mismatch(self) -> dict[str, float]:
        """`mismatch_mean` and `mismatch_max` over the tokens of all processes since the last call, in nats."""
        found = torch.cat(self.differences)
        self.differences = []
        own = torch.stack([found.sum(), found.new_tensor(len(found)), found.max()])
        sums, counts, largest = self.accelerator.gather(own.unsqueeze(0)).T
        return {"mismatch_mean": float(sums.sum() / counts.sum()), "mismatch_max": float(largest.max())}


def alike(mask: torch.Tensor, least: int = 0) -> list[tuple[list[int], int, int]]:
    """Rows of `mask` `(B, T)` in groups of like length, each with the columns, from and to, that its texts need.

    No text of a group is shorter than `LIKE` of the longest, unless it would otherwise have fewer than `least` tokens.
    """
    inside = mask.bool()
    firsts = inside.int().argmax(1).tolist()
    lasts = (mask.shape[1] - inside.flip(1).int().argmax(1)).tolist()
    lengths = [last - first for first, last in zip(firsts, lasts, strict=True)]
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or (lengths[row] < LIKE * longest and len(groups[-1]) * longest >= least):
            groups.append([])
        groups[-1].append(row)
    return [(rows, min(firsts[row] for row in rows), max(lasts[row] for row in rows)) for rows in groups]


def weights(log_ratio: torch.Tensor, truncate: float) -> torch.Tensor:
    """min(p_trainer / p_sampler, C) from the difference of the log-probabilities."""
    return log_ratio.exp().clamp(max=truncate)
