"""Words in an answer: units, magnitudes, prose around a formula, and words that are the answer themselves."""

import re
from collections.abc import Sequence
from fractions import Fraction

from helpers.grading.brackets import bare
from helpers.grading.tokens import Token, Unreadable

QUALIFIERS = {
    "not", "no", "never", "cannot", "except", "without", "less", "more", "most", "least", "than", "over", "under",
    "above", "below", "between", "almost", "about", "approximately", "nearly", "if", "when", "unless", "otherwise",
    "where", "whenever", "either", "neither", "both", "maybe", "perhaps", "unknown", "else", "plus", "minus",
    "times", "half", "twice", "double",
}  # fmt: skip
JUDGEMENTS = {
    "is", "are", "was", "were", "be", "not", "no", "isn", "wrong", "false", "incorrect", "correct", "true", "right", "instead",
    "never", "maybe", "perhaps", "possibly", "fake", "rejected", "invalid", "impossible", "but",
}  # fmt: skip
NO_UNITS = JUDGEMENTS | {  # words that make another number of the one before them
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "halves", "third", "thirds", "quarter",
    "quarters", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth", "eighths",
    "ninth", "ninths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "millionth",
    "millionths", "billionth", "billionths", "factorial", "pi", "ish", "lakh", "lakhs", "crore", "crores", "score",
    "divided", "multiplied", "root", "to", "or", "and",
}  # fmt: skip
MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
MEASURES = {  # units that contradict one another when they differ
    "in": "inch inches in", "ft": "foot feet ft", "yd": "yard yards yd", "mi": "mile miles mi",
    "mm": "mm millimeter millimeters", "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometres", "g": "g gram grams",
    "kg": "kg kilogram kilograms", "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces", "s": "s sec secs second seconds", "min": "min mins minute minutes",
    "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "year": "year years yr yrs",
    "month": "month months", "cent": "cent cents", "dollar": "dollar dollars usd", "mph": "mph",
    "deg": "degree degrees deg", "rad": "rad rads radian radians", "L": "L l liter liters litre litres",
    "ml": "ml milliliter milliliters", "J": "J joule joules", "N": "N newton newtons", "W": "W watt watts",
    "V": "V volt volts", "K": "K kelvin", "arcsec": "arcsec", "arcmin": "arcmin", "am": "am", "pm": "pm",
    "celsius": "celsius", "fahrenheit": "fahrenheit",
}  # fmt: skip
UNIT_OF = {word: unit for unit, words in MEASURES.items() for word in words.split()}
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
PREFIXES = {"kilo": "k", "mega": "M", "giga": "G", "milli": "m", "micro": "u", "nano": "n"}
BASES = {"gram": "g", "meter": "m", "metre": "m", "second": "s", "liter": "l", "litre": "l", "joule": "J", "watt": "W",
         "volt": "V", "hertz": "Hz", "pascal": "Pa", "newton": "N", "electronvolt": "eV"}  # fmt: skip
UNIT_OF |= {p + base + s: UNIT_OF.get(PREFIXES[p] + short, PREFIXES[p] + short)
            for p in PREFIXES for base, short in BASES.items() for s in ("", "s")}  # fmt: skip
UNIT_OF |= {short: short for short in UNIT_OF.values() if len(short) > 1}
UNIT_OF |= {"hertz": "Hz", "hz": "Hz", "pascal": "Pa", "pascals": "Pa", "electronvolt": "eV", "electronvolts": "eV"}
SPEEDS = {"mph": "mi / h", "kph": "km / h", "kmh": "km / h"}
FILLERS = {"of", "the", "a", "an", "each", "total", "unit", "units", "about", "long", "away"}
ONE_LETTER_UNITS = set("mgshLlNJWVAKCFT")


def split_unit(tokens: list[Token]) -> tuple[list[Token], str]:
    """A scalar's tokens and its unit; a percent sign and a magnitude (`3 million`) stay part of the value."""
    at = next((i for i, (kind, _) in enumerate(tokens) if kind == "text"), len(tokens))
    if not at or not all(map(_in_unit, tokens[at - 1 :], tokens[at:])):
        raise Unreadable("words between formulas")
    said = " ".join(str(value) for kind, value in tokens[at:] if kind == "text")
    words = re.findall(r"[^\W\d_]+", re.sub(r"\b([aApP])\.?\s?[mM]\b", r"\1m", said))
    core, mark = _marked(list(tokens[:at]))
    count = len(words)
    while words and words[0].casefold() in MAGNITUDES:
        factor = ("num", Fraction(MAGNITUDES[words.pop(0).casefold()]))
        core = [("op", "("), *core, ("op", ")"), ("op", "*"), factor]
    if words and words[0].casefold() in ("percent", "pct", "percentage"):
        core, words = [*core, ("op", "%")], words[1:]
    if NO_UNITS & {word.casefold() for word in words} or (words and words[0].casefold() in ("squared", "cubed")):
        raise Unreadable("words that are no unit")
    return core, _unit(tokens[at:], count - len(words)) or mark


def _unit(tokens: Sequence[Token], skip: int) -> str:
    """The unit that a scalar's end makes behind so many words: `m s^-2`; a word that is no measure has a `+`."""
    said = re.sub(r"\b([aApP])\.?\s?[mM]\b", r"\1m", " ".join(str(v) for _, v in tokens if v not in ("{", "}", "*")))
    said = re.sub(r"\^ (-? ?\d+)", lambda m: "^" + m[1].replace(" ", ""), said)
    said = re.sub(rf"\b(?:{'|'.join(SPEEDS)})\b", lambda m: SPEEDS[m[0]], said)
    parts = re.findall(r"[^\W\d_]+|/|\^-?\d+", said)
    powers: dict[str, int] = {}
    sign, ahead, behind = 1, 1, ""
    for part in parts:
        word = part.casefold()
        if part[0].isalpha() and skip > 0:
            skip -= 1
        elif part == "/" or word == "per":
            sign = -1
        elif part[0] == "^" and behind:
            powers[behind] += (abs(powers[behind]) // powers[behind]) * (int(part[1:]) - 1)
        elif word in ("squared", "cubed") and behind:
            powers[behind] *= int(POWERS[word])
        elif word in POWERS:
            ahead = int(POWERS[word])
        elif part[0].isalpha() and word not in FILLERS:
            unit = UNIT_OF.get(part) or (UNIT_OF.get(word) if len(part) > 1 else None)
            behind = unit or "+" + (part if len(part) < 4 else word.removesuffix("s"))
            powers[behind] = powers.get(behind, 0) + sign * ahead
            ahead = 1
    return " ".join(sorted(f"{unit}^{power}" if power != 1 else unit for unit, power in powers.items()))


def contradict(a: str, b: str) -> bool:
    """Whether two units differ: in their measures, or in words of which neither side has all of the other's."""
    if not a or not b:
        return False
    measures = [{unit for unit in side.split() if unit[0] != "+"} for side in (a, b)]
    words = [{unit for unit in side.split() if unit[0] == "+"} for side in (a, b)]
    return measures[0] != measures[1] or not (words[0] <= words[1] or words[1] <= words[0])


def _marked(core: list[Token]) -> tuple[list[Token], str]:
    """A scalar and what the marks at its end stand for: a degree sign, or primes behind a number (0.003'', 45^{\\prime})."""
    end = [value for _, value in core[-6:]]
    if end[-2:] == ["^", r"\circ"] or end[-4:] == ["^", "{", r"\circ", "}"]:
        return core, "deg"
    for marks, unit in (("''", "arcsec"), ("'", "arcmin")):
        for form in ([*marks], ["^", *marks], ["^", "{", *marks, "}"]):
            before = core[: -len(form)]
            if end[-len(form) :] == form and before and before[-1][0] == "num":
                return before, unit
    return core, ""


def _in_unit(before: Token, token: Token) -> bool:
    """Whether a token may stand in a unit after another: words, powers, and one-letter units below a slash."""
    kind, value = token
    if kind == "num":
        return before[1] in ("^", "{", "-")
    if kind == "op":
        return value in ("^", "{", "}", "/", "*") or (value == "-" and before[1] in ("^", "{"))
    return kind == "text" or (kind == "name" and before[1] == "/" and value in ONE_LETTER_UNITS)


def unworded(tokens: list[Token]) -> list[Token]:
    """Without the words before a formula: `the point (3, 4)`; one-letter words are names unless they are units."""
    while len(tokens) > 1 and tokens[0][0] == "text" and len(str(tokens[0][1])) > 1:
        tokens = tokens[2 if tokens[1] == ("op", ":") else 1 :]
    named = []
    for i, (kind, value) in enumerate(tokens):
        alone = kind == "text" and len(str(value)) == 1 and not (i and str(value) in ONE_LETTER_UNITS)
        named.append(("name", value) if alone else (kind, value))
    return named


def plain(tokens: Sequence[Token]) -> list[Token]:
    return split_unit(unworded(bare(tokens)))[0]


def text_key(words: str) -> str:
    """Words as they are compared: without case, the punctuation of sentences, and articles; `I and III` is `I, III`."""
    words = re.sub(r"\.(?!\d)|(?<!\d):|:(?!\d)|(?<!\d)!|[;?'\"`$\\{}]", "", words.casefold())
    segments = [re.sub(r"^\s*\((\w+)\)\s*$", r"\1", s) for s in re.split(r",|&|\band\b", words)]
    cleaned = [re.sub(r"^(?:the|a|an|option|choice|answer)\s+(?=\w\w)", "", " ".join(s.split())) for s in segments]
    return ",".join(sorted(filter(None, cleaned)))
