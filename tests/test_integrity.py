"""`lowbit check --runs`: what is wrong with a run is named, and what is published here is whole."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from helpers import integrity, project, runs
from helpers.cli import app
from machinery import make


@pytest.fixture
def made(home):
    """A base run and an evaluation of it."""
    base = make(study="micro", name="base-xs")
    return base, make("eval", parent=base.context.run_id)


def test_whole_runs_have_nothing_wrong(made):
    assert integrity.broken() == (2, [])


def edit(run, **changes):
    file = run.path / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(run):
    file = run.path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3])


DAMAGES = {
    "its parameters, parents or code were edited": lambda run: edit(
        run, parameters=run.context.parameters | {"value": 0.9}
    ),
    "model/model.safetensors has been changed": truncate,
    "has a notebook that proves nothing: it is no readable notebook": lambda run: (run.path / "run.ipynb").write_text(
        "{"
    ),
    "lacks 1 of its 2 files, model/model.safetensors first": lambda run: shutil.rmtree(run.path / "model"),
    "the folder was renamed": lambda run: run.path.rename(run.path.with_name("base-other")),
    "is not a valid result": lambda run: (run.path / "result.json").write_text('{"run_id": '),
    "is not a valid result (metrics.0.value": lambda run: edit(
        run, metrics=[{"metric": "loss", "value": "low", "n": 1}]
    ),
    "was made from base-": lambda run: shutil.rmtree(run.path),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_what_is_broken_is_named(made, sentence):
    base, evaluation = made
    DAMAGES[sentence](base)
    number, found = integrity.broken()
    assert number == 2 - (sentence == "was made from base-")
    named = [told for told in found if sentence in told]
    assert len(named) == 1, found
    where = evaluation if sentence == "was made from base-" else base
    assert f"runs/{where.path.parent.parent.name}/" in named[0]


def test_the_command_ends_with_what_it_found(made):
    assert "All is well with 2 runs." in CliRunner().invoke(app, ["check", "--runs"]).stdout
    truncate(made[0])
    result = CliRunner().invoke(app, ["check", "--runs"])
    assert result.exit_code == 1
    assert "model.safetensors has been changed; make it again with `lowbit run base`" in result.output


def test_a_published_run_may_lack_its_weights_but_not_lie(made, home):
    base, _ = made
    book = home / "book" / "runs" / "micro" / "base-xs"
    book.mkdir(parents=True)
    shutil.copyfile(base.path / "result.json", book / "result.json")
    assert integrity.broken() == (3, [])
    (book / "metrics.jsonl").write_text("other\n")
    assert "metrics.jsonl has been changed" in integrity.broken()[1][0]


def test_everything_that_is_published_here_is_what_it_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path))
    number, found = integrity.broken()
    assert not found
    assert number == len([*(project.root() / "book" / "runs").glob("*/*/result.json")]) + len(
        [*project.SHIPPED.glob("*/result.json")]
    )


def test_a_run_of_older_code_is_kept_but_not_taken_for_today_s(home):
    old = make()
    template = home / "notebooks" / "01_base.ipynb"
    template.write_text(template.read_text().replace("working on", "at work on"))
    assert integrity.broken() == (1, [])
    new = make()
    assert new.context.run_id != old.context.run_id
    assert runs.done(old.context.run_id) == old.path
