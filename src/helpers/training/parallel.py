"""One training in several processes: each works on its share of a step, and all take the same step.

Accelerate deals the batches out and gathers what is logged, as in any of its trainings. The gradients of a step are

    g = 1/W sum over processes r of g_r        g_r: of the mean over the share of r

added up once, after the last backward pass of the step, and not meanwhile by a wrapper round the model
(DistributedDataParallel): the losses here call parts of the model, and call it a number of times that differs from process to
process, which such a wrapper does not allow. On GPUs that are linked, adding up takes a hundredth of a step that begins with a
rollout. All start from the weights and texts of process 0, keep the same weights from then on, and process 0 alone writes. Sums
travel over NCCL between GPUs and over Gloo between processes of a CPU.

Weights, gradients and the optimizer's moments are whole in each process: more of them make a step shorter, not a model fit.
How the processes come about: `helpers.processes`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.state import AcceleratorState
from torch import distributed, nn

from helpers import processes
from helpers.staging import SOCKETS

PATIENCE = timedelta(days=1)  # others may wait while process 0 looks at the model; one that fails is noticed at once
LAUNCHED = {"RANK": "{rank}", "WORLD_SIZE": "{count}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "{count}"}
Data = TypeVar("Data")
meetings = count()


def first() -> bool:
    """Whether this is the process that writes."""
    return processes.rank() == 0


def share(name: str, total: int) -> int:
    """What each process has of a step's `total`.

    Errors: `UserError` where it cannot be divided.
    """
    if total % processes.count():
        raise processes.UserError(f"{name} = {total} cannot be shared by {processes.count()} processes.")
    return total // processes.count()


@contextmanager
def session(model: nn.Module, data: Data) -> Iterator[Data]:
    """Around a training: gives the `data` of process 0, makes `model` its model, and ends every other process behind it."""
    if processes.count() == 1:
        yield data
        return
    staging = Path(os.environ["LOWBIT_STAGING"])
    local = staging / SOCKETS  # runs may lie on a disk of the network, where files are no place to meet
    meeting = (local if local.exists() else staging) / f".meeting-{next(meetings)}"
    before = {name: os.environ.get(name) for name in LAUNCHED}
    told = {"rank": processes.rank(), "count": processes.count()}
    os.environ |= {name: value.format(**told) for name, value in LAUNCHED.items()}  # for accelerate
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on one machine
    try:
        distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{meeting}",
            rank=told["rank"],
            world_size=told["count"],
            timeout=PATIENCE,
        )
        alike(model)
        held = [data]
        distributed.broadcast_object_list(held)
        yield held[0]
        distributed.barrier()
    except BaseException as error:
        processes.tell(staging, told["rank"], processes.sentence(error))
        raise
    finally:
        with suppress(Exception):
            distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        meeting.unlink(missing_ok=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if not first():
        raise SystemExit(0)  # what follows is work for one


@torch.no_grad()
def alike(model: nn.Module) -> None:
    """Give every process the numbers that process 0 has in parameters and buffers: grids may be rounded otherwise elsewhere."""
    for tensor in chain(model.parameters(), model.buffers()):
        same = tensor.data.contiguous()
        distributed.broadcast(same, 0)
        tensor.data.copy_(same)


@torch.no_grad()
def average(model: nn.Module) -> None:
    """Make the gradient of every trained parameter the mean over all processes."""
    if processes.count() == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # a share may have nothing to say about it
            parameter.grad = torch.zeros_like(parameter)
    for work in [distributed.all_reduce(parameter.grad, async_op=True) for parameter in trained]:
        work.wait()
    for parameter in trained:
        parameter.grad /= processes.count()


class Shared:
    """For a trainer of transformers, before it in the order of its classes: what is said above, and one GPU a process."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        one_gpu(self.args)
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)  # unwrapped

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last backward pass of the step
            average(self.model)
        return loss


def one_gpu(arguments: Any) -> None:
    """Keep transformers from spreading a model over all visible GPUs (`nn.DataParallel`), in which no hook here would work."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
