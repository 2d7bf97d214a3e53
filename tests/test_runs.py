"""Runs: their ids, how parents are found, and how a run becomes visible."""

import errno
import json
import shutil

import pytest
from pydantic import ValidationError

from helpers import identity, params, project, runs, staging
from helpers.records import DiskFull, Result, RunError, ensure_space, is_complete
from machinery import BASE, TAUGHT, make, planned, write_notebook


def test_the_committed_schema_is_the_models():
    schema = json.loads((project.PACKAGE / "result.schema.json").read_text())
    assert schema == Result.model_json_schema(), "write Result.model_json_schema() to src/helpers/result.schema.json"


def test_a_finished_run_is_recorded_in_full(home):
    run = make(size="s", seed=3)
    result = runs.read(run.path)
    assert run.path == home / "runs" / "local" / "base" / result.run_id
    assert sorted(result.files) == ["metrics.jsonl", "model/model.safetensors"]
    assert (result.seed, result.status, result.parameters["size"]) == (3, "complete", "s")
    assert result.timings["train_s"] == 1.0
    assert "wall_s" in result.timings
    assert {"python", "torch", "transformers", "trl", "peft", "papermill", "numpy"} <= set(result.versions)
    assert result.command == "lowbit run base -p size=s -p seed=3"
    assert not list((home / "runs" / ".staging").iterdir())


def test_finishing_again_replaces_the_run(home):
    first, second = make(), make()
    assert first.path == second.path
    assert is_complete(second.path)
    second.finish(metrics=[{"metric": "loss", "value": 0.25, "n": 9}])  # the last cell was run again
    assert runs.read(second.path).metrics[0].value == 0.25
    assert not list((home / "runs" / ".staging").iterdir())


@pytest.mark.parametrize("value", [float("nan"), "high", None])
def test_a_metric_that_is_no_number_is_refused(home, value):
    run = runs.begin("base", params.validate(params.template(project.template("base")), {}))
    with pytest.raises(RunError, match=r"cannot record metrics\.0\.value"):
        run.finish(metrics=[{"metric": "loss", "value": value, "n": 1}])


def test_what_json_cannot_hold_is_refused_and_a_logged_nan_is_null(home):
    run = runs.begin("base", params.validate(params.template(project.template("base")), {}))
    with pytest.raises(RunError, match="cannot record what it was given"):
        run.finish(model={"scale": float("nan")})
    run.log(step=1, loss=float("nan"))
    assert json.loads((run.path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None}


# --- run ids ----------------------------------------------------------------------------------------------------------


def test_a_run_id_is_readable_and_depends_on_parameters_parents_and_code(home):
    def run_id(parents=(), code="c", **given):
        parameters = params.validate(params.template(project.template("eval")), given)
        return identity.run_id("eval", parameters, list(parents), code)

    usual = run_id()
    assert usual == run_id() != run_id(n=5)
    assert usual.startswith("eval-")
    assert run_id(n=5, tasks=["recall"]).startswith("eval-recall-n5-")
    assert usual not in (run_id(parents=["a"]), run_id(code="d"))
    assert run_id(parents=["a", "b"]) != run_id(parents=["b", "a"])
    assert len(run_id(tasks=["arithmetic", "recall"] * 20, n=7, seed=12345)) <= len("eval-") + 32 + 11


def test_the_code_version_follows_imports_and_ignores_comments_and_machinery(home, tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "quant").mkdir(parents=True)
    sources = {
        "__init__.py": "",
        "runs.py": "1",
        "quant/__init__.py": "from helpers.quant.rtn import quantize",
        "quant/rtn.py": "from .. import grids\ndef quantize(): return grids.x",
        "grids.py": "x = 1",
        "other.py": "y = 1",
    }
    for name, text in sources.items():
        (package / name).write_text(text)
    monkeypatch.setattr(identity, "PACKAGE", package)
    template = home / "notebooks" / "01_base.ipynb"
    content = json.loads(template.read_text())

    def cell(number, text):
        content["cells"][number]["source"] = text
        template.write_text(json.dumps(content))

    def changes(name, text):
        (package / name).write_text(text)
        after = identity.code_version(template)
        (package / name).write_text(sources[name])
        return after != before

    cell(1, "from helpers import params, quant, runs\n%matplotlib inline")
    before = identity.code_version(template)
    assert changes("quant/rtn.py", "from .. import grids\ndef quantize(): return 2")
    assert changes("grids.py", "x = 2")
    assert not changes("grids.py", "# why\n\nx = 1\n")
    assert not changes("other.py", "y = 2")
    assert not changes("runs.py", "2")
    cell(0, "size: str = 'xs'  # in xs, s, m: another choice")  # parameters count by value
    assert identity.code_version(template) == before
    cell(2, "print('something else')")
    assert identity.code_version(template) != before


# --- parents ----------------------------------------------------------------------------------------------------------


def test_a_parent_is_the_same_however_it_is_written(home, tmp_path):
    run = make(study="micro", name="base-xs")
    run_id = run.context.run_id
    planned(home, "micro", **{"base-xs": run_id})
    spellings = [run_id, "micro/base-xs", str(run.path), f"{run.path}/model", "runs/micro/base/" + run_id]
    assert {runs.load_parent(spelling).id for spelling in spellings} == {run_id}
    assert len({make("eval", parent=spelling).context.run_id for spelling in spellings}) == 1
    child = make("eval", parent="micro/base-xs")
    result = runs.read(child.path)
    assert (result.parents, result.parameters["parent"]) == ([run_id], run_id)
    assert result.command == "lowbit run eval -p parent=micro/base-xs"
    assert child.parent.model_path == str(run.path / "model")


def test_a_shipped_model_is_found_by_name_and_by_run_id(home):
    run = make()
    shutil.copytree(run.path, project.SHIPPED / "base-xs")
    shutil.rmtree(run.path)
    for spelling in ("base-xs", run.context.run_id):
        parent = runs.load_parent(spelling)
        assert (parent.id, parent.ref) == (run.context.run_id, "base-xs")
        assert parent.model_path == str(project.SHIPPED / "base-xs" / "model")


def test_a_published_run_is_found_and_says_how_to_get_its_model(home):
    run = make(study="micro", name="base-xs")
    book = home / "book" / "runs" / "micro" / "base-xs"
    book.mkdir(parents=True)
    shutil.move(run.path / "result.json", book)
    shutil.rmtree(run.path)
    for spelling in ("micro/base-xs", run.context.run_id):
        assert runs.load_parent(spelling).id == run.context.run_id
    with pytest.raises(RunError, match=r"has no model in .*book.* Make it with `lowbit run base`"):
        _ = runs.load_parent("micro/base-xs").model_path


def test_a_folder_of_weights_counts_by_content_and_a_hub_id_by_name(home, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    one = runs.load_parent(str(tmp_path / "one")).id
    assert one.startswith("folder:")
    assert one == runs.load_parent("../two").id
    (tmp_path / "two" / "model.safetensors").write_bytes(b"others")
    assert one != runs.load_parent("../two").id
    assert runs.load_parent("../two").ref == str(tmp_path / "two")
    assert runs.load_parent("Qwen/Qwen3-0.6B").model_path == runs.load_parent("Qwen/Qwen3-0.6B").id == "Qwen/Qwen3-0.6B"


def test_an_unknown_parent_is_one_sentence_with_near_matches(home, tmp_path):
    make(study="micro", name="base-xs")
    planned(home, "micro", **{"base-xs": "base-0000000000"})
    with pytest.raises(RunError, match=r"The parent base-sx is unknown \(is it .*micro/base-xs.*give a run id"):
        runs.load_parent("base-sx")
    with pytest.raises(RunError, match="The parent micro/base-xl is unknown"):
        runs.load_parent("micro/base-xl")
    with pytest.raises(RunError, match=r"The parent micro/base-xs has not been run yet: `lowbit study micro`"):
        runs.load_parent("micro/base-xs")
    for missing in ("./nowhere", "/nowhere/at/all", "../x", "runs/micro/base/zzz"):
        with pytest.raises(RunError, match="is unknown"):
            runs.load_parent(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"neither a result\.json nor safetensors"):
        runs.load_parent(str(tmp_path / "empty"))


# --- a teacher beside the parent --------------------------------------------------------------------------------------


@pytest.fixture
def taught(home):
    write_notebook(home / "notebooks" / "04_taught.ipynb", TAUGHT)
    return make(study="micro", name="small", size="s").id, make(study="micro", name="tiny").id


def begun(**given):
    return runs.begin("taught", params.validate(params.template(project.template("taught")), given, "taught"))


def test_the_teacher_makes_a_run_another_one(home, taught):
    small, tiny = taught
    ids = {
        begun(parent=tiny).id,
        begun(parent=tiny, teacher=small).id,
        begun(parent=tiny, teacher=tiny).id,
        begun(parent=small, teacher=tiny).id,
    }
    assert len(ids) == 4
    planned(home, "micro", small=small, tiny=tiny)
    assert begun(parent="micro/tiny", teacher="micro/small").id == begun(parent=tiny, teacher=small).id


def test_a_run_knows_its_teacher_and_records_it(home, taught):
    small, tiny = taught
    planned(home, "micro", small=small, tiny=tiny)
    run = begun(parent=tiny, teacher="micro/small")
    assert (run.parent.id, run.teacher.id) == (tiny, small)
    assert run.teacher.model_path.endswith(f"{small}/model")
    assert run.changed == {"parent": tiny, "teacher": small}
    result = run.finish(metrics=[{"metric": "loss", "value": 0.5, "n": 9}])
    assert result.parents == [tiny, small]
    assert result.command == "lowbit run taught -p parent=micro/tiny -p teacher=micro/small"
    assert begun(parent=tiny).teacher is None


def test_a_run_keeps_the_name_that_its_study_gives_it(taught):
    given = params.validate(params.template(project.template("taught")), {"parent": taught[0], "teacher": taught[1]})
    context, _ = runs.describe("taught", given, "micro", "pupil-seed0")
    assert (context.study, context.name) == ("micro", "pupil-seed0")


def test_an_unknown_teacher_is_called_so(taught):
    with pytest.raises(RunError, match="The teacher nobody is unknown: give a run id"):
        begun(parent=taught[0], teacher="nobody")


def of(made_from=None, bits=16, **more):
    """A run whose model was made from another."""
    run = make(seed=next(SEEDS))
    path = run.path / "result.json"
    result = json.loads(path.read_text())
    result["model"] = {"name": "s", "bits": bits} | ({"made_from": made_from} if made_from else {}) | more
    path.write_text(json.dumps(result))
    return run.id


SEEDS = iter(range(100, 200))


def test_the_teacher_is_the_nearest_model_in_full_precision(home):
    from helpers.models import full_precision  # takes seconds to import

    base = of()
    grpo = of(base)
    gptq = of(grpo, bits=2)
    qat = of(gptq, bits=2)
    again = of(qat, bits=2)
    for run in (grpo, gptq, qat, again):
        assert full_precision(runs.load_parent(run)).id == grpo
    assert full_precision(runs.load_parent(base)).id == base
    assert full_precision(runs.load_parent("owner/name")).id == "owner/name"
    folder = home / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    mine = runs.load_parent(str(folder)).id
    assert mine.startswith("folder:")
    from_folder = of(mine, bits=2)
    path = runs.find(from_folder) / "result.json"
    path.write_text(path.read_text().replace('"parameters": {', f'"parameters": {{"parent": "{folder}",', 1))
    assert full_precision(runs.load_parent(from_folder)).id == mine
    with pytest.raises(
        RunError, match=r"teacher is empty, and no model in full precision is known that .* was made from"
    ):
        full_precision(runs.load_parent(of(bits=4)))
    lost = of("grpo-0000000000", bits=2)
    with pytest.raises(RunError, match=r"The model that .* was made from.*grpo-0000000000 is unknown"):
        full_precision(runs.load_parent(lost))


def test_what_a_killed_run_kept_is_for_the_same_run_alone(home, taught, monkeypatch):
    """Under the runner a folder of its run id; a session, whose cells may be edited, keeps nothing."""
    assert begun(parent=taught[0]).unfinished is None
    given = params.validate(params.template(project.template("taught")), {"parent": taught[0]}, "taught")
    context, _ = runs.describe("taught", given)
    staged = staging.stage_folder(context.run_id)
    (staged / staging.CONTEXT).write_text(context.model_dump_json())
    monkeypatch.setenv("LOWBIT_STAGING", str(staged))
    run = runs.begin("taught", context.parameters)
    assert run.unfinished == home / "runs" / ".unfinished" / context.run_id
    assert context.run_id not in runs.known()
    run.unfinished.mkdir(parents=True)
    assert run.id not in runs.known()
    assert runs.done(run.id) is None


# --- files and disks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run_id": "x"}', "cut"])
def test_a_corrupt_result_is_a_sentence_and_no_run(home, damage):
    run = make()
    file = run.path / "result.json"
    file.write_text(file.read_text()[:200] if damage == "cut" else damage)
    with pytest.raises(RunError, match=r"result\.json is not a valid result .* delete its folder"):
        runs.read(run.path)
    assert runs.done(run.context.run_id) is None


def test_a_run_that_lost_a_file_is_not_done(home):
    run = make()
    assert runs.done(run.context.run_id) == run.path
    (run.path / "model" / "model.safetensors").unlink()
    assert runs.done(run.context.run_id) is None


def test_publishing_keeps_a_valid_run_and_replaces_a_broken_one(home):
    run = make()
    result = runs.read(run.path)

    def publish(**given):
        folder = staging.stage_folder(result.run_id)
        (folder / "mark").write_text("new")
        assert staging.publish_staged(folder, result, **given) == run.path
        assert not list((home / "runs" / ".staging").iterdir())
        return (run.path / "mark").exists()

    assert not publish()
    (run.path / "result.json").write_text("{")
    assert publish()
    (run.path / "mark").unlink()
    assert publish(replace=True)


def test_a_full_disk_is_one_sentence(home, monkeypatch):
    with pytest.raises(DiskFull, match=r"Only \d+ MiB are free in .*, and a run needs \d+ MiB"):
        ensure_space(home / "runs" / "not" / "there", need=2**62)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = runs.begin("base", params.validate(params.template(project.template("base")), {}))
    monkeypatch.setattr("helpers.records.os.fsync", full)
    with pytest.raises(DiskFull, match="No space is left on the disk"):
        run.finish()
    assert runs.done(run.context.run_id) is None
    assert not list((home / "runs").glob("local/**/*.json"))


@pytest.mark.parametrize("field", ["study", "name", "run_id", "stage"])
def test_no_path_hides_in_a_result(home, field):
    good = json.loads((make().path / "result.json").read_text())
    with pytest.raises(ValidationError, match="should match pattern"):
        Result.model_validate(good | {field: "../../elsewhere"})


def test_a_pattern_stands_for_all_runs_that_match(home):
    first, second = make(size="xs"), make(size="s")
    run = runs.begin("pareto", {"parents": ["base-*"]})
    assert sorted(run.context.parents) == sorted([first.path.name, second.path.name])
    with pytest.raises(RunError, match=r"No run matches other/\*"):
        runs.begin("pareto", {"parents": ["other/*"]})


def test_a_truncated_file_makes_a_run_incomplete(home):
    run = make()
    assert is_complete(run.path)
    (run.path / "model" / "model.safetensors").write_bytes(b"x")
    assert not is_complete(run.path)
    assert runs.done(run.path.name) is None


@pytest.mark.parametrize(
    ("ran", "same"),
    [
        (slice(1, None), True),
        ([1, 2, 3, 4, 4], True),  # the last cell again
        ([1, 2, 2, 3, 4], False),  # another cell twice: a model trained twice, say
        ([1, 3, 4], False),
        ([1, 3, 2, 4], False),
    ],
)
def test_a_session_must_run_the_cells_of_the_template_in_order(home, ran, same):
    cells = BASE[ran] if isinstance(ran, slice) else [BASE[index] for index in ran]
    assert (runs._deviation("base", [identity.normal(cell.strip()) for cell in cells]) == []) == same


def test_parameters_that_run_again_later_make_another_run(home):
    cells = [BASE[1], 'size: str = "s"', *BASE[2:]]
    assert runs._deviation("base", [identity.normal(cell.strip()) for cell in cells])
