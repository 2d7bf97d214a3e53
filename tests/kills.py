"""Kill a study again and again, let it finish, and compare: `python tests/kills.py --kills 60` writes book/results/faults.csv.

A small study of all stages that compute is run once undisturbed. Then it is run in rounds: it is started, one of its processes is
chosen by chance and killed at a random moment, it is started again if that ended it, and so on until all its runs are there.
Each round ends with a comparison: every row of the results table, but for times, and the bytes of all weights must be those of
the undisturbed study; no process may outlive the one that it belongs to, and nothing may lie around. Then the runs are
deleted and the next round begins. Some ten minutes for 60 kills on two cores.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from helpers import project, records
from helpers.report import table

STUDY = """
name: kills
pages: []
runs:
  - {name: base, stage: base, params: {size: xs, steps: 20, batch_size: 64}}
  - {name: grpo, stage: grpo, parent: base, params: {steps: 3, prompts_per_step: 4, group_size: 2, max_new_tokens: 12}}
  - {name: gptq, stage: ptq, parent: grpo, params: {bits: 3, texts: 20, max_new_tokens: 12}}
  - name: kd
    stage: qat
    parent: gptq
    params: {init: parent, bits: 3, texts: 40, batch_size: 4, steps: 40, max_new_tokens: 12, watched: 5, save_every: 10}
  - {name: "eval-{parent}", stage: eval, parent: [base, grpo, gptq, kd], params: {n: 50, k: 2, max_new_tokens: 12}}
  - {name: diagnose, stage: diagnose, parent: gptq, params: {n: 20, layer_texts: 5, max_new_tokens: 12}}
  - {name: pareto, stage: pareto, parents: ["eval-*"]}
"""
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
TARGETS = ["runner", "Snakemake", "job", "kernel"]
EACH = 7  # kills of a round at most: there are ten runs, and a round is over when all are there
PATIENCE = 20  # seconds in which the processes of one that has ended must end too


@dataclass
class Process:
    pid: int
    parent: int
    command: list[str]

    @property
    def role(self) -> str:
        words = " ".join(self.command[:5])
        return next((role for role, word in ROLES.items() if word in words), "other")


ROLES = {"kernel": "helpers.kernel", "server": "helpers.warm", "job": "helpers.cli job", "Snakemake": "-m snakemake"}


def processes_of(runner: int) -> list[Process]:
    """The runner and all its descendants that live."""
    children: dict[int, list[Process]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, rest = stat.read_text().rsplit(") ", 1)
            state, parent = rest.split()[:2]
            command = (stat.parent / "cmdline").read_text().split("\0")
            if state != "Z":
                children[int(parent)].append(Process(int(head.split()[0]), int(parent), command))
    found = [Process(runner, 0, ["runner"])]
    for process in found:
        found += children[process.pid]
    return found


def of_role(found: list[Process], role: str) -> list[Process]:
    """Processes to kill: a kernel is one that works in its own right, or a server's fork, or the stand-in of such a fork."""
    if role == "runner":
        return found[:1]
    servers = {process.pid for process in found if process.role == "server"}
    forks = [process for process in found if process.parent in servers]
    return [process for process in found if process.role == role] + (forks if role == "kernel" else [])


def names_of(found: list[Process]) -> list[str]:
    """The names of the runs that are at work."""
    return [process.command[6] for process in found if process.role == "job" and len(process.command) > 6]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@dataclass
class Trial:
    """A study in a folder of its own; `file` is its YAML file."""

    file: Path
    folder: Path
    rng: random.Random
    longest: float = 4.0  # seconds between a process of the chosen kind being there and its end
    kills: list[dict] = field(default_factory=list)
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        self.runs, self.temporary, self.name = self.folder / "runs", self.folder / "tmp", self.file.stem
        self.temporary.mkdir(parents=True)

    def start(self) -> None:
        env = {**os.environ, "LOWBIT_RUNS": str(self.runs), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "helpers.cli", "study", str(self.file)]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def finish(self) -> None:
        """Start it as often as it takes, which is once: what was killed is made again, and nothing else."""
        for _ in range(2):
            self.start()
            if self.process.wait(600) == 0:
                return
        raise AssertionError(f"the study did not finish:\n{(self.folder / 'log').read_text()[-3000:]}")

    def kill_one(self) -> bool:
        """Kill something at a random moment; False where the study was over before."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        target, number, delay = self.rng.choice(TARGETS), self.rng.choice(SIGNALS), self.rng.uniform(0, self.longest)
        place = self.rng.randrange(3)  # among the runs that are not there yet, so that all stages have their turn
        if not self._wait(lambda: self._at_work(place) and of_role(processes_of(self.process.pid), target)):
            return self.process.wait() != 0
        self._wait(lambda: None, delay)
        found = processes_of(self.process.pid)
        victims = of_role(found, target)
        if not victims or self.process.poll() is not None:
            return True
        victim = self.rng.choice(victims)
        running = [self._jobs()[name]["stage"] for name in names_of(found)]
        below = (
            [process.pid for process in processes_of(victim.pid)] if target in ("runner", "Snakemake", "job") else []
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, number)
        dies = number == signal.SIGKILL or target != "kernel"  # a kernel may take it for the interruption of a cell
        left = self._survivors(victim.pid, below) if dies else 0
        self.kills.append(
            {
                "target": target,
                "signal": number.name,
                "stages": " ".join(sorted(running)),
                "left": left,
            }
        )
        return True

    def _survivors(self, victim: int, below: list[int]) -> int:
        """How many processes are still there some time after the one that they belong to, which may take its own to end."""
        gone, end = None, time.monotonic() + 10 * PATIENCE
        while time.monotonic() < end and (gone is None or time.monotonic() < gone + PATIENCE):
            self.process.poll()
            gone = gone or (None if alive(victim) else time.monotonic())
            if gone and not any(map(alive, below)):
                return 0
            time.sleep(0.05)
        return sum(map(alive, [victim, *below]))

    def _wait(self, ready: Callable[[], Any], seconds: float = 120) -> Any:
        """What `ready` gives once that is something; None where the study or the time ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if found := ready():
                return found
            time.sleep(0.05)
        return None

    def _jobs(self) -> dict[str, dict[str, Any]]:
        plan = self.runs / self.name / "plan.json"
        return {job["name"]: job for job in json.loads(plan.read_text())["jobs"]} if plan.is_file() else {}

    def _at_work(self, place: int) -> bool:
        """Whether a run is at work that is this one, or a later one, among those that are not there yet."""
        jobs = self._jobs().items()
        left = [name for name, job in jobs if not [*self.runs.glob(f"[!.]*/*/{job['run_id']}/result.json")]]
        later = left[max(0, min(place, len(left) - 1)) :]
        return bool(set(later) & set(names_of(processes_of(self.process.pid))))

    def made(self) -> tuple[list[str], dict[str, str]]:
        """(lines of the results table without times, run and file -> hash of the weights) of the finished study."""
        found = []
        for job in self._jobs().values():
            (path,) = self.runs.glob(f"[!.]*/*/{job['run_id']}")
            assert records.is_complete(path), path
            found.append(records.read(path).model_copy(update={"name": job["name"]}))
        weights = {
            f"{result.name}/{file}": digest
            for result in found
            for file, digest in result.files.items()
            if file.endswith(".safetensors")
        }
        return table.rows(found).drop(columns="wall_s").to_csv(index=False).splitlines()[1:], weights

    def litter(self) -> list[str]:
        """What lies around in a study that is over."""
        hidden = [path for name in (".staging", ".unfinished") for path in (self.runs / name).glob("*")]
        return [str(path.relative_to(self.folder)) for path in (*hidden, *self.temporary.iterdir())]

    def clear(self) -> None:
        shutil.rmtree(self.runs)


def trial(file: Path, kills: int, seed: int = 0, longest: float = 4.0) -> pd.DataFrame:
    """One row a kill, in the order in which they happened: round, what was killed, how, the stages that were at work, how many
    processes outlived theirs, and, for the round as a whole, rows compared, rows and weights that differ, and things left behind.
    """
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        calm = Trial(file, Path(folder) / "calm", random.Random(seed))
        calm.finish()
        rows, weights = calm.made()
        wild = Trial(file, Path(folder) / "wild", calm.rng, longest)
        found: list[dict] = []
        for number in range(1, kills + 1):
            before = len(wild.kills)
            while len(wild.kills) - before < min(EACH, kills - len(found)) and wild.kill_one():
                pass
            if wild.process.poll() is None:
                wild.process.wait()
            assert len(wild.kills) > before, "nothing could be killed"
            wild.finish()
            made, others = wild.made()
            differ = sum(one != other for one, other in zip_longest(rows, made))
            differ += sum(weights[name] != others.get(name) for name in weights)
            litter = wild.litter()
            print(
                f"round {number}: {len(wild.kills) - before} kills, {differ} differences, left: {litter}",
                file=sys.stderr,
            )
            about = {"rows": len(rows) + len(weights), "differences": differ, "litter": len(litter)}
            found += [{"round": number, **kill, **about} for kill in wild.kills[before:]]
            if len(found) >= kills:
                break
            wild.clear()
        return pd.DataFrame(found)


def main(kills: int = 60, seed: int = 0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kills.yml"
        file.write_text(STUDY)
        found = trial(file, kills, seed)
    found.to_csv(project.root() / "book" / "results" / "faults.csv", index=False, lineterminator="\n")
    print(found.groupby(["target", "signal"]).size().to_string())


if __name__ == "__main__":
    typer.run(main)
