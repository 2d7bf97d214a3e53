"""Find the answer in a reply: what stands in the last complete `\\boxed{}` after the thinking.

An unfinished box gives nothing; braces may nest. A reply that is still thinking (a `<think>` that never closes) has not answered.
"""

import re

BOX = "\\boxed{"


def extract(reply: str) -> str | None:
    """The text in the last balanced box, stripped, or None where there is none."""
    text = re.sub(r"<think>.*?(</think>|\Z)", "", reply, flags=re.DOTALL)
    start = text.rfind(BOX)
    while start >= 0:
        depth = 1
        for end in range(start + len(BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(BOX) : end].strip()
        start = text.rfind(BOX, 0, start)
    return None
