"""Micro recall: the one-step, non-reasoning counterpart of micro arithmetic.

Two forms, drawn evenly: look a key up among `level + 1` pairs, or copy `2 * level + 2` characters. Nothing has to be worked out,
so what quantization costs here and not there is the price of reasoning.

    k=37,c=5,m=82;c   ->   5            >4kq7z2   ->   4kq7z2
"""

import random
import string

KEYS = string.ascii_lowercase
CHARACTERS = string.ascii_lowercase + string.digits


def prompt(rng: random.Random, level: int) -> tuple[str, str]:
    """One problem: the text to read and what to give back."""
    if rng.random() < 0.5:
        copied = "".join(rng.choices(CHARACTERS, k=2 * level + 2))
        return f">{copied}", copied
    keys = rng.sample(KEYS, level + 1)
    values = [str(rng.randint(1, 99)) for _ in keys]
    asked = rng.randrange(len(keys))
    return ",".join(f"{k}={v}" for k, v in zip(keys, values, strict=True)) + f";{keys[asked]}", values[asked]
