"""Every prompt of the project: what a problem is turned into before a model reads it.

    raw          the problem, as one user turn: the first paper's default
    qwen-maths   a system turn that asks for steps and a box, then the problem: the evaluation prompt of Qwen2.5-Math
    thinking     the problem and the same request, with the chat template's thinking mode on: Qwen3's recommendation for maths
    no-thinking  the same with that mode off

Only the first is for micro models. A tokenizer without a chat template, as base models have, reads the plain text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from helpers.tasks.problem import Problem, TaskError

if TYPE_CHECKING:  # problems can be had without machine learning
    from transformers import PreTrainedTokenizerBase

REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."
STYLES = ("raw", "qwen-maths", "thinking", "no-thinking")


def messages(problem: Problem, style: str = "raw") -> list[dict[str, str]]:
    """The chat that asks a problem."""
    if style not in STYLES:
        raise TaskError(f"prompt = {style!r} is unknown: choose one of {', '.join(STYLES)}.")
    if style == "raw":
        return [{"role": "user", "content": problem.prompt}]
    if style == "qwen-maths":
        return [{"role": "system", "content": REQUEST}, {"role": "user", "content": problem.prompt}]
    return [{"role": "user", "content": f"{problem.prompt}\n{REQUEST}"}]


def texts(tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Problem], style: str = "raw") -> list[str]:
    """Each problem's whole prompt, up to where the reply begins."""
    chats = [messages(problem, style) for problem in problems]
    if tokenizer.chat_template is None:
        return ["\n\n".join(turn["content"] for turn in chat) + "\n\n" for chat in chats]
    options = {"enable_thinking": style == "thinking"} if "thinking" in style else {}
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False, **options)
