"""The command line: exit codes, sentences, speed, and no machine learning in its process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from helpers import cli, runs
from machinery import make, write_notebook


@pytest.fixture
def lowbit(home, monkeypatch, capfd):
    """Call `lowbit` in this process: (exit code, output, errors)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowbit", *arguments])
        before = signal.getsignal(signal.SIGTERM)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        else:
            code = 0
        finally:
            signal.signal(signal.SIGTERM, before)
        return code, *capfd.readouterr()

    return call


def test_help_is_quick_and_names_every_command():
    began = time.perf_counter()
    output = subprocess.run([sys.executable, "-m", "helpers.cli", "--help"], capture_output=True, text=True).stdout
    assert time.perf_counter() - began < 2  # under 1 s on a quiet machine
    for command in ("check", "run", "study", "table", "book", "publish", "show"):
        assert f" {command} " in output
    assert " job " not in output


def test_nothing_of_the_command_line_imports_machine_learning():
    code = (
        "import sys; from helpers import checks, cli, execute, schedule, study; from helpers.report import table; "
        "sys.exit(bool({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "bass"], "bass is not a stage; did you mean base? Or choose one of base, eval, pareto."),
        (["run", "base", "-p", "sise=1"], "sise is not a parameter of base; did you mean size?"),
        (["run", "base", "-p", "value=2"], "value = 2.0 is not allowed for base: it must be a number from 0.0 to 1.0."),
        (["run", "base", "-p", "value"], "-p value is not allowed: write -p name=value."),
        (["run", "base", "-p", "seed=1", "-p", "seed=2"], "seed is given twice: 1 and 2."),
        (["run", "eval", "-p", "parent=base"], "The parent base is unknown: give a run id"),
        (["study", "micro"], "micro is neither a study nor a file."),
        (["show", "eval-1"], "The run eval-1 is unknown: give a run id"),
        (["show", "org/model"], "org/model is not a run of this project"),
        (["table"], "No finished run in "),
        (["job", "nowhere.json", "x", str(os.getppid())], "nowhere.json is no plan that has a run x."),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_code_2(lowbit, arguments, sentence):
    code, output, errors = lowbit(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1


def test_a_folder_that_is_no_project_is_a_sentence(lowbit, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_HOME", str(tmp_path))
    assert lowbit("run", "base")[::2] == (
        2,
        f"LOWBIT_HOME = {tmp_path} is not a project folder: it has no notebooks folder.\n",
    )


@pytest.mark.slow
def test_run_prints_where_the_run_is_and_its_metrics(lowbit):
    code, output, _ = lowbit("run", "base", "-p", "size=s")
    progress, last = output.splitlines()[1:3]  # the notebook logs one row, which holds its process id
    run_id = last.split(":")[0]
    assert (code, output) == (
        0,
        f"working on s\n{progress}\n{run_id}: done, in runs/local/base/{run_id}\n  loss = 0.5 (n = 9, k = 1)\n",
    )
    assert lowbit("run", "base", "-p", "size=s")[1].startswith(f"{run_id}: already done, in runs/local/base/{run_id}\n")
    code, _, errors = lowbit("run", "base", "-p", "fault=error")
    assert code == 1
    assert "ValueError: broken on purpose" in errors
    assert errors.count("\n") == 1


def test_show_prints_what_a_run_is_made_from(lowbit):
    run = make("eval", parent=make(size="s").context.run_id, tasks=["recall"])
    code, output, _ = lowbit("show", run.context.run_id)
    assert code == 0
    for part in ("lowbit run eval -p parent=base-s-", "tasks = ['recall']", "loss = 0.5 (n = 9, k = 1)", "name = xs"):
        assert part in output
    assert runs.read(run.path).parents[0] in output


def test_check_finds_what_is_wrong(lowbit, home):
    lock = home / "requirements.lock"
    assert lowbit("check")[::2] == (1, f"{lock} is missing, so versions cannot be checked.\n")
    lock.write_text(f"# the set\npytest=={pytest.__version__}\nnumpy==1.0 ; python_version < '3'\n")
    study = home / "notebooks" / "studies" / "tiny.yml"
    study.write_text("name: tiny\nruns:\n  - {name: one, stage: base}\n")
    assert lowbit("check") == (0, "All is well.\n", "")
    study.write_text("name: tiny\nruns:\n  - {name: one, stage: base, params: {size: xl}}\n")
    assert "size = 'xl' is not allowed" in lowbit("check")[2]
    lock.write_text("pytest==1.0\nno-such-package==1.0\n")
    write_notebook(home / "notebooks" / "02_grpo.ipynb", ["steps = 3"])
    base = home / "notebooks" / "01_base.ipynb"
    content = json.loads(base.read_text())
    content["cells"][1]["execution_count"] = 1
    content["metadata"]["kernelspec"]["name"] = "conda"
    base.write_text(json.dumps(content))
    code, _, errors = lowbit("check")
    assert code == 1
    assert [line.split(",")[0] for line in errors.splitlines()] == [
        f"pytest is {pytest.__version__}",
        "no-such-package is not installed",
        "base: 01_base.ipynb has the kernel conda",
        "base: 01_base.ipynb has outputs: clear them",
        "grpo: The parameters cell has the line `steps = 3`: each parameter is written `name: type = value  # help`.",
    ]


def test_what_nobody_thought_of_is_still_one_sentence(lowbit, home):
    (home / "runs" / "tiny").mkdir(parents=True)
    (home / "runs" / "tiny" / "plan.json").write_text("{ broken")
    code, _, errors = lowbit("table")
    assert code in (1, 2)
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
