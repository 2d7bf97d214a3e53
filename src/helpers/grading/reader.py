"""What kind of thing an answer is: a scalar, text, a list, a tuple or interval, a set, a region, a matrix, a ratio, an equation.

A clean answer's tokens are taken apart from the outside in: lists at commas and `and`, equations at `=`, unions at `\\cup`, brackets, and at
last a scalar with its unit. A left side that only names what is asked (`x = 5`, `f(n) = n + 1`, `S_1 : S_2 = 2 : 3`, `\\angle ABC = 90`)
is remembered as a name; one that says something (`x + y = 5`) makes an equation, which no value equals.
"""

import re
from collections.abc import Sequence
from functools import reduce

from helpers.grading import arithmetic, expression
from helpers.grading.expression import Node
from helpers.grading.regions import Region
from helpers.grading.shapes import Shape, alike, region_of
from helpers.grading.tokens import Token, Unreadable

QUALIFIERS = set(
    "not no never cannot except without less more most least than over under above below between almost about approximately nearly if "
    "when unless otherwise where whenever either neither both maybe perhaps unknown else plus minus times times half twice double".split()
)
MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
MEASURES = {  # units that contradict one another when they differ
    "in": "inch inches in", "ft": "foot feet ft", "yd": "yard yards yd", "mi": "mile miles mi", "mm": "mm millimeter millimeters",
    "cm": "cm centimeter centimeters centimetre centimetres", "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometres",
    "g": "g gram grams", "kg": "kg kilogram kilograms", "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces",
    "s": "s sec secs second seconds", "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
    "year": "year years yr yrs", "month": "month months", "cent": "cent cents", "dollar": "dollar dollars usd", "mph": "mph", "deg": "degree degrees deg",
    "rad": "rad rads radian radians", "L": "l liter liters litre litres", "ml": "ml milliliter milliliters", "J": "j joule joules",
    "N": "n newton newtons", "W": "w watt watts", "V": "v volt volts", "K": "k kelvin", "arcsec": "arcsec", "arcmin": "arcmin",
}  # fmt: skip
UNIT_OF = {word: unit for unit, words in MEASURES.items() for word in words.split()}
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
ONE_LETTER_UNITS = set("mgshLlNJWVAKCFT")
SPECIAL_TEXT = {
    "all real numbers": Region.line(), "all reals": Region.line(), "all real": Region.line(), "the set of all real numbers": Region.line(),
    "real numbers": Region.line(), "empty set": Region(()), "the empty set": Region(()),
}  # fmt: skip
RELATIONS = ("<", ">", "<=", ">=", "!=")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
MATRICES = {"pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"}


def read(tokens: Sequence[Token]) -> Shape:
    """The shape of a whole answer. Errors: `Unreadable`."""
    tokens = _bare(tokens)
    if not tokens:
        raise Unreadable("empty")
    if any(token == ("op", "...") for token in tokens):
        raise Unreadable("dots")
    words = [str(value) for kind, value in tokens if kind == "text"]
    if len(words) == len(tokens):
        return _text(" ".join(words))
    if any(QUALIFIERS & set(re.findall(r"[a-z]+", word.casefold())) for word in words):
        raise Unreadable("words that change the meaning")
    parts, separators = _split(tokens, (",", ";", "and", "or", r"\\"))
    parts, separators = [_bare(part) for part in parts], set(separators)
    parts = [part for part in parts if part]
    if len(parts) == 1:
        items = _item(parts[0])
        return items[0] if len(items) == 1 else _list(items, ordered_names=True)
    items = [item for part in parts for item in _item(part)]
    if separators in ({"or"}, {"and"}) and all(item.kind == "region" for item in items):
        regions = [item.parts[0] for item in items]
        both = reduce(Region.join if separators == {"or"} else Region.meet, regions)
        if both.intervals:
            return Shape("region", (both,), items[0].name)
    return _list(items)


def _list(items: list[Shape], ordered_names: bool = False) -> Shape:
    """A list without order; items that share one name, or variants of it (`x_1`, `x_2`), are values of that name."""
    stems = {re.sub(r"_.*", "", name) for item in items for name in item.name}
    if len(stems) == 1 and not ordered_names:
        items = [Shape(item.kind, item.parts, (), item.unit) for item in items]
    return Shape("list", tuple(items))


def _item(tokens: list[Token]) -> list[Shape]:
    """One member of a list; `\\pm` makes it two."""
    tokens = _bare(tokens)
    if _has(tokens, (r"\in",)):
        sides, _ = _split(tokens, (r"\in",))
        if len(sides) == 2 and (name := _head(sides[0])):
            inner = _item(sides[1])[0]
            return [Shape(inner.kind, inner.parts, name, inner.unit)]
        raise Unreadable("membership")
    if _has(tokens, ("~",)):
        return [_approximation(tokens)]
    if _has(tokens, RELATIONS):
        return [_relation(tokens)]
    if _has(tokens, ("=",)):
        return _chain(tokens)
    return _value(tokens)


def _chain(tokens: list[Token]) -> list[Shape]:
    """a = b = c: names of what is asked, then its value, in whatever order; or an equation."""
    sides, _ = _split(tokens, ("=",))
    sides = list({repr(side): side for side in map(_bare, sides)}.values())
    if not all(sides):
        raise Unreadable("a side is empty")
    heads = [(side, name) for side in sides if (name := _head(side))]
    values = [side for side in sides if not _head(side)]
    if heads and not values:  # names alone: the last is the value
        if len(heads) == 1:
            return _value(heads[0][0])
        values, heads = [heads[-1][0]], heads[:-1]
    if not heads:
        if len(sides) == 1:
            return _value(sides[0])
        trees = [expression.parse(_plain(side)) for side in sides]
        if all(expression.same(trees[0], tree) for tree in trees[1:]):
            return _value(sides[-1])
        if len(trees) == 2 and expression.names(trees[0]) | expression.names(trees[1]):
            return [Shape("equation", (("-", *trees),))]
        raise Unreadable("sides that differ")
    found = [_value(side) for side in values]
    if not all(len(items) == len(found[0]) and all(map(alike, items, found[0])) for items in found[1:]):
        raise Unreadable("sides that differ")
    named = [Shape(item.kind, item.parts, name, item.unit) for _, name in heads for item in found[-1]]
    if len(heads) == 1 and len(found[-1]) == 1 and (tree := _tree(heads[0][0])) and found[-1][0].kind == "scalar":
        shape = named[0]
        return [Shape(shape.kind, (*shape.parts, ("-", tree, shape.parts[0])), shape.name, shape.unit)]
    return named


def _tree(tokens: list[Token]) -> Node | None:
    try:
        tree = expression.parse(tokens)
    except Unreadable:
        return None
    return tree if tree[0] != "apply" else None


def _approximation(tokens: list[Token]) -> Shape:
    """x = 1/3 \\approx 0.33: the sides must lie within a hundredth of each other, and either may be meant."""
    sides, _ = _split(tokens, ("=", "~"))
    found = [_value(side)[0] for side in map(_bare, sides) if side and not _head(side)]
    numbers = [expression.constant(shape.parts[0]) for shape in found if shape.kind == "scalar"]
    if not found or len(numbers) < len(found):
        raise Unreadable("an approximation of what is no number")
    if any(arithmetic.divide(arithmetic.add(n, -numbers[0]), numbers[0]) ** 2 > 1e-4 for n in numbers[1:]):
        raise Unreadable("sides that differ")
    return Shape("either", tuple(found)) if len(found) > 1 else found[0]


def _relation(tokens: list[Token]) -> Shape:
    """An inequality: of one name against constants a region of the real line, otherwise a relation between expressions."""
    sides, signs = _split(tokens, (*RELATIONS, "="))
    if "=" in signs or not all(sides):
        raise Unreadable("an equation and an inequality")
    heads = [i for i, side in enumerate(sides) if _head(side)]
    if len(heads) == 1:
        try:
            bounds = [None if i in heads else expression.constant(expression.parse(_plain(side))) for i, side in enumerate(sides)]
        except Unreadable:
            bounds = []
        if bounds:
            region = Region.line()
            for i, sign in enumerate(signs):
                if i + 1 in heads:
                    region = region.meet(Region.ray(FLIPPED[sign], bounds[i]))
                elif i in heads:
                    region = region.meet(Region.ray(sign, bounds[i + 1]))
                else:
                    raise Unreadable("a relation between numbers")
            return Shape("region", (region,), _head(sides[heads[0]]))
    trees = [expression.parse(_plain(side)) for side in sides]
    pairs = []
    for left, sign, right in zip(trees, signs, trees[1:], strict=False):
        pairs.append((sign, ("-", left, right)) if sign in (">", ">=", "!=") else (FLIPPED[sign], ("-", right, left)))
    return Shape("relation", tuple(pairs))


def _value(tokens: list[Token]) -> list[Shape]:
    """A value without a name: a region, a bracketed thing, a matrix, a ratio, a number in a base, or a scalar."""
    tokens = _bare(tokens)
    if not tokens:
        raise Unreadable("empty")
    if all(kind == "text" for kind, _ in tokens):
        return [_text(" ".join(str(value) for _, value in tokens))]
    tokens = _unworded(tokens)
    for reader in (_region, _bracketed, _matrix, _ratio, _based):
        if (shape := reader(tokens)) is not None:
            return [shape]
    if _has(tokens, ("=", *RELATIONS, r"\in", ",")):
        return _item(tokens) if not _has(tokens, (",",)) else [read(tokens)]
    core, unit = split_unit(tokens)
    tree = expression.parse(core)
    return [Shape("scalar", (branch,), (), unit) for branch in expression.branches(tree)]


def _region(tokens: list[Token]) -> Shape | None:
    if tokens == [("op", r"\mathbb"), ("op", "{"), ("name", "R"), ("op", "}")] or tokens == [("op", r"\mathbb"), ("name", "R")]:
        return Shape("region", (Region.line(),))
    if tokens == [("op", r"\emptyset")] or tokens == [("op", "{{"), ("op", "}}")]:
        return Shape("region", (Region(()),))
    if not _has(tokens, (r"\cup", r"\cap", r"\setminus")):
        return None
    parts, signs = _split(tokens, (r"\cup", r"\cap", r"\setminus"))
    if r"\cap" in signs and len(set(signs)) > 1:
        raise Unreadable("a mixture of set operations")
    found = [region_of(_value(part)[0]) for part in parts]
    if None in found:
        raise Unreadable("a set operation on what is no set of reals")
    region = found[0]
    for sign, other in zip(signs, found[1:], strict=True):
        region = {r"\cup": region.join, r"\cap": region.meet, r"\setminus": region.without}[sign](other)
    return Shape("region", (region,))


def _bracketed(tokens: list[Token]) -> Shape | None:
    """(a, b), [a, b), {a, b}, {x | x > 5}, \\langle a, b \\rangle; brackets around one thing are no brackets."""
    first, last = tokens[0], tokens[-1]
    opening, closing = first[1], last[1]
    if first[0] != "op" or last[0] != "op" or (opening, closing) not in BRACKETS or _partner(tokens, 0) != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    parts, _ = _split(inner, (",", ";"))
    if opening == "{{":
        conditions, _ = _split(inner, ("|", ":"))
        if len(conditions) == 2:
            return _builder(*conditions)
        members = [item for part in parts for item in _item(part)]
        return Shape("set", tuple(members))
    if len(parts) == 1:
        found = _item(inner) if (opening, closing) in (("(", ")"), ("[", "]")) else []
        return found[0] if len(found) == 1 else None
    items = [_item(part) for part in parts]
    if any(len(item) != 1 for item in items):
        raise Unreadable("two signs within a tuple")
    return Shape("tuple", (opening + closing, *(item[0] for item in items)))


def _builder(head: list[Token], condition: list[Token]) -> Shape:
    name = _head(head[: next((i for i, t in enumerate(head) if t[1] == r"\in"), len(head))])
    shape = read(condition)
    if shape.kind != "region" or shape.name != name:
        raise Unreadable("a set with a condition")
    return Shape("region", shape.parts)


def _matrix(tokens: list[Token]) -> Shape | None:
    """A matrix, with a scalar before it or a transposition after it."""
    begins = [i for i, (kind, _) in enumerate(tokens) if kind == "env"]
    if not begins:
        return None
    first, last = begins[0], begins[-1]
    before, after = tokens[:first], tokens[last + 1 :]
    if before and before[-1][1] in ("(", "[") and after and after[0][1] in (")", "]"):
        before, after = before[:-1], after[1:]
    transposed = "".join(str(value) for _, value in after) in ("^T", "^{T}", r"^\top", r"^{\top}")
    if len(begins) != 2 or str(tokens[first][1]).split()[1] not in MATRICES or (after and not transposed):
        raise Unreadable("a formula with a matrix")
    rows = [row for row in _split(tokens[first + 1 : last], (r"\\",))[0] if row]
    cells = [[_value(cell)[0] for cell in _split(row, ("&",))[0]] for row in rows]
    if transposed:
        cells = [list(column) for column in zip(*cells, strict=True)]
    if before:
        factor = expression.parse(before[:-1] if before[-1] == ("op", "*") else before)
        cells = [[Shape("scalar", (("*", factor, cell.parts[0]),)) for cell in row] for row in cells]
    return Shape("matrix", tuple(map(tuple, cells)))


def _ratio(tokens: list[Token]) -> Shape | None:
    if not _has(tokens, (":",)):
        return None
    return Shape("ratio", tuple(_value(side)[0] for side in _split(tokens, (":",))[0]))


def _based(tokens: list[Token]) -> Shape | None:
    """52_8, (52)_{8}, AB_{16}, 52_{\\text{eight}}: digits and a base."""
    sign = -1 if tokens[0] == ("op", "-") else 1
    tokens = tokens[sign < 0 :]
    at = next((i for i, token in enumerate(tokens) if token == ("op", "_")), None)
    if at is None:
        return None
    digits = [value for kind, value in _bare(tokens[:at]) if (kind, value) not in BRACKET_TOKENS]
    base = "".join(str(value) for kind, value in tokens[at + 1 :] if (kind, value) not in BRACKET_TOKENS)
    base = NUMBER_WORDS.get(base.casefold(), base)
    text = "".join(str(value) for value in digits)
    if not re.fullmatch(r"\d+", base) or not re.fullmatch(r"[0-9A-Z]+", text) or not (re.search(r"\d", text) or int(base) > 10):
        return None
    if not 2 <= int(base) <= 36 or any(int(c, 36) >= int(base) for c in text):
        return None
    return Shape("based", (sign * int(text, int(base)),))


BRACKETS = {(a, b) for a in "([" for b in ")]"} | {("{{", "}}"), (r"\langle", r"\rangle"), ("]", "["), ("]", "]")}
BRACKET_TOKENS = {("op", c) for c in "(){}"}
NUMBER_WORDS = dict(
    zip("two three four five six seven eight nine ten eleven twelve sixteen".split(), "2 3 4 5 6 7 8 9 10 11 12 16".split(), strict=True)
)


def split_unit(tokens: list[Token]) -> tuple[list[Token], str]:
    """A scalar's tokens and the unit that follows it; a percent sign and a magnitude (`3 million`) stay part of the value."""
    at = next((i for i, (kind, value) in enumerate(tokens) if kind == "text"), len(tokens))
    words = re.findall(r"[^\W\d_]+|%", " ".join(str(v) for k, v in tokens[at:] if k == "text"))
    core = list(tokens[:at])
    rest = [t for t in tokens[at:] if t[0] != "text"]
    if any(kind != "op" and kind != "num" and not (kind == "name" and at < len(tokens)) for kind, _ in rest) or not core:
        raise Unreadable("words between formulas")
    if words and words[0].casefold() in MAGNITUDES:
        core = [("op", "("), *core, ("op", ")"), ("op", "*"), ("num", arithmetic.Fraction(MAGNITUDES[words.pop(0).casefold()]))]
    if words and words[0].casefold() in ("percent", "pct", "percentage"):
        core.append(("op", "%"))
        words = words[1:]
    primes = 0
    while core and core[-1] == ("op", "'") and len(core) > 1:
        core, primes = core[:-1], primes + 1
    if not primes and core[-2:] == [("op", "'"), ("op", "}")] and ("op", "^") in core:
        start = len(core) - 1 - core[::-1].index(("op", "^"))
        if start and core[start - 1][0] == "num" and {value for _, value in core[start + 1 :]} == {"{", "'", "}"}:
            core, primes = core[:start], len(core) - start - 3
    if primes:
        if core[-1][0] != "num":
            core, primes = core + [("op", "'")] * primes, 0
        words = ["arcmin" if primes == 1 else "arcsec"] if primes else words
    exponent = "".join(str(value) for _, value in rest if value not in ("{", "}", "^"))
    exponent = next((POWERS[word] for word in map(str.casefold, words) if word in POWERS), exponent)
    known = [UNIT_OF.get(word if len(word) == 1 else word.casefold(), "") for word in words]
    unit = " ".join(filter(None, known)) + (f"^{exponent}" if exponent and any(known) else "")
    degree = [("op", "^"), ("op", r"\circ")]
    if core[-2:] == degree or core[-4:] == [("op", "^"), ("op", "{"), ("op", r"\circ"), ("op", "}")]:
        unit = unit or "deg"
    return core, unit


def _unworded(tokens: list[Token]) -> list[Token]:
    """Without the words before a formula: `the point (3, 4)`; one-letter words are names unless they are units."""
    while len(tokens) > 1 and tokens[0][0] == "text" and len(str(tokens[0][1])) > 1:
        tokens = tokens[2 if tokens[1] == ("op", ":") else 1 :]
    named = []
    for i, (kind, value) in enumerate(tokens):
        alone = kind == "text" and len(str(value)) == 1 and not (i and str(value) in ONE_LETTER_UNITS)
        named.append(("name", value) if alone else (kind, value))
    return named


def _plain(tokens: Sequence[Token]) -> list[Token]:
    return split_unit(_unworded(_bare(tokens)))[0]


def _text(words: str) -> Shape:
    key = text_key(words)
    if key in SPECIAL_TEXT:
        return Shape("region", (SPECIAL_TEXT[key],))
    if not key:
        raise Unreadable("empty")
    return Shape("text", (key,))


def text_key(words: str) -> str:
    """Words as they are compared: without case, punctuation, articles, and the labels before them; `I and III` is `I, III`."""
    words = re.sub(r"[^\w\s,&/+-]", "", words.casefold())
    segments = re.split(r",|&|\band\b", words)
    cleaned = [re.sub(r"^(?:the|a|an|option|choice|answer)\s+", "", " ".join(s.split())) for s in segments]
    return ",".join(sorted(filter(None, cleaned)))


def _head(tokens: Sequence[Token]) -> tuple[str, ...]:
    """The name that a left side is, or () where it says something: x_1, f(n), \\angle ABC, |AB|, (x, y), NO/BO, S_1:S_2, Area."""
    tokens = _bare(tokens)
    if not tokens or any(kind in ("num", "env") for kind, value in tokens[:1]):
        return ()
    if all(kind == "text" for kind, _ in tokens):
        return (" ".join(str(value) for _, value in tokens).casefold(),)
    if tokens[0][0] == "text":
        tokens = tokens[1:]
    if tokens and tokens[0][1] in (r"\angle", r"\triangle") or tokens[:2] == [("name", "m"), ("op", r"\angle")]:
        rest = [t for t in tokens if t[1] not in (r"\angle", r"\triangle")]
        return ("".join(str(v) for _, v in rest if v not in ("{", "}")),) if all(k in ("name", "num", "op") for k, _ in rest) else ()
    if len(tokens) > 2 and tokens[0] == ("op", "(") and _partner(tokens, 0) == len(tokens) - 1:
        parts, _ = _split(tokens[1:-1], (",",))
        found = [_head(part) for part in parts]
        return ("(" + ",".join(name[0] for name in found) + ")",) if len(parts) > 1 and all(found) else ()
    if _has(tokens, (":",)):
        found = [_head(part) for part in _split(tokens, (":",))[0]]
        return (":".join(name[0] for name in found),) if all(found) else ()
    if tokens[0] == ("op", "|") and tokens[-1] == ("op", "|") and len(tokens) > 2:
        inner = _head(tokens[1:-1])
        return (f"|{inner[0]}|",) if inner and inner[0].isupper() and len(inner[0]) > 1 else ()
    if tokens[0] == ("func", "") or (tokens[0][0] == "func" and len(tokens) == 2 and tokens[1][0] == "name"):
        return (f"{tokens[0][1]} {tokens[1][1]}",)
    if tokens[0][0] == "name" and tokens[0][1] in ("P", "E") and len(tokens) > 3 and tokens[1] == ("op", "("):
        if _partner(tokens, 1) == len(tokens) - 1:
            return ("".join(str(value) for _, value in tokens),)
    if any(kind == "name" and value in ("e", "i", r"\pi") for kind, value in tokens) and len(tokens) == 1:
        return ()
    try:
        tree = expression.parse(tokens)
    except Unreadable:
        return _applied(tokens)
    return _named(tree) or _applied(tokens)


def _applied(tokens: list[Token]) -> tuple[str, ...]:
    """f(x, y) with names or numbers as arguments."""
    at = next((i for i, token in enumerate(tokens) if token == ("op", "(")), None)
    if not at or _partner(tokens, at) != len(tokens) - 1:
        return ()
    try:
        function = expression.parse(tokens[:at])
        arguments = [expression.parse(part) for part in _split(tokens[at + 1 : -1], (",",))[0]]
    except Unreadable:
        return ()
    if function[0] == "^" and function[1][0] == "name" and function[2] == ("neg", ("num", 1)):
        function = ("name", f"{function[1][1]}^-1")
    if function[0] != "name" or any(argument[0] not in ("name", "num") for argument in arguments):
        return ()
    if len(arguments) == 1 and arguments[0] == ("name", function[1]):
        return ()
    return (function[1], *(str(argument[1]) for argument in arguments))


def _named(tree: Node) -> tuple[str, ...]:
    if tree[0] == "name":
        return (tree[1],)
    if tree[0] == "apply":
        return (tree[1], str(tree[2][1]))
    if tree[0] == "*" or tree[0] == "/":
        sides = [_named(part) for part in tree[1:]]
        if all(len(side) == 1 and re.fullmatch(r"(?:[A-Z](?:_\w+)?'*)+(?:/(?:[A-Z](?:_\w+)?'*)+)?", side[0]) for side in sides):
            return (("/" if tree[0] == "/" else "").join(side[0] for side in sides),)
    return ()


def _bare(tokens: Sequence[Token]) -> list[Token]:
    """Without braces around the whole, and without what ends a sentence."""
    tokens = list(tokens)
    while True:
        if tokens and tokens[-1][0] == "op" and tokens[-1][1] in (",", ";", ".", r"\\", ":", "and", "or"):
            tokens = tokens[:-1]
        elif tokens and tokens[0][0] == "op" and tokens[0][1] in (",", ";", "=", ":", r"\\", "and", "or"):
            tokens = tokens[1:]
        elif len(tokens) > 1 and tokens[0] == ("op", "{") and _partner(tokens, 0) == len(tokens) - 1:
            tokens = tokens[1:-1]
        elif len(tokens) > 2 and tokens[0] == ("op", "(") and tokens[1] == ("op", "(") and _redundant(tokens):
            tokens = tokens[1:-1]
        else:
            return tokens


def _redundant(tokens: list[Token]) -> bool:
    return _partner(tokens, 0) == len(tokens) - 1 and _partner(tokens, 1) == len(tokens) - 2


OPENING, CLOSING = {"(", "[", "{", "{{", r"\lfloor", r"\lceil", r"\langle"}, {")", "]", "}", "}}", r"\rfloor", r"\rceil", r"\rangle"}


def _step(token: Token) -> int:
    kind, value = token
    if kind == "env":
        return 1 if str(value).startswith("begin") else -1
    return (value in OPENING) - (value in CLOSING) if kind == "op" else 0


def _partner(tokens: Sequence[Token], at: int) -> int | None:
    """Where the bracket that opens at `at` closes; intervals may close with another bracket."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += _step(tokens[i])
        if depth <= 0:
            return i
    return None


def _split(tokens: Sequence[Token], signs: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """The parts between these signs outside all brackets, and the signs."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        depth += _step(token)
        if depth == 0 and token[0] == "op" and token[1] in signs:
            found.append(str(token[1]))
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def _has(tokens: Sequence[Token], signs: tuple[str, ...]) -> bool:
    return len(_split(tokens, signs)[0]) > 1
