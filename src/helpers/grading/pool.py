"""Worker processes that grade, and that can be killed.

A pool starts `helpers.grading.worker` as ordinary programs, so it works from any thread, in a notebook, and beside
CUDA, and hands each worker one job at a time. A worker that dies over a job or does not answer in time costs that job
alone: its outcome is `timeout` and the rule says why (time, memory, crash). Workers are replaced after `RECYCLE`
jobs, so nothing that a library keeps can grow. Results come back in the order of the jobs and depend on nothing but
the job: processor time is limited rather than the clock, and hashing is not random.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGXCPU
from typing import TYPE_CHECKING

from helpers.errors import UserError

if TYPE_CHECKING:  # a run's id changes with the worker's code, which this module starts by name
    from helpers.grading import worker  # noqa: F401

SECONDS = 5  # of processor time a job
PATIENCE = 12  # times as long by the clock, for a worker that waits instead of computing
MEGABYTES = 400  # of address space a worker
RECYCLE = 2_000  # jobs a worker
WORKER = ["-m", "helpers.grading.worker"]
MEMORY = 77  # the exit status of a worker that was refused memory


class GradingError(UserError):
    """Grading cannot work at all, whatever the answers."""


Job = tuple[str, str, str]
Verdict = tuple[str, str, str | None, str]


class Pool:
    """`map` grades jobs; `close` ends the workers, and so does the end of this process, however it ends."""

    def __init__(self, workers: int | None = None, seconds: int = SECONDS, megabytes: int = MEGABYTES) -> None:
        self.size = workers or min(8, os.cpu_count() or 1)
        self.seconds, self.megabytes = seconds, megabytes
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()

    def map(self, jobs: Sequence[Job]) -> list[Verdict]:
        """The verdict of each job, in order; one caller at a time."""
        with self.lock:
            return self._map(list(jobs))

    def _map(self, jobs: list[Job]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(jobs)
        waiting = list(range(len(jobs)))[::-1]
        busy: dict[int, tuple[_Worker, int]] = {}  # file descriptor -> worker and its job
        free = [self._ready(i) for i in range(min(self.size, len(jobs)))]
        try:
            while waiting or busy:
                while free and waiting:
                    one, job = free.pop(), waiting.pop()
                    one = one if one.fit() else self._replace(one)
                    one.send(jobs[job])
                    busy[one.out] = one, job
                for out in self._heard(busy):
                    one, job = busy.pop(out)
                    verdicts[job] = one.receive()
                    if verdicts[job] is None:  # more is to come
                        busy[out] = one, job
                    else:
                        free.append(one)
        except BaseException:  # interrupted: what is still being computed must not answer the next caller
            self._close()
            raise
        return verdicts

    def _heard(self, busy: dict[int, "tuple[_Worker, int]"]) -> list[int]:
        """Workers that have something to say, or have had their time."""
        soonest = min(one.deadline for one, _ in busy.values())
        ready = select.select(list(busy), [], [], max(0.0, soonest - time.monotonic()))[0]
        return ready or [out for out, (one, _) in busy.items() if one.deadline <= time.monotonic()]

    def _ready(self, index: int) -> "_Worker":
        if self.workers and self.workers[0].owner != os.getpid():  # this process was forked from the pool's
            self.workers = []
        while len(self.workers) <= index:
            self.workers.append(_Worker(self.seconds, self.megabytes))
        return self.workers[index]

    def _replace(self, old: "_Worker") -> "_Worker":
        old.end()
        new = _Worker(self.seconds, self.megabytes)
        self.workers[self.workers.index(old)] = new
        return new

    def close(self) -> None:
        with self.lock:
            self._close()

    def _close(self) -> None:
        for one in self.workers:
            one.end()
        self.workers = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process and the job that it has."""

    def __init__(self, seconds: int, megabytes: int) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", *WORKER, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        self.owner, self.patience, self.jobs = os.getpid(), seconds * PATIENCE, 0
        self.ready = False
        self.out, self.heard, self.deadline = self.process.stdout.fileno(), b"", 0.0

    def fit(self) -> bool:
        return self.process.poll() is None and self.jobs < RECYCLE

    def send(self, job: Job) -> None:
        self.jobs += 1
        self.heard, self.deadline = b"", time.monotonic() + self.patience
        line = memoryview(json.dumps(job).encode() + b"\n")
        with suppress(BrokenPipeError):  # its end is heard when its answer is read
            while line:
                line = line[self.process.stdin.write(line) :]

    def receive(self) -> Verdict | None:
        """The verdict, None while its lines are not complete, or why there is none."""
        if not select.select([self.out], [], [], 0)[0]:
            return self._lost("time")
        block = os.read(self.out, 2**16)
        if not block:
            code = self.process.wait()
            return self._lost({-SIGXCPU: "time", MEMORY: "memory"}.get(code, "crash"))
        self.heard += block
        if not self.ready and b"\n" in self.heard:  # its first line says that it has started
            self.ready, self.heard = True, self.heard.partition(b"\n")[2]
        lines = self.heard.split(b"\n")
        return (*json.loads(lines[1]), *json.loads(lines[0])) if len(lines) > 2 else None

    def _lost(self, why: str) -> Verdict:
        self.end()
        if not self.ready:
            raise GradingError("The grading worker cannot start: `python -m helpers.grading.worker 5 400` shows why.")
        first, ended, _ = self.heard.partition(b"\n")
        return "timeout", why, *(json.loads(first) if ended else (None, ""))

    def end(self) -> None:
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


_shared: Pool | None = None
_guard = threading.Lock()


def shared() -> Pool:
    """The pool of this process, started at the first call."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = Pool()
            atexit.register(_shared.close)
        return _shared
