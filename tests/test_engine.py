"""The engine against `generate`: the same tokens under greedy decoding, the same distribution when sampling, whatever the layers.

On the CPU a step runs as it is, through the references of `kernels.decode`; on a GPU the same tests run it captured.
"""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from helpers import models, sampling, tasks
from helpers.errors import UserError
from helpers.kernels import decode
from helpers.models import activations
from helpers.quant import Scheme, fake, quantize
from helpers.sampling import engine as engines
from helpers.sampling.backends import COLDEST, Settings, backend_of, with_logprobs
from helpers.sampling.engine import CHECK, Engine, engine_for, fingerprint
from helpers.training import grpo

PROBLEMS = tasks.load("arithmetic", "test", 30, seed=0)


@pytest.fixture(scope="module", params=["base-xs", "base-s"])
def trained(request):
    return models.load(request.param)


@pytest.fixture(scope="module")
def pair():
    return models.load("base-xs")


def low_bit(model, packed):
    model = copy.deepcopy(model)
    fake.insert(model, Scheme.parse("w4g32"))
    if packed:
        fake.pack(model)
    return model


def with_lora(model):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config).eval()


def fresh(model, config=LlamaConfig, **settings):
    """Another architecture with random weights."""
    torch.manual_seed(0)
    own = {name: getattr(model.config, name) for name in ("vocab_size", "pad_token_id", "eos_token_id")}
    config = config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=None, **own, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().to(model.device)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def same(model, tokenizer, problems=PROBLEMS, **settings):
    """The replies, which must be those of `generate`."""
    found, expected = (sampling.sample(model, tokenizer, problems, backend=b, **settings) for b in ("graph", "hf"))
    assert found == expected
    return found


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("limit", [1, CHECK - 1, CHECK, CHECK + 1, 40])
def test_greedy_is_that_of_generate(trained, limit):
    replies = same(*trained, max_new_tokens=limit, batch_size=13)  # prompts of unequal lengths, the last batch not full
    assert {len(r.ids) == limit for r in replies if not r.finished} <= {True}


def test_one_prompt_and_prompts_of_many_lengths(pair):
    same(*pair, PROBLEMS[:1])
    long = [tasks.Problem(str(n), "1+" * n + "1=?", "", 1) for n in (0, 1, 15, 16, 40)]
    same(*pair, long, batch_size=2, max_new_tokens=20)


def test_any_of_several_marks_ends_a_reply(pair, monkeypatch):
    model, tokenizer = pair
    written = sampling.sample(model, tokenizer, PROBLEMS)
    ends = [tokenizer.eos_token_id, max(r.ids[-2] for r in written), min(r.ids[2] for r in written)]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    replies = same(model, tokenizer)
    assert len({r.ids[-1] for r in replies}) > 1
    assert all(not set(r.ids[:-1]) & set(ends) for r in replies)


@pytest.mark.parametrize("packed", [False, True])
def test_low_bit_layers(pair, packed):
    model = low_bit(pair[0], packed)
    with fake.materialized(model):
        same(model, pair[1])
    if not packed:
        same(model, pair[1], max_new_tokens=10)  # quantized at every token


def test_adapters_and_bitsandbytes(pair):
    model, tokenizer = copy.deepcopy(pair[0]), pair[1]
    same(with_lora(model), tokenizer)
    quantize(model, "bnb", "nf4")
    same(model, tokenizer)


@pytest.mark.parametrize(
    "settings", [{}, {"rope_parameters": LLAMA3}, {"config": Qwen2Config}, {"attention_bias": True}]
)
def test_other_architectures(pair, settings):
    same(fresh(pair[0], **settings), pair[1], max_new_tokens=20)


def test_other_attention(pair):
    model, tokenizer = pair
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    same(eager, tokenizer)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_simulated_activations_and_cache(pair, kind):
    """The last digit of a sum can turn a rounding, so tokens may part; but the engine is much closer to the simulation than to
    the model without it."""
    plain = copy.deepcopy(pair[0]) if kind == "qwen3" else fresh(pair[0])
    model = copy.deepcopy(plain)
    activations.simulate(model, activation_bits=8, cache_bits=4)
    prompts = sampling.prompt_ids(pair[1], PROBLEMS[:9])
    drawn = with_logprobs(model, prompts, Settings(20, (), 0, 99, temperature=1.0))
    of_simulation, of_plain = (difference(other, prompts, drawn) for other in (model, plain))
    assert 0 < of_simulation < 0.1 * of_plain


def difference(model, prompts, drawn):
    """Mean difference between log-probabilities and those of a forward over the whole text."""
    found = []
    for prompt, (ids, logs) in zip(prompts, drawn, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1]
        found.append((logits.float().log_softmax(-1)[range(len(ids)), ids].cpu() - torch.tensor(logs)).abs())
    return float(torch.cat(found).mean())


def test_replies_do_not_depend_on_how_many_rows_they_share(pair):
    """Waiting prompts take the rows of replies that have ended, and a prompt may be asked several times."""
    model, tokenizer = pair
    prompts = sampling.prompt_ids(tokenizer, [*PROBLEMS, *PROBLEMS[:7]])
    ends = (tokenizer.eos_token_id,)
    one, few, all_at_once = (
        [ids for ids, _ in with_logprobs(model, prompts, Settings(40, ends, 0, rows))] for rows in (1, 5, 99)
    )
    assert one == few == all_at_once
    assert one[:7] == one[-7:]
    assert len({len(ids) for ids in one}) > 3


def test_a_small_gpu_gets_fewer_rows(pair, monkeypatch):
    """xs has 3 layers of 2 heads of 16 numbers, keys and values: 768 bytes a token in float32, 49,152 bytes for 64 tokens."""
    monkeypatch.setattr(engines, "memory_of", lambda device: 49_152 * 10)
    model = copy.deepcopy(pair[0])
    assert [engine_for(model, rows, 60, 20, (1,), 0.0, 0, 1.0).rows for rows in (3, 99)] == [3, 4]
    assert engine_for(model, 99, 1_000, 20, (1,), 0.0, 0, 1.0).rows == 1


def test_simulated_norms_and_hooked_modules_are_called(pair):
    model = copy.deepcopy(pair[0])
    called = []
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(model.model.layers[1], name).register_forward_hook(lambda *_: called.append(1))
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, args, output: 1.1 * output)
    same(model, pair[1], max_new_tokens=10)
    assert called


class Operators(TorchDispatchMode):
    """The names of all operators that are called while this is open."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "fake-quantized", "packed", "adapter", "simulated", "llama"])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 5, 0.9)])
def test_a_step_never_makes_the_host_wait(pair, kind, temperature, top_k, top_p):
    """Nor does it make tensors from numbers of the host: a CUDA graph could not be captured."""
    model, tokenizer = pair
    if kind in ("fake-quantized", "packed"):
        model = low_bit(model, kind == "packed")
    elif kind != "plain":
        model = {"adapter": with_lora, "simulated": copy.deepcopy, "llama": fresh}[kind](model)
    if kind == "simulated":
        activations.simulate(model, activation_bits=8, cache_bits=8)
    engine = engine_of((model, tokenizer), 4, 20, temperature=temperature, top_k=top_k, top_p=top_p)
    engine.generate(sampling.prompt_ids(tokenizer, PROBLEMS[:4]))
    engine._clear(engine.model())
    places = [t.data_ptr() for t in engine.state.all()]
    with Operators() as seen, torch.no_grad():
        engine._step(engine.model(), engine.width)
    assert not seen.names & {"_local_scalar_dense", "lift_fresh", "nonzero", "equal", "masked_select", "unique_dim"}
    assert places == [t.data_ptr() for t in engine.state.all()]


# ---------------------------------------------------------------- sampling


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


@gpu
def test_a_step_is_captured_and_what_cannot_be_runs_as_it_is(pair, recwarn):
    model, tokenizer = pair
    prompts = sampling.prompt_ids(tokenizer, PROBLEMS)
    settings = {"rows": len(prompts), "limit": 40}
    engine = engine_of(pair, **settings)
    expected = engine.generate(prompts)
    assert engine.graph is not None
    waiting = copy.deepcopy(model)
    waiting.lm_head.register_forward_hook(lambda module, args, output: output.sum().item() and None)
    engine = engine_of((waiting, tokenizer), **settings)
    assert [ids for ids, _ in engine.generate(prompts)] == [ids for ids, _ in expected]
    assert engine.graph is None
    assert [w for w in recwarn if "no CUDA graph of a decoding step" in str(w.message)]
    sampling.sample(*pair, PROBLEMS, temperature=1.0)  # random numbers can still be drawn, and a step captured
    assert engines.ENGINES[model].graph is not None


@gpu
def test_a_graph_is_kept_while_nothing_but_numbers_changes(pair):
    model, tokenizer = copy.deepcopy(pair[0]), pair[1]
    same(model, tokenizer)
    graph = engines.ENGINES[model].graph
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.rand_like(model.model.norm.weight))
    same(model, tokenizer)
    assert engines.ENGINES[model].graph is graph
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn_like(model.model.layers[0].mlp.up_proj.weight) / 8
    same(model, tokenizer)
    assert engines.ENGINES[model].graph is not graph


def test_a_fingerprint_sees_what_a_graph_depends_on(pair):
    model = low_bit(pair[0], packed=False)
    layer = model.model.layers[1].mlp.down_proj
    seen = [fingerprint(model)]
    layer.weight.data.mul_(2)
    assert fingerprint(model) == seen[0]
    for change in (
        lambda: setattr(layer.weight, "data", layer.weight.data.clone()),
        lambda: setattr(layer, "held", layer.weight.data),
        lambda: setattr(layer, "where", "nowhere"),
        lambda: layer.register_forward_hook(lambda *_: None),
        lambda: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    ):
        change()
        seen.append(fingerprint(model))
    assert all(x != y for x, y in zip(seen[1:], seen, strict=False))


def test_a_fingerprint_sees_what_lists_hold(pair):
    """PEFT notes in a list which adapters are merged, and appends to it."""
    model = with_lora(pair[0])
    base = model.get_base_model()
    before = fingerprint(base)
    assert fingerprint(base) == before
    model.merge_adapter()
    assert fingerprint(base) != before
    model.unmerge_adapter()
    assert fingerprint(base) == before


def test_an_engine_is_kept_for_a_rollout_of_its_size_and_no_longer_than_its_model(pair):
    model = copy.deepcopy(pair[0])
    first = engine_for(model, 4, 60, 20, (1,), 0.0, 0, 1.0)
    assert engine_for(model, 4, 50, 20, (1,), 0.0, 0, 1.0) is first
    assert engine_for(model, 4, 90, 20, (1,), 0.0, 0, 1.0) is not first
    assert engine_for(copy.deepcopy(model), 4, 60, 20, (1,), 0.0, 0, 1.0) is not first
    kept = len(engines.ENGINES)
    del model, first
    assert len(engines.ENGINES) < kept


def test_an_engine_does_not_follow_its_model_to_another_device(pair):
    model = copy.deepcopy(pair[0])
    first = engine_for(model, 4, 60, 20, (1,), 0.0, 0, 1.0)
    assert engine_for(model.to("meta"), 4, 60, 20, (1,), 0.0, 0, 1.0) is not first


def test_an_engine_from_inference_mode_is_used_outside_of_it(pair):
    model, settings = copy.deepcopy(pair[0]), Settings(12, (), 0, 4, temperature=1.0)
    prompts = sampling.prompt_ids(pair[1], PROBLEMS[:4])
    torch.manual_seed(0)
    with torch.inference_mode():
        inside = with_logprobs(model, prompts, settings)
    kept = engines.ENGINES[model]
    torch.manual_seed(0)
    assert with_logprobs(model, prompts, settings) == inside
    assert engines.ENGINES[model] is kept
    assert not any(t.is_inference() for t in (kept.seed, kept.clock, *kept.state.all(), *kept.decoder.cache))


def engine_of(pair, rows, limit, **settings):
    model, tokenizer = pair
    return Engine(model, rows, 128, limit, [tokenizer.eos_token_id], **settings)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.1, 1.0), (0.05, 1.0), (0.1, 0.8)])
def test_draws_follow_the_model(pair, temperature, top_p):
    """First tokens against the softmax, by a chi-square test at a level that fails once in ten thousand."""
    model, tokenizer = fresh(pair[0]), pair[1]  # one that is not sure of a token
    n, (ids,) = 4_000, sampling.prompt_ids(tokenizer, PROBLEMS[:1])
    torch.manual_seed(0)
    drawn = engine_of((model, tokenizer), n, 1, temperature=temperature, top_p=top_p).generate([ids] * n)
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device)).logits[0, -1].double().cpu()
    p = (logits / temperature).softmax(-1)
    assert all(logprobs == pytest.approx([float(p[tokens[0]].log())], abs=1e-4) for tokens, logprobs in drawn)
    order = p.argsort(descending=True)
    kept = order[: int((p[order].cumsum(0) < top_p).sum()) + 1] if top_p < 1 else order
    counts = torch.bincount(torch.tensor([tokens[0] for tokens, _ in drawn]), minlength=len(p))
    assert counts[kept].sum() == n  # nothing outside the nucleus
    common = kept[p[kept] * n > 5]
    expected = p[common] / p[common].sum() * counts[common].sum()
    assert len(common) > 3
    assert stats.chisquare(counts[common].numpy(), expected.numpy()).pvalue > 1e-4


def test_what_may_be_drawn_by_hand():
    logs = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
    kept = [(decode.allowed(logs, 1.0, 0, p) > -torch.inf).int().tolist() for p in (0.45, 0.7, 0.8, 1.0)]
    assert [rows[0] for rows in kept] == [[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert [sum(rows[1]) for rows in kept] == [1, 1, 1, 4]
    # the nucleus is that of the tokens that `top_k` left: 0.5 of 0.75 is less than 0.7 of it
    kept = [(decode.allowed(logs, 1.0, 2, p) > -torch.inf).int().tolist()[0] for p in (0.6, 0.7)]
    assert kept == [[0, 1, 0, 0], [0, 1, 0, 1]]


def test_log_probabilities_are_those_of_a_forward_over_the_whole_text(trained):
    model, tokenizer = trained
    prompts = sampling.prompt_ids(tokenizer, PROBLEMS[:12])
    torch.manual_seed(0)
    engine = engine_of(trained, 8, 40, temperature=0.8)
    for _ in range(2):  # the second time over the first one's leftovers
        drawn = engine.generate(prompts)
        for prompt, (tokens, logprobs) in zip(prompts, drawn, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0].float()
            expected = (logits[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)[range(len(tokens)), tokens]
            assert torch.tensor(logprobs) == pytest.approx(expected.cpu(), abs=1e-4)


def test_no_random_number_is_used_twice(pair, monkeypatch):
    """A kernel draws row b's number of a step from the seed and step * B + b, also where few waiting prompts are begun."""
    model, tokenizer = pair
    used = []

    def draw(logits, temperature, top_k, top_p, seed, clock):
        rows = len(logits)
        used.extend((seed.item(), clock.item() * rows + row) for row in range(rows))
        return of_reference(logits, temperature, top_k, top_p, seed, clock)

    of_reference = decode.draw
    monkeypatch.setattr(decode, "draw", draw)
    engine = engine_of((model, tokenizer), 5, 40, temperature=1.0)
    engine.lean = False  # as on a GPU, where all rows are kept
    engine.generate(sampling.prompt_ids(tokenizer, PROBLEMS))
    assert len(used) > 200
    assert len(set(used)) == len(used)


def test_a_seed_repeats_its_replies(pair):
    def draw(seed):
        return sampling.sample(*pair, PROBLEMS, k=2, temperature=1.0, batch_size=16, seed=seed, backend="graph")

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


# ---------------------------------------------------------------- the choice of a back end, training


def test_the_back_end_is_chosen(pair, monkeypatch):
    model = pair[0]
    monkeypatch.delenv("LOWBIT_SAMPLER", raising=False)
    assert (backend_of(model), backend_of(with_lora(model))) == ("graph", "graph")
    monkeypatch.setenv("LOWBIT_SAMPLER", "hf")
    assert (backend_of(model), backend_of(model, "graph")) == ("hf", "graph")
    monkeypatch.setenv("LOWBIT_SAMPLER", "grph")
    with pytest.raises(UserError, match=r"the sampler 'grph' is unknown: choose one of graph, hf, vllm\."):
        backend_of(model)


class Optional:
    optional = True

    def hook(self, *_):
        """Nothing that a step needs."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.config, "layer_types", ["sliding_attention"] * 3), "it has sliding attention"),
        (lambda m: setattr(m.config, "model_type", "gemma"), "its architecture gemma is none of llama, qwen2, qwen3"),
        (lambda m: setattr(m.config, "hidden_act", "gelu"), "its activation is gelu"),
        (lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"), "its rotation dynamic depends on the length"),
        (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None), "there are hooks on modules"),
        (lambda m: m.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None), "there are hooks on modules"),
        (lambda m: m.model.rotary_emb.register_forward_pre_hook(lambda *_: None), "there are hooks on modules"),
        (lambda m: m.register_forward_hook(lambda *_: None), "there are hooks on modules"),
        (lambda m: quantize(m, "bnb", "int8"), "it has LLM.int8 layers"),
    ],
)
def test_models_whose_step_is_not_taken(pair, monkeypatch, change, reason):
    monkeypatch.delenv("LOWBIT_SAMPLER", raising=False)
    model = copy.deepcopy(pair[0])
    model.model.register_forward_hook(Optional().hook)
    assert backend_of(model) == "graph"
    change(model)
    assert backend_of(model) == "hf"
    with pytest.raises(UserError, match=f"^backend = 'graph' cannot sample this model: {reason}.*; use 'hf'\\.$"):
        backend_of(model, "graph")


def test_a_forward_of_the_model_s_own_is_no_reason(pair, monkeypatch):
    """TRL sets one, which does the same."""
    monkeypatch.delenv("LOWBIT_SAMPLER", raising=False)
    model = copy.deepcopy(pair[0])
    model.forward = model.forward
    assert backend_of(model) == "graph"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_p": 0.0}, "top_p = 0.0 is out of range: it must be above 0 and at most 1."),
        ({"top_p": 1.5}, "top_p = 1.5 is out of range: it must be above 0 and at most 1."),
        ({"top_k": -1}, "top_k = -1 is out of range: it must be at least 0."),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 is out of range: it must be at least 1."),
        ({"temperature": -1.0}, "temperature = -1.0 is out of range: it must be 0 or at least 1e-06."),
        ({"temperature": 1e-40}, "temperature = 1e-40 is out of range: it must be 0 or at least 1e-06."),
        ({"temperature": float("nan")}, "temperature = nan is out of range: it must be 0 or at least 1e-06."),
    ],
)
def test_settings_that_nothing_can_be_drawn_with(pair, settings, sentence):
    with pytest.raises(UserError) as error:
        sampling.sample(*pair, PROBLEMS[:2], **{"temperature": 1.0} | settings)
    assert str(error.value) == sentence


def test_the_lowest_temperature_takes_the_likeliest(pair):
    settings = {"max_new_tokens": 10, "backend": "graph"}
    coldest, greedy = (sampling.sample(*pair, PROBLEMS, temperature=t, **settings) for t in (COLDEST, 0.0))
    assert coldest == greedy


@pytest.mark.parametrize("prompts", [[[], [5]], [[5], []], [[]]])
def test_a_prompt_without_tokens(pair, prompts):
    with pytest.raises(UserError, match=r"^a prompt has no tokens: nothing follows from it\.$"):
        with_logprobs(pair[0], prompts, Settings(4, (), 0, 2))


def test_vllm_is_given_the_policy_and_token_ids(pair, monkeypatch):
    """Through a stand-in for the package."""
    model, tokenizer = copy.deepcopy(pair[0]).cpu(), pair[1]
    with pytest.raises(UserError, match="backend = 'vllm' cannot sample this model: vllm is not installed"):
        sampling.sample(model, tokenizer, PROBLEMS, backend="vllm")
    seen = {}

    class LLM:
        def __init__(self, model, **settings):
            self.model = AutoModelForCausalLM.from_pretrained(model).eval()

        def generate(self, prompts, params):
            seen.update(params)
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            settings = Settings(params["max_tokens"], tuple(params["stop_token_ids"]), 0, len(ids))
            replies = [found for found, _ in with_logprobs(self.model, ids, settings)]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=found)]) for found in replies]

    stand_in = SimpleNamespace(LLM=LLM, SamplingParams=dict, __spec__=SimpleNamespace(name="vllm"))
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    found = sampling.sample(model, tokenizer, PROBLEMS, backend="vllm")
    assert found == sampling.sample(model, tokenizer, PROBLEMS)
    assert (seen["temperature"], seen["top_k"], seen["top_p"], seen["max_tokens"]) == (0.0, -1, 1.0, 96)
    for other in (with_lora(model), low_bit(model, False), low_bit(model, True)):
        with pytest.raises(UserError, match="it computes with low-bit or adapted layers"):
            backend_of(other, "vllm")


def test_grpo_trains_a_model_that_was_just_sampled(pair, monkeypatch):
    """`sample` is in inference mode and a rollout is not, and both are of one engine."""
    monkeypatch.delenv("LOWBIT_SAMPLER", raising=False)
    model, problems = copy.deepcopy(pair[0]), tasks.load("arithmetic", "train", 8, seed=0)
    sampling.sample(model, pair[1], problems, temperature=1.0, max_new_tokens=16)
    options = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 16, "kl_every": 0}
    assert len(grpo.train(model, pair[1], problems, steps=1, **options)) == 1


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("sampler", ["graph", "hf"])
def test_grpo_samples_with_either(pair, monkeypatch, quantized, sampler):
    monkeypatch.setenv("LOWBIT_SAMPLER", sampler)
    model = low_bit(pair[0], False) if quantized else copy.deepcopy(pair[0])
    problems = tasks.load("arithmetic", "train", 8, seed=0)
    rows = grpo.train(model, pair[1], problems, steps=2, prompts_per_step=4, group_size=4, max_new_tokens=40)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["mismatch_mean"] < (1e-3 if torch.cuda.is_available() else 1e-5) for row in rows)  # TF32 on a GPU
