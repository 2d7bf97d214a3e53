"""A study whose processes are killed ends as the undisturbed one. `python tests/kills.py` does the same with the real stages."""

import errno
import shutil
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import kills
from helpers import cli, project, runs
from helpers.report import reliability
from machinery import make

STUDY = """
name: wild
pages: []
runs:
  - {name: "base-{size}", stage: base, matrix: {size: [xs, s]}, params: {size: "{size}"}}
  - {name: "eval-{parent}", stage: eval, parent: ["base-*"]}
  - {name: pareto, stage: pareto, parents: ["eval-*"]}
"""


@pytest.mark.slow
def test_a_study_that_is_killed_again_and_again_ends_as_the_undisturbed_one(home):
    file = home / "notebooks" / "studies" / "wild.yml"
    file.write_text(STUDY)
    found = kills.trial(file, kills=5, seed=3, longest=1.0)
    assert len(found) == 5
    assert set(found["target"]) > {"runner"}
    assert found["rows"].min() >= 7  # rows of five runs, and two models' weights
    assert found[["differences", "left", "litter"]].to_numpy().sum() == 0


def test_a_folder_that_cannot_be_written_is_one_sentence(home, monkeypatch, capsys):
    def refuse(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(sys, "argv", ["lowbit", "run", "base"])
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code
    assert capsys.readouterr().err == f"{home / 'runs' / '.locks'} cannot be used: Read-only file system.\n"


def test_a_clock_that_jumps_changes_no_id_and_no_duration(home, monkeypatch):
    ids = set()
    for year in (2038, 1970):
        clock = SimpleNamespace(now=lambda zone, year=year: datetime(year, 1, 1, tzinfo=zone))
        monkeypatch.setattr("helpers.runs.datetime", clock)
        result = runs.read(make().path)
        assert result.started.startswith(str(year))
        assert 0 <= result.timings["wall_s"] < 60
        ids.add(result.run_id)
        shutil.rmtree(home / "runs")
    assert len(ids) == 1


@pytest.fixture
def written(tmp_path):
    rows = [
        (1, "job", "SIGKILL", "eval grpo", 0, 9, 0, 0),
        (1, "job", "SIGKILL", "grpo", 0, 9, 0, 0),
        (2, "runner", "SIGINT", "", 1, 9, 2, 3),
    ]
    names = ["round", "target", "signal", "stages", "left", "rows", "differences", "litter"]
    pd.DataFrame(rows, columns=names).to_csv(tmp_path / "faults.csv", index=False)
    return tmp_path / "faults.csv"


def test_the_tables_count_kills_and_sum_rounds(written, tmp_path):
    assert "| job | SIGKILL | 2 | eval 1, grpo 2 | 0 |" in reliability.kills(written)
    assert "| runner | SIGINT | 1 |  | 1 |" in reliability.kills(written)
    assert "| 3 | 2 | 18 | 2 | 3 |" in reliability.outcome(written)
    assert "tests/kills.py" in reliability.kills(tmp_path / "none.csv")


def test_load_shows_its_limit(tmp_path):
    (tmp_path / "load.csv").write_text("what,n,value,unit,limit\nplanned,2000,0.94,s,30\nrun,2000,1500,s,\n")
    assert "| planned | 2,000 | 0.94 s | 30 s |" in reliability.load(tmp_path / "load.csv")
    assert "| run | 2,000 | 1,500 s |  |" in reliability.load(tmp_path / "load.csv")


def test_the_published_trials_found_nothing():
    results = project.root() / "book" / "results"
    found = pd.read_csv(results / "faults.csv")
    assert len(found) >= 50
    stages = set(found["stages"].str.split().explode())
    assert stages >= {"base", "grpo", "ptq", "qat", "eval", "diagnose", "pareto"}
    assert set(found["target"]) == set(kills.TARGETS)
    assert found[["differences", "left", "litter"]].to_numpy().sum() == 0
    load = pd.read_csv(results / "load.csv").set_index("what")
    limits = load.dropna(subset="limit")
    assert (limits["value"] < limits["limit"]).all()
    assert set(limits["n"]) == {2000, 100_000}
    for name in ("study", "Snakemake", "server of kernels"):
        first, last = (load["value"][f"memory of {name}, {when} tenth"] for when in ("first", "last"))
        assert last < 1.5 * first + 16, "memory grows with the number of runs"
