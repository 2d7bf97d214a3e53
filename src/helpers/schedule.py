"""Run a planned study with Snakemake.

Each job is `lowbit job plan.json NAME`: its parameters travel in the file, never through a shell line. Snakemake sees
one small marker file a job, in a folder of this invocation under `runs/<study>/.work/`; markers of finished runs are
there before it starts. So it runs what is missing, stops only the descendants of a failed job, and can neither delete a
run nor be confused by what a killed predecessor left. Whether a run is there is decided by its `result.json` alone.

Where more than a few runs are missing, their kernels are forked from one process that has imported the packages: `warm`.

A profile is a folder with Snakemake's own settings, under `notebooks/workflow/profiles/` or the user's. `local` runs jobs here.
With any other, Snakemake hands them to a cluster whose nodes see this checkout, its Python and `runs/` at the same paths;
each asks for the time and memory that its estimate says.
"""

import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from helpers import estimate, kernel, processes, project, runs, warm
from helpers.errors import UserError
from helpers.execute import execute, settings
from helpers.records import FailedRun, Interrupted, disk_errors, ensure_space, write_json
from helpers.smoke import distinct, prepare
from helpers.staging import SOCKETS, remove_linked
from helpers.study import Job, Study, StudyError, load, plan

FAILED, LOCAL = "failed", "local"
CONTEXT_GIB = 0.7  # of a GPU's memory, that a process has before its first number
HOST_GIB = 8  # of a node's memory, beside what the estimate says of the GPU's: it loads and saves the same model
SLACK_MIN = 30  # minutes; an estimate is good for an order of magnitude, so three times its hours are asked for as well
UNKNOWN = 4.0, 64.0  # hours and GiB of a GPU, for a run that cannot be estimated
NO_GPU = ("pareto",)  # stages
FEW = 3  # missing runs that are not worth a server of kernels


def run_study(
    name: str, jobs: int = 2, dry_run: bool = False, smoke: bool = False, gpu_gib: float = 0, only: Sequence[str] = (),
    profile: str = LOCAL,
) -> bool:  # fmt: skip
    """Run what is missing of a study, or of its smoke variant; prints a summary, and says whether all of it is there.

    With `only`, patterns of names such as `*-s-seed0`, that of these runs and of those that they are made from. Says first which
    runs are estimated not to fit a GPU of `gpu_gib` (0: the one that is here, if any). A dry run prints all runs with their GPU
    hours and memory, and takes an H200 where there is no GPU. `profile` is the name of one or a folder.

    Errors: `StudyError` for a study or profile that is unknown or wrong, `FailedRun` where it was interrupted.
    """
    chosen = _profile(profile)
    if dry_run:  # a smoke variant's models and data are gone again afterwards
        with tempfile.TemporaryDirectory() as spare:
            study, planned, _ = _planned(name, Path(spare) if smoke else None)
            _tell(study, _wanted(study, planned, only), gpu_gib)
        return True
    study, planned, env = _planned(name, project.runs_dir() / ".smoke" if smoke else None)
    wanted = _wanted(study, planned, only)
    missing = _missing(wanted)
    gib = gpu_gib or estimate.gpu_gib()
    if missing and gib:  # they are tried all the same: an estimate is not a limit
        print("".join(_too_large(missing, estimate.of_study(planned, gib), gib)), end="", flush=True)
    folder = project.runs_dir() / study.name
    ensure_space(folder)
    with disk_errors(folder), _only_one(study):
        ahead = _ahead(planned, gib or estimate.GPU_GIB)
        jobs_data = [
            {**asdict(job), "path": str(job.path), "page": study.has_page(job.name), **ahead[job.name]}
            for job in planned
        ]
        write_json(folder / "plan.json", {"study": study.name, "title": study.title, "jobs": jobs_data})
        began = time.perf_counter()
        status = folder / "logs"
        for job in wanted:
            (status / f"{job.name}.json").unlink(missing_ok=True)
        log = _snakemake(study, planned, missing, jobs, env, gib, chosen) if missing else None
        return _summary(study, wanted, missing, status, time.perf_counter() - began, log)


def _planned(name: str, smoke: Path | None) -> tuple[Study, list[Job], dict[str, str]]:
    """A study, its jobs, and the environment of its runs; its smoke variant where that has a folder."""
    study, env = load(name), {}
    if smoke:
        study, data = prepare(study, smoke)
        env = {"LOWBIT_DATA": str(data)}
    return study, distinct(plan(study)) if smoke else plan(study), env


def _missing(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if runs.done(job.run_id) is None]


def _wanted(study: Study, planned: list[Job], only: Sequence[str]) -> list[Job]:
    """The jobs whose names match one of `only`, and those that they are made from; all of them without `only`."""
    names = {job.name: job for job in planned}
    wanted: set[str] = set()
    for pattern in only:
        if not (waiting := fnmatch.filter(names, pattern)):
            raise StudyError(f"Study {study.name} has no run called {pattern}.")
        while waiting:
            if (name := waiting.pop()) not in wanted:
                wanted.add(name)
                waiting += names[name].parents
    return [job for job in planned if job.name in wanted or not only]


def _tell(study: Study, planned: list[Job], gib: float) -> None:
    """Print the plan: each run with its estimate (`!`: more than a GPU has), totals by stage, and what to do about the `!`."""
    gib, missing = gib or estimate.gpu_gib() or estimate.GPU_GIB, _missing(planned)
    left = {job.name for job in missing}
    needs = estimate.of_study(planned, gib)
    wide = max(len(job.name) for job in planned)
    for job in planned:
        own = needs[job.name]
        takes = (
            f"{own.hours:9,.2f} h {own.gib:6.1f} GiB{'!' if own.gib > gib else ' '}" if own else f"{'-':>11} {'-':>10} "
        )
        print(f"{'would run' if job.name in left else 'done':<10} {job.name:<{wide}} {takes} {job.run_id}")
    print(f"{study.name}: {len(missing)} of {len(planned)} runs to do.")
    for stage in (*dict.fromkeys(job.stage for job in missing), "all"):
        known = [own for job in missing if stage in (job.stage, "all") and (own := needs[job.name])]
        if known:
            hours, most = sum(own.hours for own in known), max(own.gib for own in known)
            print(f"  {stage:<8} {len(known):4} runs {hours:9,.1f} GPU hours, at most {most:.1f} GiB")
    print("".join(_too_large(missing, needs, gib)), end="")


def _too_large(missing: list[Job], needs: dict[str, estimate.Estimate | None], gib: float) -> Iterator[str]:
    """A line for each run that needs more memory than a GPU of `gib` has."""
    for job in missing:
        if (own := needs[job.name]) and own.gib > gib:
            advice = estimate.what_fits(job.stage, job.parameters, own, gib)
            yield f"  {job.name} needs {own.gib:.0f} GiB, and a GPU has {gib:.0f}: {advice}.\n"


def _ahead(planned: list[Job], gib: float) -> dict[str, dict[str, int]]:
    """For each job, what Snakemake chooses by: `chain_s`, the seconds of the longest chain that begins with it, since the last
    runs of a study wait for the longest one; and `gpu_mib`, the memory it takes. For a cluster: `gpus`, the node's memory
    `mem_mb` and the minutes `runtime` that it asks for. All by estimate, for a GPU of `gib`.
    """
    needs = estimate.of_study(planned, gib)
    children: dict[str, list[str]] = {job.name: [] for job in planned}
    for job in planned:
        for parent in set(job.parents):
            children[parent].append(job.name)

    @cache
    def chain(name: str) -> float:
        own = needs[name].hours * 3600 if needs[name] else estimate.START
        return own + max(map(chain, children[name]), default=0)

    def asked(job: Job) -> dict[str, int]:
        own, gpus = needs[job.name], 0 if job.stage in NO_GPU else processes.wanted(job.stage)
        hours, held = (own.hours, own.gib) if own else UNKNOWN if gpus else (0, 0)
        return {
            "chain_s": round(chain(job.name)),
            "gpu_mib": round(1024 * ((own.gib if own else 0) + CONTEXT_GIB)),
            "gpus": gpus,
            "mem_mb": round(1024 * (held + HOST_GIB) * max(1, gpus)),
            "runtime": round(60 * 3 * hours + SLACK_MIN),
        }

    return {job.name: asked(job) for job in planned}


def _profile(given: str) -> Path:
    """The folder of a profile, by its name or path."""
    folder = project.root() / "notebooks" / "workflow" / "profiles"
    known = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    found = folder / given if given in known else Path(given).expanduser()
    if not (found / "config.yaml").is_file():
        raise StudyError(
            f"The profile {given} is unknown: choose one of {', '.join(known)}, or a folder with a config.yaml."
        )
    if not isinstance(_settings_of(found), dict):
        raise StudyError(
            f"The profile {given} has a config.yaml that holds no settings: write them as `executor: slurm`."
        )
    return found.resolve()


def _settings_of(profile: Path) -> Any:
    """Snakemake's settings in a profile; None where they are no YAML."""
    try:
        return yaml.safe_load((profile / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def run_job(plan_file: Path, name: str) -> None:
    """One job of a plan, for Snakemake: a line when it starts and when it ends; the notebook's output goes to a log."""
    try:
        content = json.loads(plan_file.read_text())
        job = next(job for job in content["jobs"] if job["name"] == name)
    except (OSError, ValueError, KeyError, StopIteration):
        raise StudyError(f"{plan_file} is no plan that has a run {name}.") from None
    logs = plan_file.resolve().parent / "logs"
    logs.mkdir(exist_ok=True)
    began, reason, state = time.perf_counter(), "", FAILED
    write_json(logs / f"{name}.json", {"state": "started", "seconds": 0, "reason": "it was killed."})
    print(f"{name}: started", flush=True)
    try:
        with (logs / f"{name}.log").open("w", encoding="utf-8", buffering=1) as out:
            outcome = execute(job["stage"], job["parameters"], content["study"], name, out, expect=job["run_id"])
        state = outcome.state
    except UserError as error:
        reason = str(error)
        state = "interrupted" if isinstance(error, Interrupted) else FAILED
        raise
    finally:
        seconds = time.perf_counter() - began
        write_json(logs / f"{name}.json", {"state": state, "seconds": round(seconds, 1), "reason": reason})
        print(f"{name}: {state} after {seconds:.1f} s", flush=True)


@contextmanager
def _only_one(study: Study) -> Iterator[None]:
    """Refuse to run a study twice at a time in one folder."""
    path = project.runs_dir() / ".locks" / f"study.{study.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise StudyError(f"The study {study.name} is being run by another process: wait for it, or stop it.") from None


def _snakemake(
    study: Study,
    planned: list[Job],
    missing: list[Job],
    jobs: int,
    more: dict[str, str],
    gib: float | None,
    profile: Path,
) -> Path:
    """Run the missing jobs with `more` in their environment, so many side by side, and on this machine only as far as they fit a
    GPU of `gib` together.

    Gives Snakemake's own log. The caller holds the study's lock.
    """
    folder, left = project.runs_dir() / study.name, {job.name for job in missing}
    said = _settings_of(profile)
    here = said.get("executor", LOCAL) == LOCAL
    work = folder / ".work"
    _clear(work)
    (work / "done").mkdir(parents=True)
    for job in planned:
        if job.name not in left:
            (work / "done" / job.name).touch()
    snakefile = shutil.copy(project.root() / "notebooks" / "workflow" / "Snakefile", work)  # as it is now, to the end
    command = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(snakefile)),
        *("--workflow-profile", str(profile), "--directory", str(work), "--cores" if here else "--jobs", str(jobs)),
        *(("--resources", f"gpu_mib={int(1024 * gib)}") if gib and here else ()),
        *(("--default-storage-prefix", str(work)) if "default-storage-provider" in said else ()),  # for markers
    ]
    log = folder / "logs" / "snakemake.log"
    log.parent.mkdir(exist_ok=True)
    env = {**os.environ, **more, "LOWBIT_HOME": str(project.root()), "LOWBIT_RUNS": str(project.runs_dir())}
    env |= {
        "LOWBIT_PLAN": str(folder / "plan.json"),
        "LOWBIT_PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(work / "cache"),
    }
    env |= {name: env.get(name, "") for name in ("LOWBIT_DATA", processes.COUNT)}  # which the Snakefile hands on
    env |= {"TMPDIR": str(work)} if here else {}  # a node has a disk of its own
    env |= {"LOWBIT_GPU_MIB": str(int(1024 * gib))} if gib and here else {}
    warmed = here and len(missing) > FEW
    with (
        log.open("w") as out,
        warm.server(env | settings(), out, work / SOCKETS) if warmed else nullcontext(env) as env,
    ):
        process = subprocess.Popen(  # a session of its own, so that Ctrl-C reaches the jobs once, through us
            command, stderr=out, stdin=subprocess.DEVNULL, cwd=project.root(), env=env, start_new_session=True,
            preexec_fn=kernel.die_with_parent,
        )  # fmt: skip
        try:
            process.wait()
        except KeyboardInterrupt:
            _stop(process)
            raise FailedRun(
                f"The study {study.name} was interrupted; start it again to go on from the finished runs."
            ) from None
        finally:
            if process.poll() is None:
                _stop(process)
            _clear(work)
    return log


def _clear(work: Path) -> None:
    """Remove a study's working folder, and what its server of kernels left elsewhere when it was killed."""
    remove_linked(work / SOCKETS)
    shutil.rmtree(work, ignore_errors=True)


def _stop(process: subprocess.Popen, patience_s: float = 15) -> None:
    """Interrupt Snakemake and its jobs, and kill what does not end."""
    for number, wait in ((signal.SIGINT, patience_s), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _summary(
    study: Study, planned: list[Job], missing: list[Job], status: Path, seconds: float, log: Path | None
) -> bool:
    """Print what ran, was skipped, failed, or waits for a failed run."""
    ran, failed, blocked, left = [], {}, {}, {job.name for job in missing}
    for job in planned:
        if runs.done(job.run_id):
            ran += [job.name] if job.name in left else []
        elif (file := status / f"{job.name}.json").is_file():
            failed[job.name] = json.loads(file.read_text())["reason"]
        else:
            blocked[job.name] = job
    by_name = {job.name: job for job in planned}

    def cause(name: str) -> str | None:
        if name in failed:
            return name
        return next(filter(None, map(cause, by_name[name].parents)), None) if name in blocked else None

    counts = f"{len(ran)} ran, {len(planned) - len(missing)} were done, {len(failed)} failed, {len(blocked)} not run"
    print(f"{study.name}: {counts}; {seconds:.0f} s.")
    for name, reason in failed.items():
        print(f"  {name} failed: {reason}")
    for name in blocked:
        print(f"  {name} was not run" + (f", because {cause(name)} failed." if cause(name) else f": see {log}."))
    return not failed and not blocked
