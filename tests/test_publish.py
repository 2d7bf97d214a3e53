"""Publishing: what gets into the book, cleaned, and all of it or nothing."""

import json

import nbformat
import pandas as pd
import pytest

import synthetic_runs as synthetic
from helpers import records
from helpers.errors import UserError
from helpers.report import clean, publish


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    monkeypatch.setenv("LOWBIT_HOME", str(tmp_path))
    monkeypatch.delenv("LOWBIT_RUNS", raising=False)
    return tmp_path


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def one(home, **changes):
    """A run of its own, and its reference."""
    return synthetic.run(home, "mine", "ptq", "s", "rtn", 4, 0.7, study="local", **changes)["run_id"]


def folder_of(home, run_id):
    return home / "runs" / "local" / "ptq" / run_id


def test_a_whole_study_with_its_table_and_figure(home):
    names = synthetic.micro(home)
    assert publish.publish(["micro"]) == [f"micro/{name}" for name in names]

    book = home / "book"
    assert {path.stem for path in (book / "runs" / "micro").glob("*.ipynb")} == set(names)
    assert {path.name for path in (book / "runs" / "micro" / "grpo-s").iterdir()} == {"result.json", "metrics.jsonl"}
    df = pd.read_csv(book / "results" / "results.csv")
    assert df["run_id"].nunique() == 12
    assert set(df["study"]) == {"micro"}
    for name in ("pareto.svg", "pareto-dark.svg", "pareto.csv"):
        assert (book / "results" / name).stat().st_size > 100
    assert not list((home / "_build").glob(".publish-*"))


def test_publishing_twice_changes_nothing(home):
    synthetic.micro(home)
    publish.publish(["micro"])
    before = tree(home / "book")
    publish.publish(["micro"])
    publish.publish(["micro/grpo-s"])
    assert tree(home / "book") == before


def test_a_run_that_its_study_dropped_leaves_the_book(home):
    synthetic.micro(home)
    publish.publish(["micro"])
    plan = home / "runs" / "micro" / "plan.json"
    content = json.loads(plan.read_text())
    content["jobs"] = [job for job in content["jobs"] if job["name"] != "eval-rtn-s-2bit"]
    plan.write_text(json.dumps(content))
    publish.publish(["micro"])
    assert not list((home / "book" / "runs" / "micro").glob("eval-rtn-s-2bit*"))
    assert len(list((home / "book" / "runs" / "micro").glob("*.ipynb"))) == len(content["jobs"])


def test_a_run_without_a_page_is_published_as_its_record_alone(home):
    synthetic.micro(home)
    plan = home / "runs" / "micro" / "plan.json"
    content = json.loads(plan.read_text())
    for job in content["jobs"]:
        job["page"] = job["name"] == "grpo-s"
    plan.write_text(json.dumps(content))
    gone = next(job for job in content["jobs"] if job["name"] == "eval-rtn-s-2bit")
    (home / "runs" / "micro" / "eval" / gone["run_id"] / "run.ipynb").unlink()  # only its record came from the GPU
    publish.publish(["micro"])
    folder = home / "book" / "runs" / "micro"
    assert [path.stem for path in folder.glob("*.ipynb")] == ["grpo-s"]
    assert {path.name for path in (folder / "eval-rtn-s-2bit").iterdir()} == {"result.json"}
    assert pd.read_csv(home / "book" / "results" / "results.csv")["run_id"].nunique() == 12


def test_a_lone_run_by_its_id(home):
    run_id = one(home)
    assert publish.publish([run_id]) == ["local/mine"]
    assert list(publish.published()) == ["local/mine"]
    assert (home / "book" / "results" / "results.csv").is_file()
    assert not (home / "book" / "results" / "pareto.svg").exists()  # no row of the micro study to draw


def test_the_notebook_is_cleaned(home):
    run_id = one(home)
    publish.publish([run_id])
    text = (home / "book" / "runs" / "local" / "mine.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    assert tags == [[], ["remove-cell"], ["hide-input"], [], []]
    for gone in (str(home), "papermill", "widget", "start_time", "busy", "50 %"):
        assert gone not in text
    assert notebook.cells[2].source == "# Parameters\nparent = 'runs/x'"
    assert notebook.cells[4].outputs[0].text == "100 %\nsaved runs/x/model\n"
    assert [output.output_type for output in notebook.cells[4].outputs] == ["stream", "display_data"]
    assert clean.clean(nbformat.reads(text, as_version=4)) == notebook


def broken_error(home):
    notebook = synthetic.executed(home, "broken")
    notebook.cells[-1].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    return one(home, notebook=notebook)


def broken_external(home):
    notebook = synthetic.executed(home, "broken")
    html = {"text/html": "<script src='https://example.org/x.js'></script>"}
    notebook.cells[-1].outputs = [nbformat.v4.new_output("display_data", data=html)]
    return one(home, notebook=notebook)


def broken_unfinished(home):
    notebook = synthetic.executed(home, "broken")
    notebook.cells[-1].execution_count = None
    return one(home, notebook=notebook)


def broken_hash(home):
    run_id = one(home)
    with (folder_of(home, run_id) / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    return run_id


def broken_model(home):
    run_id = one(home)
    (folder_of(home, run_id) / "model" / "model.safetensors").write_bytes(b"other weights")
    return run_id


def broken_missing(home):
    run_id = one(home)
    (folder_of(home, run_id) / "metrics.jsonl").unlink()
    return run_id


def broken_json(home):
    run_id = one(home)
    (folder_of(home, run_id) / "result.json").write_text('{"run_id": ')
    return run_id


def broken_schema(home):
    run_id = one(home)
    path = folder_of(home, run_id) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "almost"}))
    return run_id


def broken_path(home):
    run_id = one(home)
    path = folder_of(home, run_id) / "result.json"
    result = json.loads(path.read_text())
    result["parameters"]["parent"] = f"{home}/models/mine"
    path.write_text(json.dumps(result))
    return run_id


def unknown(home):
    return "ptq-0000000000"


BROKEN = {
    broken_error: "cell 5 ended with ValueError: no",
    broken_external: "loads something from another host",
    broken_unfinished: "cell 5 was never executed",
    broken_hash: "metrics.jsonl differs",
    broken_model: "model/model.safetensors differs",
    broken_missing: "metrics.jsonl is missing",
    broken_json: "not a valid result",
    broken_schema: "not a valid result",
    broken_path: "only this machine has",
    unknown: "is not a run",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda case: case.__name__)
def test_nothing_is_published_when_one_run_is_refused(home, broken):
    synthetic.micro(home)
    publish.publish(["micro/grpo-s"])
    before = tree(home / "book")
    with pytest.raises(UserError, match=BROKEN[broken]) as caught:
        publish.publish(["micro", broken(home)])
    assert "\n" not in str(caught.value)
    assert tree(home / "book") == before


def test_a_study_with_a_run_missing_is_refused(home):
    synthetic.micro(home)
    result = next((home / "runs" / "micro" / "grpo").glob("*/result.json"))
    result.unlink()
    with pytest.raises(UserError, match=r"micro/grpo-\w+ has no complete result yet: `lowbit study micro`"):
        publish.publish(["micro"])
    assert not list((home / "book").iterdir())


def test_a_crash_while_the_copies_change_places_leaves_the_old_book(home, monkeypatch):
    synthetic.micro(home)
    publish.publish(["micro/grpo-s"])
    before = tree(home / "book")
    rename = publish.os.rename

    def fails_late(source, target):
        if str(source).endswith("new/results"):
            raise OSError("the disk is gone")
        rename(source, target)

    monkeypatch.setattr(publish.os, "rename", fails_late)
    with pytest.raises(OSError, match="gone"):
        publish.publish(["micro"])
    assert tree(home / "book") == before


def test_a_shipped_or_published_run_says_so(home, monkeypatch, tmp_path):
    run_id = one(home)
    shipped = home / "shipped" / "base-s"
    shipped.parent.mkdir()
    folder_of(home, run_id).rename(shipped)
    monkeypatch.setattr(publish.project, "SHIPPED", shipped.parent)
    with pytest.raises(UserError, match="ships with the package"):
        publish.publish(["base-s"])
    with pytest.raises(UserError, match="Nothing to publish"):
        publish.publish([])


def test_published_records_are_exact_copies(home):
    run_id = one(home)
    source = (folder_of(home, run_id) / "result.json").read_bytes()
    publish.publish([run_id])
    assert (home / "book" / "runs" / "local" / "mine" / "result.json").read_bytes() == source
    assert records.read(home / "book" / "runs" / "local" / "mine").run_id == run_id


def test_a_picture_that_a_cell_shows_twice_is_shown_once(home):
    def picture(data, kind="display_data"):
        return nbformat.v4.new_output(kind, data={"image/png": data})

    cell = nbformat.v4.new_code_cell("draw()", execution_count=1)
    cell.outputs = [
        picture("a", "execute_result"),
        picture("a"),
        picture("b"),
        nbformat.v4.new_output("stream", text="x"),
    ]
    cleaned = clean.clean(nbformat.v4.new_notebook(cells=[cell]))
    assert [output.get("data", {}).get("image/png") for output in cleaned.cells[0].outputs] == ["a", "b", None]
