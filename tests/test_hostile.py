"""Input that means harm: checkpoints, studies, notebooks, parameters, replies, pages. What is trusted stands in book/threats.md."""

import json
import os
import time

import nbformat
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nbformat import v4
from papermill.translators import PythonTranslator

from helpers import kernel, models, project, runs, staging
from helpers.execute import execute
from helpers.grading import grade
from helpers.records import RunError
from helpers.report import clean, publish
from helpers.study import StudyError, plan
from machinery import make, write_notebook

EVIL = "open({!r}, 'w')"


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def folder(tmp_path):
    tokenizer = models.build_tokenizer()
    return models.save(models.build("xs", tokenizer), tokenizer, tmp_path / "model", "A model.")


def test_a_pickle_is_never_opened(folder, tmp_path):
    mark = tmp_path / "mark"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "adapter_model.bin"):
        torch.save({"weight": Bomb(mark)}, folder / name)
    models.load(folder)  # beside safetensors they are left alone
    (folder / "model.safetensors").unlink()
    with pytest.raises(models.CheckpointError, match="cannot be loaded"):
        models.load(folder)
    assert not mark.exists()


def test_a_pickled_adapter_is_refused(folder, tmp_path):
    mark = tmp_path / "mark"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"adapter": "adapter"}))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({"weight": Bomb(mark)}, folder / "adapter" / "adapter_model.bin")
    with pytest.raises(models.CheckpointError, match=r"no adapter/adapter_model\.safetensors"):
        models.load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", [None, "evil"])
def test_code_of_a_checkpoint_is_never_run(folder, tmp_path, file, kind):
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(EVIL.format(str(mark)))
    name = {"config.json": "AutoConfig", "tokenizer_config.json": "AutoTokenizer"}[file]
    more = {"auto_map": {name: "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    more |= {"model_type": kind} if kind and file == "config.json" else {}
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
    with pytest.raises(models.CheckpointError) as error:
        models.load(folder)
    assert "\n" not in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["../out", "/out", "a/../../out", "..", ".hidden", "a\nb", "a b", "$(touch out)", "{x}", ""]
)
@pytest.mark.parametrize("where", ["study", "run"])
def test_no_name_in_a_study_leads_out_of_the_runs(home, name, where):
    file = home / "notebooks" / "studies" / "evil.yml"
    one = {"name": name if where == "run" else "base", "stage": "base", "matrix": {"x": ["../../x"]}}
    file.write_text(json.dumps({"name": name if where == "study" else "evil", "runs": [one]}))
    with pytest.raises(StudyError):
        plan(file)
    assert not (home / "runs").exists()


@pytest.mark.slow
def test_a_notebook_cannot_have_the_runner_write_or_delete_elsewhere(home, tmp_path):
    victim = tmp_path / "lowbit-victim"
    victim.mkdir()
    (victim / "kept").write_text("mine")
    cells = [
        'seed: int = 0  # 0..: seed\nkind: str = "model"  # in model, file: what leads out',
        'import os\nfrom helpers import params, runs\nrun = runs.begin("evil", params.check())',
        f"victim = {str(victim)!r}\nos.symlink(victim if kind == 'model' else victim + '/kept', run.path / kind)",
        "run.finish(metrics=[])",
    ]
    write_notebook(home / "notebooks" / "09_evil.ipynb", cells)
    for kind in ("model", "file"):
        with pytest.raises(RunError, match="left a link"):
            execute("evil", {"kind": kind}, out=(tmp_path / "log").open("a"))
    assert (victim / "kept").read_text() == "mine"
    assert not list((home / "runs").glob("[!.]*/*/*"))
    stale = home / "runs" / ".staging" / "base-1.dead"
    stale.mkdir(parents=True)
    (stale / staging.SOCKETS).symlink_to(victim)
    staging.stage_folder("base-1")
    assert not stale.exists()
    assert (victim / "kept").read_text() == "mine"


def test_the_folder_of_sockets_that_a_killed_kernel_left_is_removed(home):
    stale, sockets = home / "runs" / ".staging" / "base-1.dead", kernel.socket_folder()
    stale.mkdir(parents=True)
    (stale / staging.SOCKETS).symlink_to(sockets)
    staging.stage_folder("base-1")
    assert not sockets.exists()


@given(st.text(), st.lists(st.text(), max_size=3), st.floats(allow_nan=False, allow_infinity=False))
def test_parameters_reach_a_notebook_as_data(text, texts, number):
    code = PythonTranslator.codify({"text": text, "texts": texts, "number": number})
    found: dict = {}
    exec(code, {"__builtins__": {}}, found)  # nothing may be called: there is nothing to call
    assert found == {"text": text, "texts": texts, "number": number}


@pytest.mark.slow
def test_a_parameter_that_looks_like_code_is_recorded_and_not_run(home, tmp_path):
    mark = tmp_path / "mark"
    evil = "\"); __import__('os').system('touch " + str(mark) + "') #'''\n{0}{mark}$(touch x)`"
    cells = [
        'note: str = "x"  # a text',
        'from helpers import params, runs\nrun = runs.begin("note", params.check())',
        "run.finish(model={'note': note})",
    ]
    write_notebook(home / "notebooks" / "09_note.ipynb", cells)
    made = runs.read(execute("note", {"note": evil}, out=(tmp_path / "log").open("w")).path)
    assert made.parameters["note"] == made.model["note"] == evil
    assert not mark.exists()
    assert "\n" not in made.run_id
    assert "/" not in made.run_id


REPLIES = {
    "nested braces": r"\boxed{" * 20_000,
    "closed braces": r"\boxed{" + "{" * 5_000 + "}" * 5_000 + "}",
    "a tower of powers": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "a long number": r"\boxed{" + "9" * 200_000 + "}",
    "a factorial": r"\boxed{(10^{9})!}",
    "many boxes": r"\boxed{1}" * 50_000,
    "spaces": "<think>" + " " * 500_000 + r"</think>\boxed{1}",
    "backslashes": "\\" * 300_000,
    "fractions": r"\boxed{" + r"\frac{1}{" * 3_000 + "2" + "}" * 3_000 + "}",
    "nulls and surrogates": "\\boxed{1\x00\ud800}",
    "code": r"\boxed{__import__('os').system('true')}",
}


@pytest.mark.slow
def test_no_reply_hangs_the_grader():
    began = time.monotonic()
    verdicts = grade([*REPLIES.values()], ["1"] * len(REPLIES), "maths")
    assert time.monotonic() - began < 60
    right = {name for name, verdict in zip(REPLIES, verdicts, strict=True) if verdict.outcome == "equal"}
    assert right <= {"many boxes", "spaces"}


def page(data):
    cell = v4.new_code_cell("x", outputs=[v4.new_output("display_data", data)], execution_count=1)
    return v4.new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"text/html": "<img src=x onerror=alert(1)>"}, "would run code"),
        ({"text/html": "<ScRipt>alert(1)</script>"}, "would run code"),
        ({"text/html": '<a href=" javascript:alert(1)">'}, "would run code"),
        ({"text/html": "<iframe srcdoc='x'>"}, "would run code"),
        ({"image/svg+xml": "<svg onload='alert(1)'>"}, "would run code"),
        ({"text/html": '<img src="//evil.example/x.png">'}, "loads something"),
        ({"text/markdown": "{raw} html"}, "text/markdown"),
        ({"application/javascript": "alert(1)"}, "application/javascript"),
    ],
)
def test_an_output_that_could_act_is_not_shown(data, sentence):
    assert sentence in clean.problem(page(data))


def test_a_reply_in_a_table_is_text():
    import pandas as pd

    html = pd.DataFrame({"reply": ["<script>alert(1)</script> <img src=x onerror=alert(1)>"]})._repr_html_()
    assert clean.problem(page({"text/html": html})) is None
    assert "<script" not in html


@pytest.mark.parametrize(
    ("place", "told"), [("notebook", "its notebook"), ("metrics", "its metrics.jsonl"), ("result", "its result.json")]
)
def test_a_secret_is_not_published(home, monkeypatch, place, told):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-and-long")
    run = make()
    shown = v4.new_output("stream", text="token s3cr3t-and-long" if place == "notebook" else "nothing")
    cell = v4.new_code_cell("x", outputs=[shown], execution_count=1)
    nbformat.write(v4.new_notebook(cells=[cell]), run.path / "run.ipynb")
    if place == "metrics":
        (run.path / "metrics.jsonl").write_text('{"step": "s3cr3t-and-long"}\n')
    result = runs.read(run.path)
    if place == "result":
        result = result.model_copy(update={"model": {"name": "s3cr3t-and-long"}})
    staging.write_result(run.path, result.model_copy(update={"dirty": False}))
    with pytest.raises(publish.PublishError, match=f"{told} holds the value of MY_API_KEY"):
        publish.publish([run.context.run_id])
    assert not (home / "book" / "runs").exists()


def test_tokens_are_known_by_their_form(monkeypatch):
    for name in [name for name in os.environ if clean.SECRETIVE.search(name)]:
        monkeypatch.delenv(name)
    assert clean.secret("hf_" + "a1B2" * 9) == "what looks like a token, hf_a1B..."
    assert clean.secret("hf_models and AKIA are words") is None


def test_no_stage_reads_the_environment():
    for path in project.templates().values():
        assert "environ" not in path.read_text(), path.name
