"""Quantization-aware training (QAT): supervised fine-tuning and knowledge distillation through fake-quantized weights.

Each step reads some texts, prompt and reply, and takes one of the objectives of `objective` at each token of the replies,
averaged over the step's tokens. The forward pass computes with the weights of the grid, the gradient goes straight through the
rounding (`quant.fake`), and an optimizer moves the latent weights. The teacher is in full precision and stands still. With a
scheme of 16 bits (no layer fake-quantized) the same is plain fine-tuning.

On-policy distillation (GKD, 2306.13649): the student writes the replies itself, anew at each step, and the teacher is asked what it
would have written at each token: the student is taught on the mistakes that it makes.

transformers' Trainer does the rest: AdamW, schedule, accumulation, clipping, checkpoints. A run that is killed goes on from its
last checkpoint, with the same texts in the same order, so its numbers are those of a run that was not killed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from helpers.errors import UserError
from helpers.models.device import tensor_cores
from helpers.models.lowbit import quantization_of
from helpers.quant import fake
from helpers.sampling import prompt_ids
from helpers.sampling.traces import Document, replies_of
from helpers.tasks import Problem
from helpers.training import checkpointing as activations
from helpers.training import objective as objectives
from helpers.training import parallel
from helpers.training.pretrain import IGNORED, WIDTH, pack

OBJECTIVES = ("sft", "kd")
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
ROWS = "rows.pt"  # the last file of a checkpoint that is written: one without it is not whole


class QatError(UserError):
    """QAT that cannot begin, because teacher, student and texts do not fit, or cannot go on."""


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Document] | Sequence[Problem],
    *,
    teacher: PreTrainedModel | None = None,
    objective: str = "kd",
    reverse: float = 0.0,
    temperature: float = 1.0,
    steps: int = 200,
    batch_size: int = 64,
    micro_batch: int = 0,
    checkpointing: bool = False,
    lr: float = 5e-4,
    schedule: str = "cosine",
    warmup: float = 0.05,
    max_new_tokens: int = 96,
    seed: int = 0,
    checkpoints: Path | None = None,
    save_every: int = 0,
    measure_every: int = 0,
    measure: Callable[[], dict[str, float]] = dict,
    log: Callable[..., None] = lambda **row: None,
) -> list[dict[str, float]]:
    """Train `model` in place; gives one row a step: step, loss (nats a reply token), lr, grad_norm, tokens, and what follows.

    `codes_moved`: the share of codes that are not where they began. Every `measure_every` steps, before the first and after the
    last, what `measure` gives. `texts` are documents, gone through again and again in random order; or problems, which the
    student answers itself (on-policy, up to `max_new_tokens`). A step reads `batch_size` texts, shared among the processes of the
    run (`parallel`), `micro_batch` at a time in each (0: all); with `checkpointing` layers are computed again in the backward
    pass, which keeps less; `warmup` is a share of the steps. Every `save_every` steps the state of training goes to `checkpoints`,
    from where the next call goes on.

    Errors: `QatError` for an unknown objective or schedule, a teacher that is missing, is quantized or has another vocabulary,
    a text without a prompt or a reply or longer than the model's positions, and a loss or gradient that is no longer finite.
    """
    refuse(model, tokenizer, texts, teacher, objective, schedule, batch_size, micro_batch, max_new_tokens)
    history: list[dict[str, float]] = []

    class Recorder(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if measure_every and state.global_step == 0 and parallel.first():
                add({"step": 0} | measured(model, measure))

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" not in logs:
                return
            row = {"step": state.global_step, "loss": logs["loss"], "lr": logs["learning_rate"]}
            row |= {"grad_norm": float(logs["grad_norm"]), "tokens": trainer.tokens}
            if not np.isfinite([row["loss"], row["grad_norm"]]).all():
                raise QatError(f"the loss or its gradient is not finite at step {row['step']}: lower lr = {lr}.")
            if not parallel.first():
                return
            if began and (state.global_step % 10 == 0 or state.global_step == steps):
                row["codes_moved"] = fake.differing(fake.codes(model), began)
            if measure_every and (state.global_step % measure_every == 0 or state.global_step == steps):
                row |= measured(model, measure)
            add(row)

        def on_save(self, args, state, control, **_):
            if not parallel.first():
                return
            rows = Path(args.output_dir) / f"checkpoint-{state.global_step}" / ROWS
            torch.save({"history": history, "codes": began}, rows.with_suffix(".part"))
            rows.with_suffix(".part").rename(rows)

    def add(row: dict[str, float]) -> None:
        history.append(row)
        log(**row)

    folder = str(checkpoints or "unused")
    own = parallel.share("batch_size", batch_size)
    micro_batch = micro_batch or own
    with parallel.session(model, list(texts)) as texts:
        began = fake.codes(model)
        trainer = _Trainer(
            model,
            TrainingArguments(
                output_dir=folder, seed=seed, data_seed=seed, use_cpu=not torch.cuda.is_available(), report_to=[],
                disable_tqdm=True, max_steps=steps, learning_rate=lr, lr_scheduler_type=SCHEDULES[schedule],
                warmup_steps=round(warmup * steps), weight_decay=0.0, max_grad_norm=1.0, per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=own // micro_batch, logging_steps=1, logging_nan_inf_filter=False,
                save_strategy="steps" if save_every and checkpoints else "no", save_steps=save_every or 500, save_total_limit=2,
                remove_unused_columns=False, dataloader_pin_memory=False, optim="adamw_torch",
            ),
            tokenizer=tokenizer, texts=texts, teacher=teacher, objective=objective, reverse=reverse,
            temperature=temperature, max_new_tokens=max_new_tokens, callbacks=[Recorder()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        last = last_checkpoint(checkpoints) if checkpoints else None
        if last and parallel.first():
            kept = torch.load(last / ROWS, weights_only=True)
            history, began = kept["history"], kept["codes"]
            for row in history:
                log(**row)
        try:
            if last and step_of(last) == steps:  # transformers would take one step more
                trainer._load_from_checkpoint(str(last))
            else:
                with activations.checkpointing(model, checkpointing), tensor_cores():
                    trainer.train(resume_from_checkpoint=str(last) if last else None)
        finally:
            model.eval()
    return history


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    return max((rows.parent for rows in folder.glob(f"checkpoint-*/{ROWS}")), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class _Trainer(parallel.Shared, Trainer):
    """transformers' Trainer, told how a batch is made of texts and what its loss is."""

    def __init__(
        self, model, args, *, tokenizer, texts, teacher, objective, reverse, temperature, max_new_tokens, **rest
    ):
        super().__init__(model, args, train_dataset=texts, data_collator=list, **rest)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the tokens of all micro-batches of a step
        self.tokenizer, self.teacher, self.max_new_tokens = tokenizer, teacher, max_new_tokens
        self.objective, self.reverse, self.temperature = objective, reverse, temperature
        self.tokens = 0  # reply tokens of the step, of all processes

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of a step, and how many reply tokens they have together."""
        parts = list(islice(epoch_iterator, num_batches))
        if isinstance(parts[0][0], Problem):
            replies = iter(self.own_replies([problem for part in parts for problem in part]))
            parts = [list(islice(replies, len(part))) for part in parts]
        batches = []
        for texts in parts:
            longest = max(len(ids) for ids, _ in texts)
            documents = [(np.asarray(ids), head) for ids, head in texts]
            batch = pack(documents, self.tokenizer.pad_token_id, max(longest, WIDTH))
            batches.append({"input_ids": batch.ids, "position_ids": batch.positions, "labels": batch.labels})
        own = torch.tensor([sum(int((b["labels"] != IGNORED).sum()) for b in batches)], device=device)
        total = self.accelerator.gather(own).sum()
        self.tokens = int(total)
        return batches, total / self.accelerator.num_processes  # gradients and losses are averaged over them

    def own_replies(self, problems: Sequence[Problem]) -> list[Document]:
        """What the student writes as it is now; the random state of the training stays as it was."""
        self.model.eval()
        with torch.random.fork_rng(), fake.materialized(self.model):
            seed = self.args.seed + 1000 * self.state.global_step + self.args.process_index
            found = replies_of(self.model, self.tokenizer, problems, seed, self.max_new_tokens, unfinished=True)
        self.model.train()
        return found

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        labels = inputs["labels"][:, 1:]
        counts = labels != IGNORED
        hidden = states(model, inputs)[counts]
        head = model.get_output_embeddings()
        if self.objective == "sft":
            loss = objectives.sft(hidden, head, labels[counts])
        else:
            with torch.no_grad():
                of_teacher = states(self.teacher, inputs)[counts]
            teacher_head = self.teacher.get_output_embeddings()
            loss = objectives.kd(hidden, head, of_teacher, teacher_head, self.reverse, self.temperature)
        return loss / num_items_in_batch


def states(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last hidden states `(B, T - 1, width)` of the positions that predict the tokens from the second on."""
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    return model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[:, :-1]


@torch.no_grad()
def measured(model: PreTrainedModel, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `measure` gives of the model at rest, its fake-quantized weights computed once."""
    training = model.training
    model.eval()
    with torch.random.fork_rng(), fake.materialized(model):
        found = measure()
    model.train(training)
    return found


def refuse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Document] | Sequence[Problem],
    teacher: PreTrainedModel | None,
    objective: str,
    schedule: str,
    batch_size: int,
    micro_batch: int,
    max_new_tokens: int,
) -> None:
    """Raise the `QatError` that says what does not fit together, if something does not."""
    for name, value, allowed in (("objective", objective, OBJECTIVES), ("schedule", schedule, SCHEDULES)):
        if value not in allowed:
            raise QatError(f"{name} = {value!r} is unknown: choose one of {', '.join(allowed)}.")
    own = parallel.share("batch_size", batch_size)
    if micro_batch and own % micro_batch:
        among = "" if own == batch_size else f", of which a process has {own}"
        raise QatError(f"micro_batch = {micro_batch} does not divide batch_size = {batch_size}{among}.")
    if len(texts) < batch_size:
        raise QatError(f"batch_size = {batch_size} is more than the {len(texts)} texts that there are.")
    if objective == "kd":
        if teacher is None:
            raise QatError("objective = kd needs a teacher.")
        if quantization_of(teacher.config) or fake.layers(teacher):
            raise QatError("the teacher is quantized itself: choose the full-precision model that it was made from.")
        if (theirs := teacher.config.vocab_size) != (ours := model.config.vocab_size):
            raise QatError(
                f"the teacher's vocabulary has {theirs} tokens and the student's {ours}: they must be the same."
            )
    elif isinstance(texts[0], Problem):
        raise QatError("objective = sft cannot learn from the student's own replies: choose other texts, or kd.")
    most = model.config.max_position_embeddings
    if isinstance(texts[0], Problem):
        longest = max(map(len, prompt_ids(tokenizer, texts))) + max_new_tokens
        if longest > most:
            raise QatError(
                f"max_new_tokens = {max_new_tokens} makes texts of {longest} tokens, and the model has {most} positions."
            )
        return
    for index, (ids, head) in enumerate(texts):
        if len(ids) <= head:
            raise QatError(f"text {index} has an empty reply: there is nothing to learn from it.")
        if head < 1:
            raise QatError(f"text {index} has no prompt: its first token has nothing to follow from.")
        if len(ids) > most:
            raise QatError(f"text {index} has {len(ids)} tokens, and the model has {most} positions.")


def refuse_other_tokens(tokenizer: PreTrainedTokenizerBase, teachers: PreTrainedTokenizerBase) -> None:
    """Raise `QatError` where a number stands for one token to the student and for another to the teacher."""
    ours, theirs = tokenizer.get_vocab(), teachers.get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd:
        raise QatError(f"teacher and student have different vocabularies: {odd[0]!r} is not the same token to both.")


def refuse_unread(bits: int, init: str, objective: str, replies: str, domain: str, changed: Sequence[str]) -> None:
    """Raise `QatError` where a parameter was `changed` that this training does not read, and for texts that nobody can write."""
    if replies == "student" and domain == "corpus":
        raise QatError("replies = student needs the problems of a task: choose domain = arithmetic or recall.")
    unread = []
    if bits == 16:
        names = ("granularity", "grid_size", "symmetric", "targets", "grids", "masked")
        unread += [("bits = 16", name) for name in names]
    if init not in ("gptq", "awq"):
        unread += [(f"init = {init}", name) for name in ("calibration", "calibration_texts")]
    if objective == "sft":
        unread += [("objective = sft", name) for name in ("reverse", "temperature")]
        if replies == "gold":
            unread.append(("objective = sft with replies = gold", "teacher"))
    for why, name in unread:
        if name in changed:
            raise QatError(f"{why} does not read {name}: leave it as it is.")


@torch.no_grad()
def finish(model: PreTrainedModel) -> None:
    """Round what is not on a grid to bfloat16, as it will be stored: the model is then its packed checkpoint, bit for bit."""
    on_grid = {id(p) for layer in fake.layers(model).values() for p in (layer.weight, layer.log_scale)}
    for parameter in model.parameters():
        if id(parameter) not in on_grid:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
