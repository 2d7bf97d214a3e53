"""The engine against `generate`: the same tokens under greedy decoding, the same distribution when sampling, whatever the layers.

On the CPU the step runs as it is; on a GPU the same tests run it captured.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import models, sampling, tasks
from helpers.errors import UserError
from helpers.models import activations
from helpers.quant import Scheme, fake
from helpers.sampling.engine import CHECK, Engine, backend_of, nucleus
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


def llama(model):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=model.config.pad_token_id, bos_token_id=None,
        eos_token_id=model.config.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(model.device)


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


def test_adapters_other_architectures_other_attention(pair):
    model, tokenizer = pair
    same(with_lora(model), tokenizer)
    same(llama(model), tokenizer, max_new_tokens=20)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    same(eager, tokenizer)


def test_simulated_activations_and_cache(pair):
    model = copy.deepcopy(pair[0])
    activations.simulate(model, activation_bits=8, cache_bits=4)
    same(model, pair[1])


class Operators(TorchDispatchMode):
    """The names of all operators that are called while this is open."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "fake-quantized", "packed", "adapter", "simulated", "llama"])
def test_a_step_never_makes_the_host_wait(pair, kind):
    """Nor does it make tensors from numbers of the host: a CUDA graph could not be captured."""
    model, tokenizer = pair
    if kind in ("fake-quantized", "packed"):
        model = low_bit(model, kind == "packed")
    elif kind != "plain":
        model = {"adapter": with_lora, "simulated": copy.deepcopy, "llama": llama}[kind](model)
    if kind == "simulated":
        activations.simulate(model, activation_bits=8, cache_bits=8)
    engine = engine_of((model, tokenizer), 4, 20, temperature=1.0, top_p=0.9)
    engine.generate(sampling.prompt_ids(tokenizer, PROBLEMS[:4]))
    places = [t.data_ptr() for t in vars(engine).values() if isinstance(t, torch.Tensor)]
    engine.count.zero_()
    with Operators() as seen, torch.no_grad():
        engine._step()
    assert not seen.names & {"_local_scalar_dense", "lift_fresh", "nonzero", "equal", "masked_select", "unique_dim"}
    assert places == [t.data_ptr() for t in vars(engine).values() if isinstance(t, torch.Tensor)]


# ---------------------------------------------------------------- sampling


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_step_is_captured_and_what_cannot_be_runs_as_it_is(pair, recwarn):
    model, tokenizer = pair
    prompts = sampling.prompt_ids(tokenizer, PROBLEMS)
    settings = {"rows": len(prompts), "limit": 40, "temperature": 0.0}
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


def engine_of(pair, rows, limit, **settings):
    model, tokenizer = pair
    return Engine(model, rows, 64, limit, [tokenizer.eos_token_id], tokenizer.pad_token_id, **settings)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.1, 1.0), (0.05, 1.0), (0.1, 0.8)])
def test_draws_follow_the_model(pair, temperature, top_p):
    """First tokens against the softmax, by a chi-square test at a level that fails once in ten thousand."""
    model, tokenizer = llama(pair[0]), pair[1]  # one that is not sure of a token
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


def test_nucleus_by_hand():
    logs = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
    kept = [[(row > -torch.inf).tolist() for row in nucleus(logs, p)] for p in (0.45, 0.7, 0.8, 1.0)]
    first = [[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert [rows[0] for rows in kept] == first
    assert [sum(rows[1]) for rows in kept] == [1, 1, 1, 4]


def test_log_probabilities_are_those_of_a_forward_over_the_whole_text(trained):
    model, tokenizer = trained
    prompts = sampling.prompt_ids(tokenizer, PROBLEMS)
    torch.manual_seed(0)
    engine = engine_of(trained, 32, 40, temperature=0.8)
    for _ in range(2):  # the second time over the first one's leftovers
        drawn = engine.generate(prompts)
        for prompt, (tokens, logprobs) in zip(prompts, drawn, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0].float()
            expected = (logits[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)[range(len(tokens)), tokens]
            assert torch.tensor(logprobs) == pytest.approx(expected.cpu(), abs=1e-4)


def test_a_seed_repeats_its_replies(pair):
    def draw(seed):
        return sampling.sample(*pair, PROBLEMS, k=2, temperature=1.0, batch_size=16, seed=seed, backend="graph")

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


# ---------------------------------------------------------------- the choice of a back end, training


def test_the_back_end_is_chosen(pair, monkeypatch):
    model = pair[0]
    monkeypatch.delenv("LOWBIT_SAMPLER", raising=False)
    assert backend_of(model) == ("graph" if model.device.type == "cuda" else "hf")
    monkeypatch.setenv("LOWBIT_SAMPLER", "graph")
    assert (backend_of(model), backend_of(model, "hf")) == ("graph", "hf")
    sliding = copy.deepcopy(model)
    sliding.config.layer_types = ["sliding_attention"] * 3
    assert backend_of(sliding) == "hf"
    with pytest.raises(UserError, match="backend = 'graph' needs full attention by sdpa or eager"):
        backend_of(sliding, "graph")
    monkeypatch.setenv("LOWBIT_SAMPLER", "grph")
    with pytest.raises(UserError, match=r"the sampler 'grph' is unknown: choose one of auto, graph, hf\."):
        backend_of(model)


@pytest.mark.parametrize("quantized", [False, True])
def test_grpo_samples_with_the_engine(pair, monkeypatch, quantized):
    monkeypatch.setenv("LOWBIT_SAMPLER", "graph")
    model = low_bit(pair[0], False) if quantized else copy.deepcopy(pair[0])
    problems = tasks.load("arithmetic", "train", 8, seed=0)
    rows = grpo.train(model, pair[1], problems, steps=2, prompts_per_step=4, group_size=4, max_new_tokens=40)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["mismatch_mean"] < 1e-5 for row in rows)
