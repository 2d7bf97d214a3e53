"""Several processes for one run, each with a GPU of its own: who they are, how they begin, and what becomes of them.

`lowbit run grpo --processes 2`, or LOWBIT_PROCESSES=2 for every run that can use them. Process 0 is the notebook's kernel. As
`runs.begin` is called it starts the others, its followers: Python processes that go through the same cells with the same
parameters, up to the training, which is one for all (`training.parallel`) and where a follower ends. So nothing has to travel
between them before they train, and there is no second way to write a stage.

A process sees one GPU, so all that is written for one GPU is right in each; without GPUs they share the CPU. Followers are killed
with their kernel (Linux). If one of them fails, it leaves its sentence in the run's staging folder, the kernel is killed, and the
runner says the sentence.

The number of processes is no part of a run id: it names no other training. A step has the same prompts, texts and replies'
number, and its gradient is the same but for rounding and for which random numbers a reply is drawn with, as on another device.
Like the device it is recorded in the result.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from helpers import kernel, params, project
from helpers.errors import UserError
from helpers.staging import CONTEXT

STAGES = ("grpo", "qat")
COUNT, RANK, GPUS = "LOWBIT_PROCESSES", "LOWBIT_RANK", "LOWBIT_GPUS"
FAILURE = ".failure.json"  # in the staging folder: what ended the first process that failed
NO_GPU = {"", "-1", "NoDevFiles"}
MOST = 64


def count() -> int:
    """Processes of this run; one in a session, whose cells may be edited while followers know the template's."""
    return int(os.environ[COUNT]) if RANK in os.environ else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get(RANK, 0))


def ask(several: int, stage: str) -> None:
    """Have the next run of this stage made by so many processes.

    Errors: `UserError` for a stage that cannot use them.
    """
    if several != 1 and stage not in STAGES:
        raise UserError(
            f"processes = {several} is not allowed for {stage}: only {' and '.join(STAGES)} train in several."
        )
    os.environ[COUNT] = str(several)


def wanted(stage: str) -> int:
    """How many processes a run of this stage was asked to have.

    Errors: `UserError` where LOWBIT_PROCESSES is no number of processes.
    """
    given = os.environ.get(COUNT) or "1"
    if not (given.isdecimal() and 1 <= int(given) <= MOST):
        raise UserError(f"processes = {given} is not allowed: it must be a number from 1 to {MOST}.")
    return int(given) if stage in STAGES else 1


def environment(stage: str) -> dict[str, str]:
    """What the kernel of a run of this stage is told.

    Errors: `UserError` where LOWBIT_PROCESSES is no number of processes, or there are fewer GPUs.
    """
    several = wanted(stage)
    told = {COUNT: str(several), RANK: "0"}
    if several > 1 and (found := gpus()):
        if len(found) < several:
            raise UserError(f"{several} processes need a GPU each, and {len(found)} of them are visible here.")
        told |= {GPUS: ",".join(found), "CUDA_VISIBLE_DEVICES": found[0]}
    return told


def gpus() -> list[str]:
    """The GPUs that are visible, as CUDA_VISIBLE_DEVICES names them; none without a driver."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in given.split(",") if each.strip() not in NO_GPU]
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, _ in enumerate(line for line in told.splitlines() if line.startswith("GPU "))]


def start(staging: Path) -> None:
    """Start the followers of this kernel; does nothing where it has none, and in a follower."""
    if rank():
        return
    visible = os.environ.get(GPUS, "").split(",")
    for number in range(1, count()):
        env = {**os.environ, RANK: str(number), "JPY_PARENT_PID": str(os.getpid())}
        if len(visible) > number:
            env["CUDA_VISIBLE_DEVICES"] = visible[number]
        command = [sys.executable, "-P", "-m", "helpers.processes", str(staging)]
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, env=env, **nowhere)
        threading.Thread(target=watch, args=(process, number, staging), daemon=True).start()


def watch(process: subprocess.Popen, number: int, staging: Path) -> None:
    """Wait for a follower; if it fails, end this kernel, which could else wait for it for ever."""
    code = process.wait()
    if code:
        tell(staging, number, "its process was killed, most likely for want of memory")
        os._exit(1)


def tell(staging: Path, number: int, what: str) -> None:
    """Say what ended process `number`, unless another failed before it."""
    try:
        with (staging / FAILURE).open("x") as file:
            file.write(json.dumps({"process": number, "what": what}))
    except OSError:  # it is there, or its folder is gone
        return


def failure(staging: Path) -> str | None:
    """The sentence about the follower that failed first, if that is what ended the run."""
    try:
        told = json.loads((staging / FAILURE).read_text())
    except (OSError, ValueError):
        return None
    return f"process {told['process']} of the run failed: {told['what'].rstrip('.')}." if told["process"] else None


def sentence(error: BaseException) -> str:
    """A `UserError` says it itself."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def follow(staging: Path, namespace: dict[str, Any]) -> None:
    """Go through the cells of the run in `staging`, as its kernel does."""
    context = json.loads((staging / CONTEXT).read_text())
    cells = [params.source(cell) for cell in params.code_cells(project.template(context["stage"]))]
    namespace["In"] = cells[:1]
    exec(compile(cells[0], "parameters", "exec"), namespace)
    namespace |= context["parameters"]
    for number, cell in enumerate(cells[1:], start=2):
        exec(compile(cell, f"cell {number}", "exec"), namespace)


if __name__ == "__main__":
    kernel.die_with_parent(parent=int(os.environ["JPY_PARENT_PID"]))
    folder = Path(sys.argv[1])
    try:
        follow(folder, {"__name__": "__main__"})
    except Exception as error:
        tell(folder, rank(), sentence(error))
        raise
