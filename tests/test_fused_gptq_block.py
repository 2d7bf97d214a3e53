"""The Triton kernel of GPTQ's block update gives the reference's codes bit for bit, on shapes of all kinds."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernels import gptq_block
from helpers.kernels.fused import gptq_block as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block(rows, columns, bits, seed=0, padding=0):
    """(w, scale, zero, group, U) of a block: views into matrices that are wider by `padding` columns."""
    generator = torch.Generator().manual_seed(seed)
    wide, groups = columns + padding, 1 + columns // 32
    w = torch.randn(rows, wide, generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) + 0.5).mul(4 / 2**bits).half()
    zero = torch.randint(0, 2**bits, (rows, groups), generator=generator).to(torch.uint8)
    group = torch.randint(0, groups, (wide,), generator=generator)
    x = torch.randn(4 * wide, wide, generator=generator) * torch.logspace(-1, 1, wide)
    upper = torch.linalg.cholesky(torch.linalg.inv(x.T @ x / len(x)), upper=True)
    w, group, upper = w[:, padding:], group[padding:], upper[padding:, padding:]
    return [t.to(DEVICE) for t in (w, scale, zero, group, upper)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 17), (33, 32), (1, 100), (2, 128), (35, 128)])
def test_codes_are_the_reference_s(rows, columns):
    for bits, padding in ((2, 0), (3, 7), (4, 0), (8, 64)) if DEVICE == "cuda" else ((3, 7), (4, 0)):
        w, *others = block(rows, columns, bits, seed=rows + columns, padding=padding)
        codes, errors = gptq_block.reference(w.clone(), *others, 0, 2**bits - 1)
        found, off = fused.compensate(w, *others, 0, 2**bits - 1)
        assert torch.equal(found, codes)
        assert torch.equal(off, errors)


def test_ties_go_to_the_even_code_and_far_weights_to_the_ends():
    w = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -1e30, 3.0]], device=DEVICE)
    one, group, upper = torch.ones(1, 1, device=DEVICE), torch.zeros(8, dtype=torch.long, device=DEVICE), torch.eye(8)
    others = one, 4 * one, group, upper.to(DEVICE), 1, 7
    codes, _ = fused.compensate(w.clone(), *others)
    assert codes.tolist() == [[4, 6, 6, 4, 2, 7, 1, 7]]
    assert torch.equal(codes, gptq_block.reference(w, *others)[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="the choice is between a GPU's kernel and the reference")
def test_a_gpu_takes_the_kernel_and_the_switch_turns_it_off(monkeypatch):
    calls = []
    monkeypatch.setattr(fused, "compensate", lambda *args: calls.append(1))
    arguments = block(4, 8, 4)
    gptq_block.compensate(*arguments, 0, 15)
    monkeypatch.setenv("LOWBIT_KERNELS", "torch")
    gptq_block.compensate(*arguments, 0, 15)
    assert calls == [1]
