"""Estimates: shapes against real parameter counts, what each stage costs more for, and what is said of a run that does not fit."""

from dataclasses import replace

import pytest

from helpers import estimate, models, params, project, shapes
from helpers.estimate import GIB
from helpers.models import tiny
from helpers.sampling import engine
from helpers.shapes import SHAPES
from helpers.study import Job, plan


def job(stage="grpo", parent="Qwen/Qwen3-0.6B", **given):
    declared = params.template(project.template(stage))
    return Job("one", stage, params.validate(declared, {"parent": parent, **given}, stage), [], "id", project.root())


def own(stage="grpo", parent="Qwen/Qwen3-0.6B", **given):
    return estimate.of_study([job(stage, parent, **given)])["one"]


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Qwen3-0.6B", 596),
        ("Qwen3-1.7B", 1721),
        ("Qwen3-4B", 4022),
        ("Qwen3-8B", 8191),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1777),
        ("SmolLM2-135M-Instruct", 134.5),
    ],
)
def test_shapes_have_as_many_weights_as_the_models(name, millions):
    assert SHAPES[name].parameters / 1e6 == pytest.approx(millions, rel=0.002)


def test_a_shape_is_that_of_the_checkpoint(tmp_path):
    model, _ = models.load(tiny.save("qwen3", tmp_path / "tiny"))
    shape, bits = estimate.external({"parent": str(tmp_path / "tiny")})
    assert shape.parameters == pytest.approx(models.count_parameters(model), rel=0.01)  # norms are not counted
    assert (bits, shape.linear) == (
        32,
        sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj")),
    )
    assert estimate.external({"parent": "someone/unknown"}) is None
    assert shapes.of_config({"hidden_size": 8}) is None
    config = tmp_path / "tiny" / "config.json"
    for broken in (config.read_text().replace('"vocab_size"', '"words"'), '{"hidden_size": "64"', "{"):
        config.write_text(broken)
        assert estimate.external({"parent": str(tmp_path / "tiny")}) is None


def test_the_teacher_is_not_taken_for_the_parent():
    teacher = replace(job("qat", "Qwen/Qwen3-8B"), name="teacher", run_id="teacher")
    student = replace(job("qat", teacher="teacher"), parents=["teacher"])
    assert estimate.of_study([teacher, student])["one"].gib == pytest.approx(own("qat").gib)


def test_what_costs_more():
    full = own(max_new_tokens=512)
    assert full.gib * GIB > 20 * SHAPES["Qwen3-0.6B"].parameters  # weights, gradients, two moments, the start
    assert own(policy="qaft", max_new_tokens=512).gib > full.gib > own(policy="qlora", max_new_tokens=512).gib
    assert full.gib > own(micro_batch=1, max_new_tokens=512).gib
    start = full.gib - own(kl_every=0, max_new_tokens=512).gib
    assert start * GIB == pytest.approx(4 * SHAPES["Qwen3-0.6B"].parameters)
    for stage, texts in (("grpo", 16 * 8), ("qat", 64)):
        less = own(stage, checkpointing=True, max_new_tokens=512)
        more = own(stage, max_new_tokens=512)
        assert less.hours > more.hours
        # of 28 layers 27 keep no more than their inputs, 1024 numbers a token
        kept = 28 * 1024 - 27 / 28 * SHAPES["Qwen3-0.6B"].kept
        assert (less.gib - more.gib) * GIB == pytest.approx(4 * texts * 712 * kept)
    assert own(steps=600, max_new_tokens=512).hours > 5 * own(steps=60, max_new_tokens=512).hours
    assert own(parent="Qwen/Qwen3-8B").gib > 5 * full.gib / 4
    assert own("ptq", method="gptq").hours > own("ptq", method="rtn").hours
    assert own("qat", objective="kd").hours > own("qat", objective="sft", replies="teacher").hours
    assert own("qat", replies="student").hours > own("qat").hours
    one, four = (own("eval", task="papers", n=10_000, k=k, max_new_tokens=2048) for k in (0, 3))
    assert four.hours > 2 * one.hours
    asked = {"task": "papers", "n": 10_000, "k": 3, "max_new_tokens": 2048, "batch_size": 64}
    half, four = (own("eval", **asked, precision=kind) for kind in ("bfloat16", "float32"))
    assert half.hours < 0.7 * four.hours
    assert half.gib < 0.6 * four.gib
    assert own("eval", task="gsm8k", decoding="paper").gib > own("eval", task="gsm8k").gib
    assert estimate.of_job("base", {"size": "s", "steps": 10, "batch_size": 8}, (SHAPES["s"], 32)).hours > 0
    assert estimate.of_job("pareto", {}, (SHAPES["s"], 32)) is None


def test_the_cache_stays_while_the_backward_pass_runs_and_is_a_share_of_the_gpu():
    assert estimate.CACHE == engine.CACHE
    shape, given = SHAPES["Qwen3-0.6B"], {"max_new_tokens": 2048, "micro_batch": 1, "prompts_per_step": 1}
    few, many = (own(group_size=n, **given).gib for n in (2, 8))
    assert many - few == pytest.approx(6 * ((200 + 2048) * shape.cache + 3 * shape.vocabulary) * 4 / GIB)
    most = job("eval", task="gsm8k", n=1000, k=0, batch_size=1000, max_new_tokens=2048)
    large, small = (estimate.of_study([most], gib)["one"] for gib in (139, 24))
    assert small.gib < 24 < large.gib < 0.5 * 139
    assert small.hours > large.hours


def test_a_packed_model_is_smaller_in_its_evaluation():
    jobs = [job("ptq", "Qwen/Qwen3-8B", method="gptq", bits=4, group_size=128)]
    jobs.append(Job("two", "eval", job("eval", n=10, k=0).parameters, ["one"], "id2", project.root()))
    small = estimate.of_study(jobs[::-1])["two"]  # in any order
    assert small.gib < own("eval", "Qwen/Qwen3-8B", n=10, k=0).gib / 2


def test_what_would_fit_is_said():
    grpo = job(parent="Qwen/Qwen3-8B", max_new_tokens=512, micro_batch=4).parameters
    needs = estimate.of_job("grpo", grpo, estimate.external(grpo))
    assert needs.gib > 139
    assert "policy = qlora, micro_batch = 1 would fit" in estimate.what_fits("grpo", grpo, needs, 139)
    assert f"it takes a GPU of {needs.gib:.0f} GiB" in estimate.what_fits("grpo", grpo, needs, 1)
    small = job(max_new_tokens=512).parameters
    needs = estimate.of_job("grpo", small, estimate.external(small))
    assert "micro_batch = 1 would fit" in estimate.what_fits("grpo", small, needs, 40)


def test_a_run_that_ran_out_of_memory_is_told_what_would_fit():
    told = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
    big = job(parent="Qwen/Qwen3-8B", max_new_tokens=512, micro_batch=4).parameters
    said = estimate.after_the_fact("grpo", big, told)
    assert said.startswith("79 GiB of GPU memory are too little, it needs about 219: policy = qlora")
    said = estimate.after_the_fact("grpo", job(max_new_tokens=64, micro_batch=1).parameters, told)
    assert said.endswith("other work holds some of it: take a smaller micro_batch, max_new_tokens")


@pytest.mark.parametrize("name", ["micro", "qwen3"])
def test_every_run_that_needs_a_gpu_has_an_estimate(name):
    jobs = plan(name)
    needs = estimate.of_study(jobs)
    assert [j.name for j in jobs if needs[j.name] is None] == [j.name for j in jobs if j.stage == "pareto"]
