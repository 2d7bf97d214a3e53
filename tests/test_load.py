"""Studies of thousands of runs: planned in time that grows with their number, and no faster."""

import mmap

import pytest

import load
from helpers import schedule, study


@pytest.fixture
def large(tmp_path, monkeypatch):
    for name in ("LOWBIT_HOME", "LOWBIT_RUNS"):  # `make` sets them; they are put back afterwards
        monkeypatch.setenv(name, "")
    load.make(tmp_path / "home", 2000)


def test_two_thousand_runs_are_planned_and_told_in_less_than_half_a_minute(large):
    planned = load.seconds(lambda: study.plan("load"))
    told = load.seconds(lambda: schedule.run_study("load", dry_run=True))
    assert max(planned, told) < 30  # a second or two; what grows with the square of 2,000 would not fit
    jobs = {job.name: job for job in study.plan("load")}
    assert len(jobs) == len({job.run_id for job in jobs.values()}) == 2000
    assert jobs["eval-seed999"].parents == ["base-seed999"]


def test_the_watch_sees_this_process_grow():
    before = load.living()["study"]
    kept = mmap.mmap(-1, 64 * 2**20)  # new pages: an allocator may hand out old ones
    kept.write(b"x" * len(kept))
    assert load.living()["study"] - before > 32 * 2**20
