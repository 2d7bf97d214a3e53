"""What each process of tests/test_parallel.py does: trainings with fixed texts and replies, whose gradients it writes down.

python share.py FOLDER      with LOWBIT_PROCESSES, LOWBIT_RANK and LOWBIT_STAGING set
"""

import sys
from pathlib import Path

import torch

from helpers import models, processes, tasks
from helpers.sampling import training_texts
from helpers.training import grpo, parallel, precision, qat, rollout

GRPO = {
    "full": {},
    "in parts": {"micro_batch": 2, "loss": "dr_grpo"},
    "qaft": {"policy": "qaft", "scheme": "w4g64"},
    "lora": {"policy": "lora"},
    "qlora": {"policy": "qlora", "scheme": "nf4"},
}
QAT = {"kd": {}, "sft": {"objective": "sft", "micro_batch": 2}, "checkpointing": {"checkpointing": True}}


def main(folder: Path) -> None:
    shares: list[dict[str, torch.Tensor]] = []  # before and after they are averaged
    gradients: list[dict[str, torch.Tensor]] = []
    average = parallel.average

    def noted(model):
        for kept in (shares, gradients):
            kept.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            average(model) if kept is shares else None

    def fixed(self, prompts, *_, **__):
        """Replies by their place in the step, whatever the policy is."""
        first = processes.rank() * len(prompts)
        texts = [rf"\boxed{{{7 ** (first + n) % 97}}}<eos>" for n in range(len(prompts))]
        replies = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return replies, [[-1.0] * len(reply) for reply in replies]

    parallel.average = noted
    rollout.Trainer._generate_single_turn = fixed
    found, teacher = {}, models.load("base-xs")[0]
    for name in (*GRPO, *QAT):
        models.seed_everything(3)
        model, tokenizer = models.load("base-xs")
        shares.clear(), gradients.clear()
        rows = []
        try:
            if name in GRPO:
                how = dict(GRPO[name])
                model = precision.apply(model, how.pop("policy", "full"), how.pop("scheme", None))
                problems = tasks.load("arithmetic", "train", 8)
                how |= {"steps": 2, "prompts_per_step": 2, "group_size": 4, "kl_every": 0, "max_new_tokens": 20}
                rows = grpo.train(model, tokenizer, problems, reward=lambda v: int(v.answer) % 5 / 5, **how)
            else:
                if processes.rank():  # what process 0 has counts
                    for parameter in model.parameters():
                        parameter.data.mul_(1.5)
                model = precision.apply(model, "qaft", "w3g64")
                texts = training_texts("gold", "arithmetic", model, tokenizer, 24)
                how = {"teacher": teacher, "steps": 2, "batch_size": 8} | QAT[name]
                rows = qat.train(model, tokenizer, texts, **how)
        except SystemExit:  # a follower's end
            pass
        found[name] = {"rows": rows, "shares": list(shares), "gradients": list(gradients)}
        found[name]["weights"] = dict(model.named_parameters())
    torch.save(found, folder / f"{processes.count()}-{processes.rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
