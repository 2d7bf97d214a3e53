"""What teaches: background worked by hand, exercises and their solutions, copies for class, buttons, citation, glossary."""

import json
import re
import shutil
from fractions import Fraction

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import synthetic_runs as synthetic
from helpers import params, project, quant
from helpers.errors import UserError
from helpers.evaluation.compare import holm
from helpers.kernels.fake_quant import fake_quantize
from helpers.quant import awq, gptq
from helpers.quant.calibration import Moments
from helpers.quant.size import stored_parts
from helpers.report import lesson, negative
from helpers.training import objective

BOOK = synthetic.CHECKOUT / "book"
PAGES = {path.stem: path.read_text() for path in (BOOK / "background").glob("*.md")}
TEMPLATES = project.templates()
LESSONS = {stage: path for stage, path in TEMPLATES.items() if stage != "speed"}


def says(page, *numbers):
    """Whether the page holds each number, as it is written there."""
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", PAGES[page]), f"{page} lacks {number}"


def last_cell(stage):
    return params.source(json.loads(TEMPLATES[stage].read_text())["cells"][-1])


def by_column(bits):
    """One grid for a whole row."""
    return quant.Scheme(bits, "channel", 64, False)


# --- background, by hand ----------------------------------------------------------------------------------------------


def test_every_chapter_is_there_and_in_the_contents_and_names_code_that_exists():
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    listed = {chapter["file"] for part in toc["parts"] for chapter in part["chapters"]}
    assert {f"background/{name}" for name in PAGES} <= listed
    assert len(PAGES) == 7
    for text in PAGES.values():
        code = text.partition("## In the code")[2]
        for path, rest in re.findall(r"`(src/[\w/]+\.py)`([^\n]*)", code):
            source = (synthetic.CHECKOUT / path).read_text()
            named = re.findall(r"`(\w+)`", rest.partition("`src/")[0])
            assert named, f"{path} is named without what to look for"
            assert all(re.search(rf"\b{name}\b", source) for name in named), (path, named)


@pytest.mark.parametrize(
    ("bits", "codes", "values", "texts"),
    [
        (3, [0, 2, 4, 7], [-0.9, -0.3, 0.3, 1.2], ("0, 2, 4, 7", "-0.9, -0.3, 0.3, 1.2")),
        (2, [0, 1, 1, 3], [-0.7, 0.0, 0.0, 1.4], ("0, 1, 1, 3", "-0.7, 0.0, 0.0, 1.4")),
    ],
)
def test_a_row_on_a_grid(bits, codes, values, texts):
    made = quant.round_to_nearest(torch.tensor([[-0.9, -0.2, 0.3, 1.2]]), by_column(bits))
    assert made.codes.tolist() == [codes]
    assert made.dequantize()[0].tolist() == pytest.approx(values, abs=1e-3)
    says("grids", *texts)


def test_one_weight_takes_eleven_steps_of_which_two_change_the_model():
    w = nn.Parameter(torch.tensor([[0.40]]))
    scale, zero = torch.tensor([[0.3]]), torch.tensor([[0]])
    seen = []
    while not seen or seen[-1] < 0.85:
        low = fake_quantize(w, scale, zero, 0, 7)
        seen.append(low.item())
        loss = 0.5 * (low - 0.9).square().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        w.data -= 0.1 * gradient
    assert [round(x, 2) for x in seen] == [0.3] + 10 * [0.6] + [0.9]
    says("grids", "11 steps")


def test_effective_bits_and_bytes():
    def bits(scheme, rows=4096, columns=4096):
        return 8 * sum(stored_parts(rows, columns, scheme)) / (rows * columns)

    assert f"{bits(quant.Scheme(4, 'group', 64, False)):.4f}" == "4.3125"
    assert f"{bits(quant.bitsandbytes(4)):.2f}" == "4.50"
    assert f"{bits(quant.bitsandbytes(4, double=True)):.3f}" == "4.127"
    says("grids", "4.3125")
    says("lora", "4.127", "4.5 bits")
    n, k = 24_576, 4_096
    for width, texts in (
        (16, ("201.3", "50.3", "200")),
        (4, ("4.156", "52.3", "13.1", "52")),
        (2, ("2.141", "26.9", "6.7", "27")),
    ):
        effective = 16 if width == 16 else bits(quant.Scheme(width, "group", 128, False), n, k)
        size = n * k * effective / 8
        made = [f"{effective:.3f}", f"{size / 1e6:.1f}", f"{size / 4e12 * 1e6:.1f}", f"{effective / 16 * 200:.0f}"]
        assert made[-len(texts) :] == list(texts)
        says("roofline", *texts)


def test_the_cache_of_an_8b_model():
    from transformers import Qwen3Config

    from helpers.models.memory import cache_bytes

    config = Qwen3Config(num_hidden_layers=36, num_key_value_heads=8, num_attention_heads=32, head_dim=128)
    assert cache_bytes(config, 1) == 147_456
    assert f"{cache_bytes(config, 4096, 64) / 1e9:.1f}" == "38.7"
    says("roofline", "147,456", "38.7")


def test_gptq_on_two_columns_that_resemble_each_other():
    w = torch.tensor([[0.4, 0.4, 3.0, 0.0]])
    h = torch.eye(4)
    h[0, 1] = h[1, 0] = 0.8
    inputs = gptq.prepared(h, act_order=False, damping=0.0)
    assert [f"{x:.3f}" for x in inputs.upper[0, :2]] == ["1.667", "-1.333"]
    found = quant.round_to_nearest(w, by_column(2)), gptq.gptq(w, inputs, by_column(2), clip=False)
    assert [q.codes[0].tolist() for q in found] == [[0, 0, 3, 0], [0, 1, 3, 0]]
    assert [f"{awq.output_error(q.dequantize() - w, h):.3f}" for q in found] == ["0.576", "0.136"]
    says("gptq", "1.667", "-1.333", "0, 1, 3, 0", "0.576", "0.136", "0.72")
    # the least of all changes that round the first weight down, by the formula for one column
    inverse = torch.linalg.inv(h)
    change = -(0.4 / inverse[0, 0]) * inverse[0]
    assert (w[0] + change)[1].item() == pytest.approx(0.72)


@pytest.mark.parametrize(("by", "error"), [(1.0, "16.090"), (2.0, "1.090"), (3.0, "0.534")])
def test_awq_scales_a_column_that_meets_large_inputs(by, error):
    w, s = torch.tensor([[0.4, 0.7, 3.0, 0.0]]), torch.tensor([by, 1.0, 1.0, 1.0])
    second = torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0]))
    made = quant.round_to_nearest(w * s, by_column(2)).dequantize() / s
    assert f"{awq.output_error(made - w, second):.3f}" == error
    says("awq", error)


def test_the_search_of_awq_is_no_worse_than_the_hand():
    w = torch.tensor([[0.4, 0.7, 3.0, 0.0]])
    moments = Moments(torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0])), torch.tensor([10.0, 1.0, 1.0, 1.0]))
    s = awq.best_scale([w], moments, by_column(2))
    made = quant.round_to_nearest(w * s, by_column(2)).dequantize() / s
    assert awq.output_error(made - w, moments.second) < 0.534


def test_a_baseline_leaves_the_mean_and_takes_variance():
    p, slope, reward = np.array([0.25, 0.75]), np.array([0.75, -0.25]), np.array([1.0, 0.0])
    for baseline, texts in ((0.0, ("0.1875", "0.1055")), (0.25, ("0.1875", "0.0469"))):
        estimate = (reward - baseline) * slope
        mean = p @ estimate
        assert (f"{mean:.4f}", f"{p @ estimate**2 - mean**2:.4f}") == texts
        says("grpo", *texts)


def test_an_adapter_moves_by_the_gradient_seen_through_a():
    torch.manual_seed(0)
    w, a, x = torch.randn(5, 4), torch.randn(2, 4), torch.randn(4, 3)
    b = torch.zeros(5, 2, requires_grad=True)
    whole = w.clone().requires_grad_()
    (whole @ x).square().sum().backward()
    ((w + 8.0 * b @ a) @ x).square().sum().backward()  # alpha / r = 8
    torch.testing.assert_close(b.grad, 8.0 * whole.grad @ a.T)
    torch.testing.assert_close(-0.1 * 8.0 * b.grad @ a, -0.1 * 64 * whole.grad @ a.T @ a)
    assert 8 * (4096 + 4096) == 65_536 == 4096 * 4096 // 256
    assert (round(16 * 4096**2 / 1e6), round(2 * 4096**2 / 1e6), round(16 * 65_536 / 1e6)) == (268, 34, 1)
    says("lora", "65{,}536", "16,777,216", "268 MB", "34 MB", "1 MB")


def test_a_block_of_nf4():
    import bitsandbytes.functional as bnb

    points = bnb.get_4bit_type("nf4", device="cpu")
    says("lora", *(f"{x:.4f}".rstrip("0").rstrip(".") for x in points[:8].tolist()), "0.0796")
    block = torch.tensor([0.10, -0.40, 0.25, 0.50])
    nearest = points[(block[:, None] / 0.5 - points).abs().argmin(1)]
    assert [f"{x:.4f}" for x in nearest] == ["0.1609", "-0.6962", "0.4407", "1.0000"]
    says("lora", "0.1609, -0.6962, 0.4407 and 1", *(f"{0.5 * x:.3f}" for x in nearest))


def divergence(p, q, reverse):
    """KL through the loss that trains students; a head that is the identity makes log-probabilities of hidden states."""
    head = nn.Linear(3, 3, bias=False)
    head.weight.data = torch.eye(3)
    return objective.kd(q.log()[None], head, p.log()[None], head, reverse=reverse).item()


def test_forward_kl_covers_and_reverse_kl_chooses():
    p = torch.tensor([0.49, 0.49, 0.02])
    for q, texts in (
        (torch.tensor([0.96, 0.02, 0.02]), ("1.238", "0.582")),
        (torch.full((3,), 1 / 3), ("0.321", "0.681")),
    ):
        assert (f"{divergence(p, q, 0.0):.3f}", f"{divergence(p, q, 1.0):.3f}") == texts
        says("distillation", *texts)


def test_on_average_sft_on_the_teachers_tokens_has_the_gradient_of_forward_kl():
    p = torch.tensor([0.7, 0.2, 0.1])
    a = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    q = a.log_softmax(0)
    (kd,) = torch.autograd.grad((p * (p.log() - q)).sum(), a, retain_graph=True)
    sft = sum(p[v] * torch.autograd.grad(-q[v], a, retain_graph=True)[0] for v in range(3))
    torch.testing.assert_close(kd, sft)
    torch.testing.assert_close(kd, q.exp().detach() - p)


# --- lessons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", LESSONS)
def test_a_lesson_has_all_its_parts(stage):
    cells = json.loads(TEMPLATES[stage].read_text())["cells"]
    first = params.source(cells[0])
    for row in ("You know", "You need", "Time, hardware", "Makes"):
        assert f"\n| {row} |" in first
    steps = re.findall(r"(\d+) [^→]+", first.partition("**Steps.** ")[2])
    text = "\n".join(params.source(cell) for cell in cells if cell["cell_type"] == "markdown")
    assert re.findall(r"^## (\d+) · ", text, flags=re.M) == steps == [str(i + 1) for i in range(len(steps))]
    last = last_cell(stage)
    asked = re.findall(r"^(\d)\. ", last.partition("## Exercises")[2].partition("```")[0], flags=re.M)
    assert len(asked) >= 3
    assert re.findall(r"^```\{dropdown\} Solution to (\d)$", last, flags=re.M) == asked
    assert "## Summary" in last
    assert "**Next:**" in last


@pytest.mark.parametrize("stage", LESSONS)
def test_the_commands_of_a_lesson_are_allowed(stage):
    commands = re.findall(r"^lowbit run (\w+)(.*)$", last_cell(stage), flags=re.M)
    assert commands
    for name, given in commands:
        values = dict(re.findall(r" -p (\w+)=(<[^>]*>|\S+)", given))
        params.validate(params.template(TEMPLATES[name]), values, name)


def test_the_solutions_that_can_be_computed():
    row = torch.tensor([[-0.30, -0.11, 0.00, 0.07, 0.16, 0.33]])
    made = quant.round_to_nearest(row, quant.Scheme(3, "group", 64, False))
    assert made.codes.tolist() == [[0, 2, 3, 4, 5, 7]]
    assert made.dequantize()[0].tolist() == pytest.approx([-0.27, -0.09, 0, 0.09, 0.18, 0.36], abs=1e-3)
    assert "0, 2, 3, 4, 5, 7, which stand for -0.27, -0.09, 0, 0.09, 0.18 and 0.36" in last_cell("ptq")

    rewards = np.array([1.1, 0.1, 0.0, 0.0])
    scaled = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert [f"{a:.3f}" for a in scaled] == ["1.494", "-0.373", "-0.560", "-0.560"]
    assert "1.494, -0.373, -0.560 and -0.560" in last_cell("grpo")

    two = torch.tensor([0.9, 0.1, 1e-30]), torch.tensor([0.6, 0.4, 1e-30])
    assert [f"{divergence(*two, reverse):.3f}" for reverse in (0.0, 1.0)] == ["0.226", "0.311"]
    assert "= 0.226$" in last_cell("qat")
    assert "= 0.311$" in last_cell("qat")

    assert holm([0.01, 0.02, 0.04]) == pytest.approx([0.03, 0.04, 0.04])
    assert [p < 0.05 for p in holm([0.01, 0.03, 0.04])] == [True, False, False]

    chance = 2 * Fraction(1 + 15 + 105 + 455, 2**15)
    assert f"{float(chance):.3f}" == "0.035"


def test_a_new_model_knows_nothing():
    from helpers import models

    models.seed_everything(0)
    tokenizer = models.build_tokenizer()
    model = models.build("xs", tokenizer)
    ids = torch.randint(0, len(tokenizer), (8, 30))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(np.log(len(tokenizer)), abs=0.1)
    assert f"about {np.log(len(tokenizer)):.1f} with the {len(tokenizer)} tokens" in last_cell("base")


# --- copies for class -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project folder whose CITATION.cff can be changed."""
    shutil.copytree(synthetic.CHECKOUT / "notebooks", tmp_path / "notebooks")
    shutil.copyfile(synthetic.CHECKOUT / "CITATION.cff", tmp_path / "CITATION.cff")
    monkeypatch.setenv("LOWBIT_HOME", str(tmp_path))
    return tmp_path


def published_at(home, address):
    with (home / "CITATION.cff").open("a") as file:
        file.write(f"repository-code: {address}\n")


def test_the_copies_for_class_are_those_of_the_templates():
    folder = synthetic.CHECKOUT / lesson.FOLDER
    assert {path.name for path in folder.glob("*.ipynb")} == {path.name for path in TEMPLATES.values()}
    for template in TEMPLATES.values():
        assert nbformat.reads((folder / template.name).read_text(), 4) == lesson.for_class(template), (
            "run: lowbit lesson"
        )


@pytest.mark.parametrize("stage", TEMPLATES)
def test_a_copy_for_class_has_the_code_and_no_prose(stage):
    copy = synthetic.CHECKOUT / lesson.FOLDER / TEMPLATES[stage].name
    first, *rest = params.code_cells(copy)
    assert "helpers" not in {
        word for line in params.source(first).splitlines() for word in line.split() if line.startswith("from")
    }
    assert [params.source(c) for c in rest] == [params.source(c) for c in params.code_cells(TEMPLATES[stage])]
    assert rest[0]["metadata"]["tags"] == ["parameters"]
    for cell in json.loads(copy.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            assert all(line.startswith("#") for line in params.source(cell).split("\n") if line)


def test_the_first_cell_does_nothing_where_the_project_is_there(home, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it installs"))
    exec(lesson.for_class(TEMPLATES["ptq"]).cells[1].source, {})
    published_at(home, "https://github.com/someone/low-bit")
    exec(lesson.for_class(project.template("ptq")).cells[1].source, {})


def test_the_first_cell_installs_from_the_repository_or_says_what_is_missing(home, monkeypatch):
    ran = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: ran.append(command))
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ModuleNotFoundError, match="README"):
        exec(lesson.for_class(project.template("ptq")).cells[1].source, {})
    published_at(home, "https://github.com/someone/low-bit")
    exec(lesson.for_class(project.template("ptq")).cells[1].source, {})
    assert ran[0][:2] == ["git", "clone"]
    assert "https://github.com/someone/low-bit" in ran[0]
    assert ran[1][-1].endswith(f"{lesson.FOLDER}/requirements.txt")
    assert (synthetic.CHECKOUT / lesson.FOLDER / "requirements.txt").is_file()


def test_versions_for_class_are_those_of_the_lock_file():
    pinned = re.findall(
        r"^([\w-]+)==(.+)$", (synthetic.CHECKOUT / lesson.FOLDER / "requirements.txt").read_text(), re.M
    )
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (synthetic.CHECKOUT / "requirements.lock").read_text(), re.M))
    assert {"trl", "transformers"} <= {name for name, _ in pinned}
    assert all(locked[name] == version for name, version in pinned)


def test_buttons_are_there_once_the_repository_is_known(home):
    assert "colab" not in lesson.buttons("ptq")
    assert "{download}`the copy for class </class/03_ptq.ipynb>`" in lesson.buttons("ptq")
    published_at(home, "https://github.com/someone/low-bit.git")
    text = lesson.buttons("ptq")
    assert "https://colab.research.google.com/github/someone/low-bit/blob/main/notebooks/class/03_ptq.ipynb" in text
    assert "https://mybinder.org/v2/gh/someone/low-bit/main?labpath=notebooks/class/03_ptq.ipynb" in text


def test_another_address_is_refused(home):
    published_at(home, "https://example.org/x")
    with pytest.raises(UserError, match="must be https"):
        lesson.repository()


@pytest.mark.slow
def test_a_copy_for_class_makes_the_run_of_its_template(tmp_path, monkeypatch):
    import papermill

    from helpers import runs

    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    given = {"parent": "base-xs", "n": 5, "k": 0, "max_new_tokens": 8}
    copy = synthetic.CHECKOUT / lesson.FOLDER / TEMPLATES["eval"].name
    papermill.execute_notebook(copy, tmp_path / "out.ipynb", parameters=given, progress_bar=False)
    (path,) = (tmp_path / "runs" / "local" / "eval").iterdir()
    values = params.validate(params.template(TEMPLATES["eval"]), given)
    assert path.name == runs.describe("eval", values)[0].run_id


# --- prose of pages ---------------------------------------------------------------------------------------------------


def executed_copy(template):
    """An executed notebook of a template from before its prose was changed, as it is published."""
    notebook = nbformat.read(template, 4)
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = "old"
        elif cell.metadata.get("tags") == ["parameters"]:
            cell.metadata.tags = ["remove-cell"]
            cells.append(cell)
            cell = nbformat.v4.new_code_cell("# Parameters\nbits = 3", metadata={"tags": ["hide-input"]})
        else:
            cell.outputs = [nbformat.v4.new_output("stream", text=cell.source)]
        cells.append(cell)
    notebook.cells = cells
    return notebook


def test_a_page_has_the_prose_of_today_and_the_outputs_of_its_run():
    template = TEMPLATES["ptq"]
    now = nbformat.read(template, 4)
    shown = lesson.with_prose(executed_copy(template), template)
    assert [c.source for c in shown.cells if c.cell_type == "markdown"] == [
        c.source for c in now.cells if c.cell_type == "markdown"
    ]
    code = [cell for cell in shown.cells if cell.cell_type == "code"]
    assert code[1].source == "# Parameters\nbits = 3"
    assert all(cell.outputs[0].text == cell.source for cell in code[2:])
    assert len(code) == len(params.code_cells(template)) + 1


def test_a_page_with_other_code_cells_keeps_its_prose():
    template = TEMPLATES["ptq"]
    other = executed_copy(template)
    del other.cells[-2]
    before = [cell.source for cell in other.cells]
    assert [cell.source for cell in lesson.with_prose(other, template).cells] == before


# --- back matter ------------------------------------------------------------------------------------------------------


def test_how_to_cite_says_what_the_citation_file_says():
    citation = yaml.safe_load((synthetic.CHECKOUT / "CITATION.cff").read_text())
    page = (BOOK / "cite.md").read_text()
    assert f"title   = {{{citation['title']}}}" in page
    assert f"version = {{{citation['version']}}}" in page
    assert f"author  = {{{{{citation['authors'][0]['name']}}}}}" in page
    library = (BOOK / "references.bib").read_text()
    for reference, key in zip(citation["references"], ("kumar2025impact", "lv2026makes"), strict=True):
        entry = re.search(rf"@\w+{{{key},.*?\n}}", library, re.S)[0].replace("{LLMs}", "LLMs").replace("{A}", "A")
        assert reference["title"] in entry
        assert reference["notes"] in entry
        assert f"{{cite}}`{key}`" in page


def test_the_glossary_is_sorted_and_has_the_names_of_the_field():
    block = re.search(r"```\{glossary\}\n(.*?)```", (BOOK / "glossary.md").read_text(), re.S)[1]
    terms = re.findall(r"^(\S.*)$", block, flags=re.M)
    assert terms == sorted(terms, key=str.casefold)
    text = " ".join(terms)
    for name in (
        "RTN",
        "GPTQ",
        "AWQ",
        "NF4",
        "LLM.int8",
        "QAFT",
        "STE",
        "QLoRA",
        "SFT",
        "KD",
        "GRPO",
        "Dr.GRPO",
        "Rollout",
    ):
        assert name in text
    used = re.findall(r"\{term\}`([^`]+)`", block)
    assert {word.casefold() for word in used} <= {term.casefold() for term in terms}


def test_the_commands_for_instructors_are_allowed():
    text = (BOOK / "instructors.md").read_text()
    commands = re.findall(r"^lowbit run (\w+)((?: -p \S+)+)", text, flags=re.M)
    assert len(commands) >= 10
    for stage, given in commands:
        params.validate(params.template(TEMPLATES[stage]), dict(re.findall(r"-p (\w+)=(\S+)", given)), stage)


def test_negative_results_are_the_contradicted_rows():
    rows = [
        ("1", "a", "x", "y", "contradicted", 3),
        ("1", "b", "x", "y", "holds", 3),
        ("2", "c", "x", "y", "inconclusive", 2),
    ]
    found = pd.DataFrame(rows, columns=["paper", "claim", "reported", "ours", "verdict", "seeds"])
    lines = [line for line in negative.contradicted(found).splitlines() if line.startswith("|")]
    assert len(lines) == 3
    assert "| 1 | a | x | y | 3 |" in lines[2]
    assert "| 1 | 1 | 0 | 0 | 1 | 0 |" in negative.counts(found)
    assert "| 2 | 0 | 0 | 1 | 0 | 0 |" in negative.counts(found)
    assert "No row" in negative.contradicted(found[found["verdict"] == "holds"])
