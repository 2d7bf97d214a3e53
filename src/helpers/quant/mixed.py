"""Mixed precision: layers that matter keep more bits, at the bytes of a uniform scheme.

With d_l(s) the damage that layer l does at scheme s and m_l(s) its bytes, one scheme a layer is chosen to

    minimize  sum_l d_l(s_l)      where  sum_l m_l(s_l) <= sum_l m_l(uniform)

a knapsack with one choice a layer, solved exactly as an integer program by SciPy's HiGHS. The uniform choice is one of those
allowed, so by this measure mixed is never worse; whether the sum of damages foretells the damage of all layers together is what
an evaluation shows. Sources: HAWQ (Dong et al. 2019), and the integer program of HAWQ-V3 (2011.10680).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from transformers import PreTrainedModel

from helpers.quant.layers import linear_layers
from helpers.quant.scheme import BITS, Scheme, SchemeError
from helpers.quant.sensitivity import sensitivity
from helpers.quant.size import stored_parts

Damage = Mapping[str, Mapping[Scheme, float]]  # layer -> scheme -> damage
Bytes = Mapping[str, Mapping[Scheme, int]]


class Mixed(Mapping[str, Scheme]):
    """A scheme for each layer, by name, at the bytes of the uniform scheme `budget`; written `mixed-w3g64`.

    `bits`, `granularity` and `group_size` are those of the budget, so a description has what it has for a uniform scheme.
    """

    numbers = "uniform"

    def __init__(self, layers: Mapping[str, Scheme], budget: Scheme) -> None:
        self.layers, self.budget = dict(layers), budget
        self.bits, self.granularity, self.group_size = budget.bits, budget.granularity, budget.group_size

    def __getitem__(self, name: str) -> Scheme:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return f"mixed-{self.budget}"


def mixed(
    model: PreTrainedModel,
    method: str,
    budget: Scheme,
    texts: Sequence[Sequence[int]],
    measure: str = "output_error",
    starts: Sequence[int] | None = None,
    widths: Sequence[int] = BITS,
    **settings: bool | float | None,
) -> Mixed:
    """The best choice of `widths` at the bytes of `budget` for `model`, which is left as it is; for `quantize(model, method, ...)`.

    Errors: `SchemeError` for a budget that is not uniform or whose bits are not among `widths`; those of `sensitivity`.
    """
    if budget.numbers != "uniform":
        raise SchemeError(f"scheme = {budget} has one width: mixed precision chooses among uniform grids.")
    if budget.bits not in widths:
        raise SchemeError(
            f"bits = {budget.bits} must be one of the widths to choose from: {', '.join(map(str, widths))}."
        )
    schemes = [replace(budget, bits=bits) for bits in sorted(widths)]
    damage = sensitivity(model, method, schemes, texts, measure, starts, **settings)
    sizes = bytes_of(model, schemes)
    return Mixed(choose(damage, sizes, sum(size[budget] for size in sizes.values())), budget)


def bytes_of(model: PreTrainedModel, schemes: Sequence[Scheme]) -> dict[str, dict[Scheme, int]]:
    """What each linear layer occupies at each scheme: layer -> scheme -> bytes."""
    layers = linear_layers(model, schemes[0].targets)
    return {
        name: {scheme: sum(stored_parts(m.out_features, m.in_features, scheme)) for scheme in schemes}
        for name, m in layers.items()
    }


def choose(damage: Damage, nbytes: Bytes, budget: int) -> dict[str, Scheme]:
    """The scheme of each layer with the least sum of damages within `budget` bytes.

    Errors: `SchemeError` where not even the smallest scheme of every layer fits, and for a damage that is no number.
    """
    pairs = [(name, scheme) for name, costs in damage.items() for scheme in costs]
    costs = np.array([damage[name][scheme] for name, scheme in pairs], dtype=float)
    sizes = np.array([nbytes[name][scheme] for name, scheme in pairs])
    if not np.isfinite(costs).all():
        raise SchemeError(f"the damage of layer {pairs[int(np.argmin(np.isfinite(costs)))][0]} is no finite number.")
    least = sum(min(nbytes[name][scheme] for scheme in costs) for name, costs in damage.items())
    if least > budget:
        raise SchemeError(f"budget = {budget} bytes is too small: the narrowest grids of all layers take {least}.")
    one_each = np.array([[name == layer for name, _ in pairs] for layer in damage], dtype=float)
    unit = np.gcd.reduce(sizes)  # small whole numbers, so that the solver's tolerance is far below one of them
    solved = milp(
        costs / max(costs.max(), 1e-30),
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None] // unit, 0, budget // unit)],
        options={"mip_rel_gap": 0.0},
    )
    return {name: scheme for (name, scheme), taken in zip(pairs, solved.x, strict=True) if taken > 0.5}
