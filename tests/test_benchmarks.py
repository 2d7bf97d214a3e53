"""Benchmarks: where problems come from, what is left out, how they are asked, averages, and the evaluation notebook on each."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from helpers import evaluation, grading, project, runs, sampling, tasks
from helpers import models as ours
from helpers.errors import UserError
from helpers.execute import execute
from helpers.sampling import Reply
from helpers.tasks import Problem, TaskError, benchmarks, prompts
from helpers.tasks.corpus import solution

SHARED = Path(os.environ.get("LOWBIT_SHARED", project.PACKAGE.parents[2] / "shared")) / "benchmarks"
here = pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmarks are not here")
NAMES = ("aime24", "amc23", "amc83", "math500", "minerva", "olympiadbench", "gsm8k")


def write(folder: Path, file: str, *rows: dict) -> None:
    lines = [
        json.dumps({"id": f"{file}/{i}", "problem": "?", "answer": "1", "level": None} | row)
        for i, row in enumerate(rows)
    ]
    (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A folder of benchmarks of two problems each."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in NAMES:
        rows = [{"problem": f"{name}: what is $x_{i}$?", "answer": str(i)} for i in range(2)]
        write(folder, benchmarks.SETS[name].file, *rows)
    monkeypatch.setenv("LOWBIT_DATA", str(folder))
    return folder


@here
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("aime24", 30),
        ("amc23", 40),
        ("amc83", 83),
        ("math500", 500),
        ("minerva", 272),
        ("olympiadbench", 675),
        ("gsm8k", 1319),
        ("papers", 1560),
    ],
)
def test_rows(name, rows, monkeypatch):
    monkeypatch.setenv("LOWBIT_DATA", str(SHARED))
    problems = tasks.load(name, "test", 10**6)
    assert len(problems) == len({p.id for p in problems}) == rows
    assert {p.grading for p in problems} == ({"number"} if name == "gsm8k" else {"maths"})
    if name != "papers":
        assert benchmarks.SETS[name].rows == rows


@here
def test_what_is_trained_on_is_not_measured_on(monkeypatch):
    monkeypatch.setenv("LOWBIT_DATA", str(SHARED))
    measured = {benchmarks.fingerprint(p.prompt) for name in NAMES for p in tasks.load(name, "test", 10**6)}
    for name, rows in (("math_l3to5", 5_240), ("gsm8k_train", 7_000)):
        problems, held = (tasks.load(name, split, 10**6) for split in ("train", "calibration"))
        assert len(problems) > rows
        assert 0.03 < len(held) / len(problems) < 0.07
        assert not {p.prompt for p in problems} & {p.prompt for p in held}
        assert all(p.solution for p in problems)
        assert not measured & {benchmarks.fingerprint(p.prompt) for p in problems}
    assert all("/test/" not in p.id for p in tasks.load("math_l3to5", "train", 10**6))


def test_training_rows_that_are_left_out(data):
    write(
        data,
        "math_l3to5",
        {"problem": "kept", "level": 3, "meta": {"split": "train"}},
        {"problem": "of MATH's test split", "meta": {"split": "test"}},
        {"problem": "two boxes", "meta": {"split": "train", "all_boxed": ["1", "2"]}},
        {"problem": r"MATH500: What is \( X_{1} \) ?", "meta": {"split": "train"}},  # math500's, set otherwise
    )
    assert [p.prompt for p in tasks.load("math_l3to5", "train", 10)] == ["kept"]
    assert benchmarks.fingerprint(r"Find $\frac{1}{x}$.") == benchmarks.fingerprint(r"find \( \dfrac{1}{X} \)")


def test_a_training_set_has_three_splits_and_solutions(data):
    rows = [{"problem": f"number {i}", "answer": "1,000", "solution": f"{i} <<1*1=1>>is\n#### 1000"} for i in range(60)]
    write(data, "gsm8k_train", *rows)
    splits = {split: {p.prompt for p in tasks.load("gsm8k_train", split, 100)} for split in ("train", "calibration")}
    assert splits["train"] | splits["calibration"] == {row["problem"] for row in rows}
    assert not splits["train"] & splits["calibration"]
    assert 0 < len(splits["calibration"]) < 10
    assert tasks.load("gsm8k_train", "test", 100) == tasks.load("gsm8k", "test", 100)
    with pytest.raises(TaskError, match="split = 'dev' is unknown: choose one of train, calibration, test"):
        tasks.load("gsm8k_train", "dev", 5)
    write(data, "gsm8k_train", *[row for row in rows if row["problem"] in splits["train"]])
    with pytest.raises(TaskError, match="gsm8k_train has no problem for split = 'calibration'"):
        tasks.load("gsm8k_train", "calibration", 5)


def test_a_solution_ends_in_a_box():
    worked = "She has 2+3=<<2+3=5>>5 apples.\n#### 5"
    assert solution(Problem("a", "?", "5", 0, "number", "gsm8k_train", worked)) == ("She has 2+3=5 apples.\n\\boxed{5}")
    boxed = r"So it is $\boxed{5}$."
    assert solution(Problem("a", "?", "5", 0, "maths", "math_l3to5", boxed)) == boxed
    with pytest.raises(TaskError, match="a has no solution to learn from: choose replies = teacher"):
        solution(Problem("a", "?", "5", 0, "maths", "math_l3to5"))


def test_texts_of_a_training_set(data, byte_model):
    rows = [{"problem": f"n {i}", "answer": f"{i}", "solution": "x" * (i + 1), "meta": {}} for i in range(60)]
    write(data, "math_l3to5", *rows)
    model, tokenizer = ours.load(byte_model)
    texts = sampling.training_texts("gold", "math_l3to5", model, tokenizer, 100, max_new_tokens=40)
    replies = [tokenizer.decode(ids[head:]) for ids, head in texts]
    assert 10 < len(replies) < 30  # those that are short enough
    assert all(reply.endswith("}<eos>") and "\\boxed{" in reply for reply in replies)
    seen = sampling.calibration_texts("math_l3to5", model, tokenizer, 3, max_new_tokens=4)
    held = {p.prompt for p in tasks.load("math_l3to5", "calibration", 100)}
    assert all(any(f"<user>{prompt}<" in tokenizer.decode(ids) for prompt in held) for ids in seen)
    with pytest.raises(UserError, match="none of 100 solutions of math_l3to5 is as short as max_new_tokens = 4"):
        sampling.training_texts("gold", "math_l3to5", model, tokenizer, 100, max_new_tokens=4)


def test_which_problems_follows_from_the_seed(data):
    write(data, "gsm8k_test", *({"problem": f"number {i}", "answer": str(i)} for i in range(50)))
    chosen = tasks.load("gsm8k", "test", 10, seed=1)
    assert chosen == tasks.load("gsm8k", "test", 10, seed=1) != tasks.load("gsm8k", "test", 10, seed=2)
    assert [int(p.gold) for p in chosen] == sorted(int(p.gold) for p in chosen)
    assert len(tasks.load("gsm8k", "test", 500)) == 50
    assert len(tasks.load("papers", "test", 1)) == 5  # of each


HUB = {
    "openr1_math": (
        {"problem": "r", "answer": "7", "messages": [{"content": "r"}, {"content": "<think>7</think>7"}]},
        "7",
        0,
    ),
    "numina_math": ({"problem": "s", "answer": "8", "solution": "It is 8."}, "8", 0),
    "aime24": ({"problem": "p", "answer": "025"}, "025", 0),
    "amc23": ({"question": "p", "answer": 27.0}, "27", 0),
    "amc83": ({"problem": "p", "answer": 142.0}, "142", 0),
    "math500": ({"problem": "p", "answer": r"\frac12", "level": 4}, r"\frac12", 4),
    "minerva": ({"question": "p", "answer": "4.5e33"}, "4.5e33", 0),
    "olympiadbench": ({"question": "p", "final_answer": ["$69$", "$84$"]}, "$69$, $84$", 0),
    "gsm8k": ({"question": "p", "answer": "16 - 3 = 13\n#### 1,300"}, "1300", 0),
    "math_l3to5": ({"problem": "q", "answer": "7", "level": "Level 5", "solution": r"\boxed{7}"}, "7", 5),
}


@pytest.fixture
def hub(monkeypatch):
    """A hub with one row in each repository; it notes what was asked for."""
    asked = []
    rows = {(s.repository, s.config, s.hub_split): [HUB[name][0]] for name, s in benchmarks.SETS.items() if name in HUB}

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        return rows[repository, config, split]

    monkeypatch.delenv("LOWBIT_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return SimpleNamespace(asked=asked, rows=rows)


@pytest.mark.parametrize("name", HUB)
def test_rows_of_the_hub_become_problems(name, hub):
    (problem,) = tasks.load(name, "train" if benchmarks.SETS[name].test else "test", 10)
    assert (problem.gold, problem.level, problem.benchmark) == (*HUB[name][1:], name)
    assert hub.asked[0] == (
        benchmarks.SETS[name].repository,
        benchmarks.SETS[name].config,
        benchmarks.SETS[name].hub_split,
    )


def test_the_hubs_math_is_cleaned_as_well(hub):
    rows = hub.rows["nlile/hendrycks-MATH-benchmark", None, "train"]
    kept = rows[0]
    rows += [
        kept | {"level": 2},
        kept | {"solution": r"\boxed{1} or \boxed{\frac{1}{2}}"},
        kept | {"unique_id": "test/algebra/1.json"},
    ]
    rows += [kept | {"problem": "P"}]  # every benchmark's
    assert [p.prompt for p in tasks.load("math_l3to5", "train", 10)] == ["q"]


def test_neither_folder_nor_hub(monkeypatch, tmp_path):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.delenv("LOWBIT_DATA", raising=False)
    with pytest.raises(
        TaskError, match=r"aime24 cannot be had: set LOWBIT_DATA to a folder with aime24.jsonl, or go online"
    ):
        tasks.load("aime24", "test", 5)
    monkeypatch.setenv("LOWBIT_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=r"has no aime24.jsonl, which aime24 is read from"):
        tasks.load("aime24", "test", 5)
    (tmp_path / "aime24.jsonl").write_text('{"id": "a", "problem": "p", "answer": "1"}\n{"id": 3}\n')
    with pytest.raises(TaskError, match="line 2 lacks id, problem or answer"):
        tasks.load("aime24", "test", 5)
    with pytest.raises(TaskError, match="split = 'train' is not allowed for aime24: it is a test set"):
        tasks.load("aime24", "train", 5)


def test_a_level_is_a_number_however_it_is_written(data):
    levels = {"a": 3, "b": "3", "c": "Level 4", "d": 5.0, "e": None, "f": "Level ?"}
    write(data, "math500", *({"problem": name, "level": level} for name, level in levels.items()))
    found = {p.prompt: p.level for p in tasks.load("math500", "test", 10)}
    assert found == {"a": 3, "b": 3, "c": 4, "d": 5, "e": 0, "f": 0}


def test_rows_of_another_form_are_one_sentence(data, hub, monkeypatch):
    monkeypatch.setenv("LOWBIT_DATA", str(data))
    write(data, "math_l3to5", {"problem": "p", "meta": "train"})
    with pytest.raises(TaskError, match="line 1 has a solution that is no string, or a meta that is no object"):
        tasks.load("math_l3to5", "train", 5)
    monkeypatch.delenv("LOWBIT_DATA")
    hub.rows["open-r1/OpenR1-Math-220k", "default", "train"] = [{"problem": "p", "answer": "1", "messages": [3]}]
    with pytest.raises(
        TaskError, match="open-r1/OpenR1-Math-220k has rows of another form than openr1_math is read from"
    ):
        tasks.load("openr1_math", "train", 5)


def test_a_renamed_field_is_named(hub):
    hub.rows["math-ai/amc23", None, "test"][:] = [{"problem": "p", "answer": 1}]
    with pytest.raises(TaskError, match="math-ai/amc23 has no field 'question'"):
        tasks.load("amc23", "test", 5)


def test_decoding_is_that_of_the_paper():
    assert tasks.decoding("papers") == tasks.decoding("aime24") == benchmarks.Decoding(1, 1.0, 1.0, 1024)
    assert tasks.decoding("gsm8k") == benchmarks.Decoding(3, 0.6, 0.95, 32_768)
    with pytest.raises(TaskError, match="no paper has it"):
        tasks.decoding("recall")


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    """A tiny random Qwen3 that reads any text, byte by byte."""
    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE, padding_side="left"
    )
    ours.seed_everything(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts(byte_model):
    _, tokenizer = ours.load(byte_model)
    problem = Problem("1", "What is π?", "3", 0)
    shown = {style: prompts.texts(tokenizer, [problem], style)[0] for style in tasks.STYLES}
    assert shown["raw"] == "<user>What is π?<assistant>"
    assert shown["qwen-maths"] == f"<system>{prompts.REQUEST}<user>What is π?<assistant>"
    assert shown["thinking"] == f"<user>What is π?\n{prompts.REQUEST}<assistant>"
    assert shown["no-thinking"] == shown["thinking"] + "<think></think>"
    assert tokenizer.decode(sampling.prompt_ids(tokenizer, [problem])[0]) == shown["raw"]
    tokenizer.chat_template = None
    assert prompts.texts(tokenizer, [problem])[0] == "What is π?\n\n"
    with pytest.raises(TaskError, match="prompt = 'chat' is unknown: choose one of raw, qwen-maths"):
        tasks.messages(problem, "chat")


def test_a_model_is_not_asked_what_it_cannot_read():
    tokenizer = ours.build_tokenizer()
    model = ours.build("xs", tokenizer)
    with pytest.raises(UserError, match=r"The model's tokenizer has no 'W', which the prompt of b/1 needs"):
        sampling.sample(model, tokenizer, [Problem("b/1", "What?", "1", 0)])
    with pytest.raises(UserError, match="has 202 tokens, which with max_new_tokens = 96 is more than the 256"):
        sampling.sample(model, tokenizer, [Problem("b/2", "1" * 200, "1", 0)])


def scored(sizes: dict[str, int], right: dict[str, int], k: int = 0):
    problems = [
        Problem(f"{name}/{i}", f"{name} {i}", "1", 0, "maths", name) for name, n in sizes.items() for i in range(n)
    ]
    texts = [rf"\boxed{{{int(int(p.id.split('/')[1]) < right[p.benchmark])}}}" for p in problems for _ in range(k or 1)]
    replies = [Reply(problems[i // (k or 1)].id, text, (0,), True) for i, text in enumerate(texts)]
    verdicts = grading.grade(texts, ["1"] * len(texts))
    return problems, verdicts, evaluation.summarize(problems, replies, verdicts, "papers", k)


@pytest.mark.parametrize("k", [0, 2])
def test_micro_and_macro_averages_by_hand(k):
    problems, verdicts, metrics = scored({"aime24": 10, "math500": 90}, {"aime24": 1, "math500": 81}, k)
    found = {(m.metric, m.benchmark): m for m in metrics}
    name = "avg@2" if k else "accuracy"
    assert found[f"micro {name}", "papers"].value == pytest.approx(82 / 100)
    assert found[f"macro {name}", "papers"].value == pytest.approx((0.1 + 0.9) / 2)
    assert found[name, "aime24"].value == pytest.approx(0.1)
    assert found[name, "math500"].n == 90
    macro = found[f"macro {name}", "papers"]
    parts = [evaluation.scores.mean([1.0] * r + [0.0] * (n - r), 1.0) for r, n in ((1, 10), (81, 90))]
    half = sum(((s.high - s.low) / 2) ** 2 for s in parts) ** 0.5 / 2
    assert (macro.ci_low, macro.ci_high) == pytest.approx((0.5 - half, 0.5 + half))
    assert not any("level" in m.benchmark for m in metrics)
    assert list(evaluation.by_level(metrics, "papers").index) == ["aime24", "math500"]
    if not k:
        assert list(evaluation.outcomes(problems, verdicts).loc["aime24"]) == [1, 9, 0]
        assert evaluation.levels(metrics, "papers") == {}


def test_replies_are_restored_for_their_own_problems_alone(tmp_path):
    problems, verdicts, _ = scored({"aime24": 3}, {"aime24": 1})
    replies = [Reply(p.id, "a\nb é", (1, 2), False) for p in problems]
    evaluation.store(tmp_path / "kept.jsonl.gz", problems, replies, verdicts)
    again = evaluation.restore(tmp_path / "kept.jsonl.gz", problems)
    assert [(r.problem_id, r.text, len(r.ids), r.finished) for r in again] == [
        (p.id, "a\nb é", 2, False) for p in problems
    ]
    with pytest.raises(UserError, match="holds 3 replies to other problems than the 2 asked for"):
        evaluation.restore(tmp_path / "kept.jsonl.gz", problems[:2])
    with pytest.raises(UserError, match="is not there"):
        evaluation.restore(tmp_path / "none.jsonl.gz", problems)


@pytest.mark.slow
@here
def test_the_evaluation_notebook_on_each_benchmark(byte_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LOWBIT_DATA", str(SHARED))
    given = {"parent": str(byte_model), "n": 20, "k": 1, "max_new_tokens": 4, "batch_size": 20}
    for task in ("papers", "gsm8k"):
        with (tmp_path / "out").open("w") as out:
            made = execute("eval", given | {"task": task, "prompt": "thinking"}, out=out)
            again = execute("eval", given | {"task": task, "prompt": "thinking", "replies": made.run_id}, out=out)
        metrics = runs.read(made.path).metrics
        assert runs.read(again.path).metrics == metrics
        assert (again.path / "sampled.jsonl.gz").read_bytes() == (made.path / "sampled.jsonl.gz").read_bytes()
        sizes = {m.benchmark: m.n for m in metrics}
        assert sizes == (
            dict.fromkeys(benchmarks.GROUPS["papers"], 20) | {"papers": 100} if task == "papers" else {"gsm8k": 20}
        )
    with pytest.raises(UserError, match="are those of"):
        execute(
            "eval",
            given | {"parent": "base-xs", "task": "gsm8k", "replies": made.run_id},
            out=(tmp_path / "out").open("w"),
        )
