"""GRPO and Dr.GRPO, trained by TRL with every setting that matters set by name.

For each prompt a group of G replies is sampled; a reply's advantage is how much better it did than its group:

    GRPO      A_i = (r_i - mean(r)) / (std(r) + 1e-4)    loss = mean over replies of (1/|o_i|) sum_t L_it
    Dr.GRPO   A_i =  r_i - mean(r)                       loss = sum over replies and tokens of L_it / (replies * max length)

    L_it = -min(rho_it A_i, clip(rho_it, 1 - 0.2, 1 + 0.2) A_i),   rho_it = pi(o_it) / pi_rollout(o_it)

Dr.GRPO drops the two divisions that favour long wrong replies and very easy or very hard prompts. With one update a rollout, rho
is 1 and the logged loss is near zero while the gradient is not: watch the reward. Sources: DeepSeekMath (2402.03300), Understanding
R1-Zero-like training (2503.20783). TRL's own defaults are neither (`dapo`, importance-sampling correction); as in paper 1, there
is no KL term: how far the policy walks from its start is measured, not held back.

Rollouts come from the policy as it is: fake-quantized where its layers are (`precision`, `rollout`). A run that is killed leaves
nothing behind, and the same command starts it again from the beginning; the same seed then gives the same numbers.
"""

import copy
import math
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import GRPOConfig

from helpers.errors import UserError
from helpers.grading import Verdict, grade
from helpers.grading import reward as paper_reward
from helpers.models import adapters
from helpers.models.device import tensor_cores
from helpers.quant import fake
from helpers.tasks import Problem, messages
from helpers.training import checkpointing as activations
from helpers.training import parallel
from helpers.training.rollout import Trainer

SCALE_REWARDS = {"grpo": "group", "dr_grpo": "none"}
LOGGED = {  # ours <- TRL's
    "reward": "reward",
    "reward_std": "reward_std",
    "no_advantage": "frac_reward_zero_std",  # share of groups whose replies all earned the same: they teach nothing
    "reply_tokens": "completions/mean_length",
    "clipped": "completions/clipped_ratio",  # share of replies cut off at the limit
    "entropy": "entropy",  # nats a token
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
}


class TrainingError(UserError):
    """Training that cannot go on: settings that do not fit, or weights that are no longer finite."""


def settings(
    loss: str,
    steps: int,
    prompts_per_step: int,
    group_size: int,
    lr: float,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    folder: str,
    micro_batch: int = 0,
    dropout: bool = False,
) -> GRPOConfig:
    """TRL's configuration for one rollout and one update a step.

    `micro_batch` replies go through a backward pass (0: all that a process has); `dropout` leaves the model's as it is, else there
    is none.
    """
    replies = parallel.share("prompts_per_step * group_size", prompts_per_step * group_size)
    micro_batch = micro_batch or replies
    if replies % micro_batch:
        raise TrainingError(f"micro_batch = {micro_batch} does not divide the {replies} replies of a step.")
    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=folder, seed=seed, use_cpu=not on_gpu, bf16=False, fp16=False, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=1, dataloader_pin_memory=False,
        gradient_checkpointing=False, gradient_checkpointing_kwargs=activations.HOW,
        # one epoch of paper 1: linear decay, one warm-up step, gradient norm 1
        max_steps=steps, learning_rate=lr, lr_scheduler_type="linear", warmup_steps=1, max_grad_norm=1.0, weight_decay=0.0,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=replies // micro_batch, num_generations=group_size,
        # the objective
        loss_type=loss, scale_rewards=SCALE_REWARDS[loss], beta=0.0, num_iterations=1, epsilon=0.2,
        importance_sampling_level="token", mask_truncated_completions=False, entropy_coef=0.0, top_entropy_quantile=1.0,
        # the rollout
        max_completion_length=max_new_tokens, temperature=temperature, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        use_vllm=False, vllm_importance_sampling_correction=False, disable_dropout=not dropout, shuffle_dataset=True,
    )  # fmt: skip


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    loss: str = "grpo",
    steps: int = 60,
    prompts_per_step: int = 16,
    group_size: int = 8,
    lr: float = 2e-4,
    temperature: float = 1.0,
    max_new_tokens: int = 96,
    micro_batch: int = 0,
    checkpointing: bool = False,
    kl_every: int = 10,
    seed: int = 0,
    truncate: float = 0.0,
    reward: Callable[[Verdict], float] = paper_reward,
    reward_seconds: float = 60.0,
    before_step: Callable[[int], None] = lambda step: None,
    log: Callable[..., None] = lambda **row: None,
) -> list[dict[str, float]]:
    """Train `model` in place; gives one row a step: step, the names of `LOGGED`, and what follows.

    `mismatch_mean`, `mismatch_max`: see `rollout`, as for `truncate`. `codes_changed`, `codes_moved`: where layers are
    fake-quantized, the share of codes that the step changed, and that differ from when quantization began. Every `kl_every` steps
    `kl`: KL(policy || start) in nats a reply token, exact over the vocabulary, on replies of that step.

    Each step draws `prompts_per_step` problems, none twice as long as `problems` holds `steps * prompts_per_step` of them. They
    are shared among the processes of the run (`parallel`), whose rewards are compared in whole groups; `kl` is of the first one's.
    `before_step` is called with the number of each step, from 1. Grading and rewarding a rollout may take `reward_seconds`.

    Errors: `TrainingError` for an unknown loss, a group of one, a reward that fails or takes too long, or a gradient that is no
    longer finite.
    """
    if loss not in SCALE_REWARDS:
        raise TrainingError(f"loss = {loss!r} is unknown: choose one of {', '.join(SCALE_REWARDS)}.")
    if group_size < 2:
        raise TrainingError(f"group_size = {group_size} has nothing to compare: a group needs at least 2 replies.")
    rollout: dict[str, list] = {}
    history: list[dict[str, float]] = []

    def boxed_answer(prompts, completions, completion_ids, gold, grading, trainer_state, **_) -> list[float]:
        rollout.update(prompts=prompts, completion_ids=completion_ids)
        texts = [reply[0]["content"] for reply in completions]
        return rewards(reward, texts, gold, trainer_state.global_step + 1, reward_seconds, grading[0])

    class Recorder(TrainerCallback):
        began: dict[str, torch.Tensor] | None = None  # codes when quantization began
        before: dict[str, torch.Tensor] | None = None  # and before this step

        def on_step_begin(self, args, state, control, **_):
            before_step(state.global_step + 1)
            if fake.where(model) == "nowhere":
                self.began = self.before = None
            elif self.began is None:
                self.began = self.before = fake.codes(model)

        def on_log(self, args, state, control, logs=None, **_):
            if "reward" not in logs:
                return
            row = {"step": state.global_step} | {ours: float(logs[theirs]) for ours, theirs in LOGGED.items()}
            if not torch.isfinite(torch.tensor(row["grad_norm"])):
                raise TrainingError(f"the gradient is not finite at step {row['step']}: lower lr = {lr}.")
            row |= trainer.mismatch()
            if self.began is not None:
                now = fake.codes(model)
                row |= {
                    "codes_changed": fake.differing(now, self.before),
                    "codes_moved": fake.differing(now, self.began),
                }
                self.before = now
            if not parallel.first():
                return
            if kl_every and (state.global_step % kl_every == 0 or state.global_step in (1, steps)):
                row["kl"] = kl_to_start(model, start, tokenizer, rollout["prompts"], rollout["completion_ids"])
            history.append(row)
            log(**row)

    rows = [{"prompt": messages(p), "gold": p.gold, "grading": p.grading} for p in problems]
    trained = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    with parallel.session(model, rows) as rows, tempfile.TemporaryDirectory() as folder:
        start = copy.deepcopy(model).eval().requires_grad_(False) if kl_every else None
        config = settings(
            loss,
            steps,
            prompts_per_step,
            group_size,
            lr,
            temperature,
            max_new_tokens,
            seed,
            folder,
            micro_batch,
            dropout,
        )
        try:
            trainer = Trainer(
                model,
                reward_funcs=boxed_answer,
                args=config,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                callbacks=[Recorder()],
                truncate=truncate,
            )
            trainer.remove_callback(PrinterCallback)
            for (
                name,
                parameter,
            ) in model.named_parameters():  # TRL rounds adapters of 4-bit models to bfloat16, no others
                if name in trained:
                    parameter.data = trained[name]
            with activations.checkpointing(model, checkpointing), tensor_cores():
                trainer.train()
        finally:
            # TRL leaves a `forward` on the model that is bound to these very weights: a copy would go on computing with them.
            adapters.base_of(model).__dict__.pop("forward", None)
            model.eval()
    return history


def rewards(
    reward: Callable[[Verdict], float],
    replies: Sequence[str],
    golds: Sequence[str],
    step: int,
    seconds: float,
    how: str = "exact",
) -> list[float]:
    """The reward of each reply, graded as `how` says.

    Errors: `TrainingError` naming the reward function where it raises, gives no finite number, or needs more than `seconds`.
    """
    name, found = getattr(reward, "__name__", type(reward).__name__), []
    with deadline(seconds, f"the reward {name} of step {step} took more than {seconds:g} s: see reply {{}}.", found):
        for reply, verdict in zip(replies, grade(replies, golds, how), strict=True):
            try:
                value = float(reward(verdict))
            except TrainingError:
                raise
            except Exception as error:
                detail = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
                raise TrainingError(
                    f"the reward {name} failed at step {step} on the reply {reply[:80]!r}: {detail}."
                ) from error
            if not math.isfinite(value):
                raise TrainingError(f"the reward {name} gave {value} at step {step} for the reply {reply[:80]!r}.")
            found.append(value)
    return found


@contextmanager
def deadline(seconds: float, sentence: str, done: Sequence) -> Iterator[None]:
    """Raise `TrainingError(sentence)` in the main thread after `seconds`; `{}` in it is how many are done.

    Code that never gives control back to Python (some libraries' own) is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_):
        raise TrainingError(sentence.format(len(done)))

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def kl_to_start(
    model: PreTrainedModel,
    start: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence,
    completion_ids: Sequence,
    most: int = 64,
) -> float:
    """KL(model || start) in nats a token, averaged over the tokens of at most `most` replies that the model wrote."""
    texts = tokenizer.apply_chat_template(list(prompts[:most]), add_generation_prompt=True, tokenize=False)
    heads = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = [(head, list(reply)) for head, reply in zip(heads, completion_ids, strict=False)]
    width = max(len(head) + len(reply) for head, reply in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor(
        [head + reply + [pad] * (width - len(head) - len(reply)) for head, reply in rows], device=model.device
    )
    mask = torch.zeros(ids.shape, dtype=torch.bool, device=model.device)
    for row, (head, reply) in enumerate(rows):
        mask[row, len(head) - 1 : len(head) + len(reply) - 1] = True  # the position that predicts each reply token
    ours = model(input_ids=ids).logits[mask].log_softmax(-1)
    theirs = start(input_ids=ids).logits[mask].log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())
