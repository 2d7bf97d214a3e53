"""Studies on a cluster: what a job asks for, the Slurm profile on a real Slurm of one node, the Kubernetes profile by a dry run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import slurm
from helpers import estimate, project, runs, schedule, study
from helpers.study import StudyError
from machinery import gone, kernel_at_work, published, wait_for

PROFILES = project.PACKAGE.parents[1] / "notebooks" / "workflow" / "profiles"
STUDY = """
name: far
pages: []
runs:
  - {name: "base-{size}", stage: base, matrix: {size: [xs]}, params: {size: "{size}"}}
  - {name: broken, stage: base, params: {fault: error}}
  - {name: "eval-{parent}", stage: eval, parent: ["base-*", broken]}
  - {name: pareto, stage: pareto, parents: ["eval-base-*"]}
"""


@pytest.fixture
def far(home):
    (home / "notebooks" / "studies" / "far.yml").write_text(STUDY)
    return home


def profile(folder: Path, name: str, **changes) -> Path:
    """A copy of a profile with other settings, as a user would make one."""
    folder.mkdir(exist_ok=True)
    content = yaml.safe_load((PROFILES / name / "config.yaml").read_text()) | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module")
def there():
    """The environment of a Slurm."""
    if why := slurm.missing() or (
        "" if find_spec("snakemake_executor_plugin_slurm") else "not installed: `make cluster`"
    ):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm.cluster(Path(folder)) as env:
        yield env


def start(there, far, *more: str) -> subprocess.Popen:
    """The study through the Slurm profile, but for what a Slurm without accounting and a short test need."""
    mine = profile(
        far.parent / "mine",
        "slurm",
        **{
            "default-resources": {"slurm_partition": "test", "slurm_account": "none", "cpus_per_task": 1},
            "slurm-status-command": "squeue",
            "slurm-init-seconds-before-status-checks": 2,
            "seconds-between-status-checks": 2,
            "latency-wait": 5,
        },
    )
    env = {**os.environ, "SLURM_CONF": there["SLURM_CONF"]}
    command = [sys.executable, "-m", "helpers.cli", "study", "far", "--jobs", "3", "--profile", str(mine), *more]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=far)


def told(there, *command: str) -> str:
    return subprocess.run(command, env=there, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.slow
def test_a_study_runs_through_slurm_and_a_failure_stops_its_descendants_only(far, there):
    output, _ = start(there, far).communicate(timeout=240)
    log = (far / "runs" / "far" / "logs" / "snakemake.log").read_text()
    assert "3 ran, 0 were done, 1 failed, 1 not run" in output, output + log
    assert "broken failed:" in output
    assert "eval-broken was not run, because broken failed" in output
    plan = {job["name"]: job for job in json.loads((far / "runs" / "far" / "plan.json").read_text())["jobs"]}
    assert runs.read(runs.done(plan["pareto"]["run_id"])).metrics[0].value == 1
    assert not (far / "runs" / "far" / ".work").exists()
    kept = {path.parent.name for path in (far / "runs" / "far" / "logs" / "slurm").rglob("*.log")}
    assert kept == {"broken"}  # Slurm's own logs, of what failed
    jobs = {}
    for block in told(there, "scontrol", "show", "job").strip().split("\n\n"):
        said = dict(word.partition("=")[::2] for word in block.split())
        jobs[said["Comment"].rpartition("_")[2]] = said
    assert {name: said["JobState"] for name, said in jobs.items()} == {
        "base-xs": "COMPLETED", "broken": "FAILED", "eval-base-xs": "COMPLETED", "pareto": "COMPLETED",
    }  # fmt: skip
    for name, said in jobs.items():
        own = plan[name]
        assert ("gpu:1" in said.get("TresPerJob", "")) == (own["gpus"] == 1) == (name != "pareto")
        days, _, clock = said["TimeLimit"].rpartition("-")
        hours, minutes, _ = map(int, clock.split(":"))
        assert 60 * (24 * int(days or 0) + hours) + minutes == own["runtime"]
        assert said["MinMemoryNode"] in (f"{own['mem_mb']}M", f"{own['mem_mb'] / 1024:g}G")


@pytest.mark.slow
def test_a_study_that_is_interrupted_cancels_its_jobs(far, there, hold):
    process = start(there, far, "--only", "base-xs")
    kernel = kernel_at_work(far)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "The study far was interrupted; start it again to go on from the finished runs." in output
    wait_for(lambda: gone(kernel), 40)
    assert "CANCELLED" in told(there, "squeue", "-h", "-t", "all", "-O", "state")
    assert not [path for path in published(far) if path.name == "result.json"]


@pytest.mark.skipif(not find_spec("snakemake_executor_plugin_kubernetes"), reason="not installed: `make cluster`")
def test_the_kubernetes_profile_plans_a_study(far, tmp_path):
    mine = profile(tmp_path / "mine", "kubernetes", **{"default-storage-prefix": str(tmp_path / "markers")})
    (far / "runs" / "far" / ".work").mkdir(parents=True)
    write_plan(far)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(far / "notebooks" / "workflow" / "Snakefile")]
    command += [
        "--workflow-profile",
        str(mine),
        "--directory",
        str(far / "runs" / "far" / ".work"),
        "--jobs",
        "2",
        "--dry-run",
    ]
    env = {**os.environ, "LOWBIT_PLAN": str(far / "runs" / "far" / "plan.json"), "LOWBIT_PYTHON": sys.executable}
    env |= {"LOWBIT_DATA": "", "LOWBIT_PROCESSES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "This was a dry-run" in done.stdout + done.stderr


def write_plan(far: Path) -> None:
    """What `run_study` hands to Snakemake."""
    planned = study.plan("far")
    ahead = schedule._ahead(planned, 139)
    jobs = [{"name": job.name, "stage": job.stage, "parents": job.parents, **ahead[job.name]} for job in planned]
    (far / "runs" / "far" / "plan.json").write_text(json.dumps({"study": "far", "jobs": jobs}))


def test_a_job_asks_for_what_its_estimate_says_with_room(monkeypatch):
    planned = study.plan("qwen3")
    needs, ahead = estimate.of_study(planned, 139), schedule._ahead(planned, 139)
    own, asked = needs["grpo-qwen3-0.6b"], ahead["grpo-qwen3-0.6b"]
    assert asked["gpus"] == 1
    assert asked["runtime"] == round(180 * own.hours + 30)  # minutes: three times the hours, and half an hour
    assert asked["mem_mb"] == round(1024 * (own.gib + 8))
    monkeypatch.setenv("LOWBIT_PROCESSES", "2")  # a GPU each, where a stage trains in several
    several = schedule._ahead(planned, 139)
    assert (several["grpo-qwen3-0.6b"]["gpus"], several["grpo-qwen3-0.6b"]["mem_mb"]) == (2, 2 * asked["mem_mb"])
    assert several["eval-qwen3-0.6b"]["gpus"] == 1
    (figure,) = (job for job in study.plan("micro") if job.stage == "pareto")
    asked = schedule._ahead(study.plan("micro"), 139)[figure.name]
    assert (asked["gpus"], asked["mem_mb"], asked["runtime"]) == (0, 8 * 1024, 30)
    assert (
        schedule._ahead([replace(figure, stage="diagnose", parents=[])], 139)[figure.name]["runtime"] == 4 * 180 + 30
    )  # not known


def test_an_unknown_profile_is_one_sentence_before_anything_starts(far, tmp_path):
    with pytest.raises(
        StudyError, match="profile moon is unknown: choose one of kubernetes, local, slurm, or a folder"
    ):
        schedule.run_study("far", profile="moon")
    with pytest.raises(StudyError, match="is unknown"):
        schedule.run_study("far", profile=str(tmp_path))
    for text in ("", "slurm", "executor: [", "- executor"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(StudyError, match="holds no settings"):
            schedule.run_study("far", profile=str(tmp_path))
    assert not (far / "runs").exists()


@pytest.mark.parametrize("name", ["local", "slurm", "kubernetes"])
def test_every_profile_goes_on_after_a_failure_and_looks_at_markers_alone(name):
    content = yaml.safe_load((PROFILES / name / "config.yaml").read_text())
    assert content["executor"] == name
    assert content["keep-going"] is True
    assert content["rerun-triggers"] == "input"
    assert content.get("retries", 0) == 0  # a failed run is looked at, not tried again
