"""Many runs: `python tests/load.py --runs 2000 --rows 100000` plans and runs a study of tiny notebooks, loads a long results
table, and writes book/results/load.csv. 2,000 runs took two busy cores forty minutes.

The notebooks do next to nothing (`machinery`), so what is measured is ours: planning, Snakemake, a process and a kernel a run.
Memory is the resident set of the processes that live as long as the study does, read every few seconds from /proc.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
import typer

import machinery
from helpers import project, schedule, study
from helpers.report import table

STUDY = """
name: load
seeds: {seeds}
pages: []
runs:
  - {{name: base, stage: base}}
  - {{name: eval, stage: eval, parent: base}}
"""
LIVING = {
    "study": "helpers",
    "Snakemake": "snakemake",
    "server of kernels": "helpers.warm",
}  # name -> a word of its command


def make(home: Path, runs: int) -> None:
    """A project with a study of `runs` runs, half of them the parents of the other half."""
    (home / "notebooks" / "studies").mkdir(parents=True)
    for name, cells in {"01_base": machinery.BASE, "05_eval": machinery.EVAL}.items():
        machinery.write_notebook(home / "notebooks" / f"{name}.ipynb", cells)
    shutil.copytree(project.PACKAGE.parents[1] / "notebooks" / "workflow", home / "notebooks" / "workflow")
    text = STUDY.format(seeds=list(range(runs // 2)))
    (home / "notebooks" / "studies" / "load.yml").write_text(text)
    os.environ |= {"LOWBIT_HOME": str(home), "LOWBIT_RUNS": str(home / "runs")}


def seconds(work) -> float:
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return time.perf_counter() - began


def living() -> dict[str, int]:
    """Bytes of this process and of its long-lived descendants, by the names in LIVING."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = stat.read_text().split(" (", 1)
            children.setdefault(int(rest.rsplit(") ", 1)[1].split()[1]), []).append(int(pid))
    found, waiting = {"study": _bytes(os.getpid())}, children.get(os.getpid(), [])
    for pid in waiting:  # direct children alone: a run's own processes come and go
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            name = next((name for name, word in list(LIVING.items())[1:] if word in command), None)
            if name:
                found[name] = _bytes(pid)
    return found


def _bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch(threading.Thread):
    """Reads `living` every `every` seconds until it is told to stop; `seen` has a row a reading."""

    def __init__(self, every: float) -> None:
        super().__init__(daemon=True)
        self.every, self.seen, self.over = every, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.every):
            self.seen.append(living())


def trial(runs: int, rows: int) -> pd.DataFrame:
    """One row a measurement: what, of how many, the value, its unit, and the limit that it must not pass."""
    found = []

    def note(what: str, n: int, value: float, unit: str, limit: float | None = None) -> None:
        found.append({"what": what, "n": n, "value": round(value, 3), "unit": unit, "limit": limit})
        print(f"{what}, {n:,}: {value:.3g} {unit}", file=sys.stderr)

    published = pd.read_csv(project.root() / "book" / "results" / "results.csv")
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "results.csv"
        pd.concat([published] * (rows // len(published) + 1)).iloc[:rows].to_csv(long, index=False)
        note("results table loaded", rows, seconds(lambda: pd.read_csv(long)), "s", 2)
        make(Path(folder) / "home", runs)
        note("study planned", runs, seconds(lambda: study.plan("load")), "s", 30)
        note("dry run", runs, seconds(lambda: schedule.run_study("load", dry_run=True)), "s", 30)
        watch = Watch(every=5)
        watch.start()
        took = seconds(lambda: schedule.run_study("load", jobs=2))
        watch.over.set()
        note("study run", runs, took, "s")
        note("a run, of two side by side", runs, took / runs, "s")
        readings = pd.DataFrame(watch.seen)
        for name in LIVING:
            told = readings[name].dropna() / 2**20
            tenth = max(1, len(told) // 10)
            note(f"memory of {name}, first tenth", runs, told.iloc[:tenth].median(), "MiB")
            note(f"memory of {name}, last tenth", runs, told.iloc[-tenth:].median(), "MiB")
        note("study run again, all done", runs, seconds(lambda: schedule.run_study("load")), "s", 30)
        note("table of its runs written", runs, seconds(table.write), "s")
    return pd.DataFrame(found)


def main(runs: int = 2000, rows: int = 100_000) -> None:
    target = project.root() / "book" / "results" / "load.csv"  # the trial has a project of its own
    trial(runs, rows).to_csv(target, index=False, lineterminator="\n", float_format="%.3g")


if __name__ == "__main__":
    typer.run(main)
