"""Find the answer in a reply to a benchmark problem, and say which rule found it.

What is between `<think>` and `</think>` does not count, and a reply that is still thinking has not answered. Then the rules of
`RULES` are tried in their order. Boxes may nest, an escaped brace is no brace, equal neighbours count once, an empty box is no
box. An unfinished box ends the reply: what it holds was cut off, so no later rule looks there either.
"""

import re
from dataclasses import dataclass

RULES = {
    "box": "the last finished box that holds something: `\\boxed{}`, `\\fbox{}`, also misspelt `boxed{}` and `\\box{}`",
    "boxes": "neighbouring boxes that a comma, `and` or `or` joins, as one answer: `\\boxed{1} and \\boxed{2}`",
    "tag": "what the last `<answer>` holds",
    "says": "what follows the last `answer is`, `Answer:` or `####`, to the end of the sentence",
    "bare": "the whole reply, if it is one line of maths without words (golds that are plain numbers only)",
    "number": "the last number of the reply (golds that are plain numbers only)",
}

THINKING = re.compile(r"<(think|thinking)\s*>.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
BOX = re.compile(  # without its backslash it needs a brace: "he boxed 6 gifts" is English
    r"(?:\\boxed|\\fbox|\\framebox|\\box)\s*(?:\{|(?=[\dA-Za-z](?![A-Za-z])))|(?<![A-Za-z\\])boxed\s*\{"
)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
JOINT = re.compile(  # what may stand between boxes that are one answer
    r"[\s$,;&]*(?:\\\(|\\\)|\\\[|\\\]|\\quad|\\qquad|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|[,;]|"
    r"(?:[A-Za-z]+\s+)?(?:and|or)\b|[\s$&.]|\\[,;! ])+"
)
TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
SAYS = re.compile(
    r"####(?![ \t]*[A-Za-z]{2})(?=[^\n]{0,80}[\w\\])|(?:final\s+)?\banswers?\b(?:\s+to\s[^.\n:]{1,80}?)?[\s*_]*"
    r"(?::|is\b|are\b|=|equals\b|(?=\s*[$\\]))"
    r"(?:\s*(?:is\b|equal to\b|equals\b|simply\b|therefore\b|then\b|:))*[\s*_:]*",
    re.IGNORECASE,
)
STOP = re.compile(  # where a sentence's answer ends
    r"(?:[.?]|(?<![\d)])!)(?=\s|$|\*|<)|\n\s*\n|(?<=\S)\n|,\s*(?:so|and so)\b|<(?=/?[A-Za-z|])|"
    r"(?<![-=+*/,])\s\((?!(?:or|and|if|when)\b)(?=[A-Za-z]{2})|"
    r"[,;]?\s+(?:since|because|which|so that|not|or equivalently|as|where|i\.e\.)\b"
)
MATHS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NUMBER = re.compile(
    r"-?\\[dt]?frac\{\d+\}\{\d+\}|-?\d+ \d+/\d+|"
    r"(?:(?<![\w)\]}.])-\s?\\?\$?)?(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!|,\\!)\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))"
    r"(?:[eE][+-]?\d+(?![\d.]))?(?:\s?/\s?\d+(?:\.\d+)?)?(?:\s?\\?%|\s(?:hundred|thousand|million|billion|trillion|dozen)\b)?"
)
HEDGES = re.compile(  # behind a formula, these make it a part of the answer alone
    r"[,;]\s*[-+\d$\\]|(?<![A-Za-z])(?:or|and|to|through|times|plus|minus|over|more|less|most|least|fewer|not|no|if|when|"
    r"unless|otherwise|per|percent|squared|cubed|factorial|wait|hundreds?|thousands?|[mbtr]+illions?|dozens?|halves|half|"
    r"thirds?|quarters?|fourths?|fifths?|\w*(?:tenth|hundredth|thousandth)s?|pi|zero|one|two|three|four|five|six|seven|"
    r"eight|nine|ten|wrong|false|incorrect)(?![A-Za-z])",
    re.IGNORECASE,
)
MAX_BARE = 25_000
MAX_REPLY = 400_000  # characters after the thinking that are looked at, from the end


@dataclass(frozen=True)
class Found:
    """An answer and the rule that found it."""

    answer: str
    rule: str


def find(reply: str, number: bool = False) -> Found | None:
    """The answer of a reply, or None; `number`: the task's answers are plain numbers, so the last one will do."""
    text = after_thinking(reply)
    boxes, text = _boxes(text)
    if boxes:
        return _joined(text, boxes)
    if (tag := _tagged(text)) is not None:
        return Found(_said(tag) or tag, "tag") if tag else None
    if (said := _said(text)) is not None:
        return Found(said, "says")
    if not number:
        return None
    if bare := _bare(text):
        return Found(bare, "bare")
    numbers = [match[0] for match in NUMBER.finditer(_digits(text)) if match[0].strip()]
    return Found(numbers[-1].replace("- ", "-"), "number") if numbers else None


def after_thinking(reply: str) -> str:
    """The reply without its thoughts; the opening mark may stand in the prompt."""
    text = re.sub(r"(?: ?\n){3,}", "\n\n", re.sub(r"[^\S\n]+", " ", reply))
    return re.split(r"(?i)</think(?:ing)?\s*>", THINKING.sub("", text))[-1][-MAX_REPLY:]


def _tagged(text: str) -> str | None:
    """What the last finished `<answer>` holds."""
    end = None
    for tag in reversed(list(TAG.finditer(text))):
        if tag[1]:
            end = tag.start()
        elif end is not None:
            return text[tag.end() : end].strip()
    return None


def _boxes(text: str) -> tuple[list[tuple[int, int, str]], str]:
    """Finished boxes that hold something, outermost only, as (start, end, content); and the text up to an unfinished
    box.
    """
    found: list[tuple[int, int, str]] = []
    at = 0
    while match := BOX.search(text, at):
        if not match[0].endswith("{"):
            found.append((match.start(), match.end() + 1, text[match.end()]))
            digits = re.compile(r"\d+(?:\.\d+)?").match(text, match.end())
            if digits:
                found[-1] = (match.start(), digits.end(), digits[0])
            at = found[-1][1]
            continue
        end = _closing(text, match.end())
        if end is None:
            return found, text[: match.start()]
        content = text[match.end() : end].strip()
        if content:
            found.append((match.start(), end + 1, content))
        at = end + 1
    return found, text


def _closing(text: str, at: int) -> int | None:
    depth = 1
    for match in BRACE.finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _joined(text: str, boxes: list[tuple[int, int, str]]) -> Found:
    """The last box, with those before it that a comma or conjunction ties to it."""
    run = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : run[0][0]]
        if len(between) > 60 or not JOINT.fullmatch(between) or not re.search(r"[,;]|\b(?:and|or)\b", between):
            break
        run.insert(0, box)
    contents = list(dict.fromkeys(content for _, _, content in run))
    return Found(contents[0], "box") if len(contents) == 1 else Found(" , ".join(contents), "boxes")


def _said(text: str) -> str | None:
    """What follows the last marker, to the end of its sentence; None without a marker, or where nothing follows."""
    for match in reversed(list(SAYS.finditer(text))):
        rest = text[match.end() : match.end() + MAX_BARE]
        if said := _sentence(rest):
            return said
    return None


def _sentence(rest: str) -> str:
    """The formula that the text begins with, if nothing behind it changes it, or its first sentence, from its last `is`
    on.
    """
    match = MATHS.match(rest) if _formula(rest) is not None else None
    stop = STOP.search(rest, match.end() if match else 0)
    sentence = rest[: stop.start()] if stop else rest
    if match and _alone(sentence[match.end() :]):
        return _formula(rest)
    last = sentence.rpartition(" is ")[2].strip() if not match else sentence
    match = MATHS.match(last)
    formula = _formula(last)
    return formula if formula is not None and _alone(last[match.end() :]) else last.strip(" *_\n\t:#")


def _alone(behind: str) -> bool:
    """Whether a formula is the whole answer: only words stand behind it, and none of `HEDGES`."""
    behind = behind.strip(" *_\n\t:.#")
    return not behind or (bool(re.match(r"[,;]?\s*\(?[A-Za-z]", behind)) and not HEDGES.search(behind))


def _formula(text: str) -> str | None:
    """The formula between maths delimiters at the beginning; a dollar sign before an amount opens none."""
    match = MATHS.match(text)
    if not match:
        return None
    content = next(group for group in match.groups() if group is not None).strip()
    words = re.sub(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?", "", content)
    return None if match[2] and re.match(r"\d", content) and re.search(r"[A-Za-z]{2}", words) else content


def _bare(text: str) -> str:
    """The whole reply if it is one line of maths without words."""
    line = text.strip().strip("*").strip()
    if not line or "\n" in line or len(line) > MAX_BARE or re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", line):
        return ""
    return line if re.search(r"\d", line) and not re.search(r"\$\s*\d[^$]*$", line) else ""


def _digits(text: str) -> str:
    """Digits of other scripts as ASCII ones."""
    return (
        text if text.isascii() else re.sub(r"\d", lambda m: str(int(m[0])), text).replace("−", "-").replace("，", ",")
    )
