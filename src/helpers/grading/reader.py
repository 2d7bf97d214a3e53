"""What kind of thing an answer is: a scalar, text, a list, a tuple or interval, a set, a region, a matrix, a ratio,
an equation.

A clean answer's tokens are taken apart from the outside in: lists at commas and `and`, equations at `=`, unions at
`\\cup`, brackets, and at last a scalar with its unit. A left side that only names what is asked (`x = 5`, `f(n) = n +
1`, `S_1 : S_2 = 2 : 3`, `\\angle ABC = 90`) is remembered as a name; one that says something (`x + y = 5`) makes an
equation, which no value equals.
"""

import re
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

from helpers.grading import arithmetic, same, trees
from helpers.grading.brackets import BRACKETS, bare, has, partner, split, step
from helpers.grading.heads import head
from helpers.grading.regions import Region
from helpers.grading.shapes import Shape, alike, region_of
from helpers.grading.tokens import Token, Unreadable
from helpers.grading.trees import Node
from helpers.grading.units import QUALIFIERS, plain, split_unit, text_key, unworded

SPECIAL_TEXT = {
    "all real numbers": Region.line(), "all reals": Region.line(), "all real": Region.line(),
    "the set of all real numbers": Region.line(), "real numbers": Region.line(), "empty set": Region(()),
    "the empty set": Region(()),
}  # fmt: skip
MAX_DEPTH = 50  # of brackets around a list
RELATIONS = ("<", ">", "<=", ">=", "!=")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
MATRICES = {"pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"}
BRACKET_TOKENS = {("op", c) for c in "(){}"}
NUMBER_WORDS = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def read(tokens: Sequence[Token]) -> Shape:
    """The shape of a whole answer. Errors: `Unreadable`."""
    tokens = bare(tokens)
    if not tokens:
        raise Unreadable("empty")
    if has(tokens[1:-1], (",", ";")) and _depth(tokens) > MAX_DEPTH:
        raise Unreadable("too deep")
    if any(token == ("op", "...") for token in tokens):
        raise Unreadable("dots")
    words = [str(value) for kind, value in tokens if kind == "text"]
    if len(words) == len(tokens):
        return _text(" ".join(words))
    if any(QUALIFIERS & set(re.findall(r"[a-z]+", word.casefold())) for word in words):
        raise Unreadable("words that change the meaning")
    parts, separators = split(tokens, (",", ";", "and", "or", "&", r"\\"))
    parts, separators = [bare(part) for part in parts], set(separators)
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
    tokens = bare(tokens)
    if has(tokens, (r"\in",)):
        sides, _ = split(tokens, (r"\in",))
        if len(sides) == 2 and (name := head(sides[0])):
            inner = _item(sides[1])[0]
            return [Shape(inner.kind, inner.parts, name, inner.unit)]
        raise Unreadable("membership")
    if has(tokens, ("~",)):
        return [_approximation(tokens)]
    if has(tokens, RELATIONS):
        return [_relation(tokens)]
    if has(tokens, ("=",)):
        return _chain(tokens)
    return _value(tokens)


def _chain(tokens: list[Token]) -> list[Shape]:
    """a = b = c: names of what is asked, then its value, in whatever order; or an equation."""
    sides, _ = split(tokens, ("=",))
    sides = list({repr(side): side for side in map(bare, sides)}.values())
    if not all(sides):
        raise Unreadable("a side is empty")
    heads = [(side, name) for side in sides if (name := head(side))]
    values = [side for side in sides if not head(side)]
    if heads and not values:  # names alone: the last is the value
        if len(heads) == 1:
            return _value(heads[0][0])
        values, heads = [heads[-1][0]], heads[:-1]
    if not heads:
        if len(sides) == 1:
            return _value(sides[0])
        parsed = [trees.parse(plain(side)) for side in sides]
        if all(same.same(parsed[0], tree) for tree in parsed[1:]):
            return _value(sides[-1])
        if len(parsed) == 2 and trees.names(parsed[0]) | trees.names(parsed[1]):
            return [Shape("equation", (("-", *parsed),))]
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
        tree = trees.parse(tokens)
    except Unreadable:
        return None
    return tree if tree[0] != "apply" else None


def _approximation(tokens: list[Token]) -> Shape:
    """x = 1/3 \\approx 0.33: the sides must lie within a hundredth of each other, and either may be meant."""
    sides, _ = split(tokens, ("=", "~"))
    found = [_value(side)[0] for side in map(bare, sides) if side and not head(side)]
    numbers = [same.constant(shape.parts[0]) for shape in found if shape.kind == "scalar"]
    if not found or len(numbers) < len(found):
        raise Unreadable("an approximation of what is no number")
    if any(arithmetic.divide(arithmetic.add(n, -numbers[0]), numbers[0]) ** 2 > 1e-4 for n in numbers[1:]):
        raise Unreadable("sides that differ")
    return Shape("either", tuple(found)) if len(found) > 1 else found[0]


def _relation(tokens: list[Token]) -> Shape:
    """An inequality: of one name against constants a region of the real line, otherwise a relation between
    expressions.
    """
    sides, signs = split(tokens, (*RELATIONS, "="))
    if "=" in signs or not all(sides):
        raise Unreadable("an equation and an inequality")
    if len(sides) == 2 and (found := _distance(sides, signs[0])):
        return found
    heads = [i for i, side in enumerate(sides) if head(side)]
    if len(heads) == 1:
        try:
            bounds = [None if i in heads else same.constant(trees.parse(plain(side))) for i, side in enumerate(sides)]
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
            return Shape("region", (region,), head(sides[heads[0]]))
    parsed = [trees.parse(plain(side)) for side in sides]
    pairs = []
    for left, sign, right in zip(parsed, signs, parsed[1:], strict=False):
        pairs.append((sign, ("-", left, right)) if sign in (">", ">=", "!=") else (FLIPPED[sign], ("-", right, left)))
    return Shape("relation", tuple(pairs))


def _distance(sides: list[list[Token]], sign: str) -> Shape | None:
    """|x| < 3 as the region (-3, 3); None for anything else."""
    if sides[1][:1] == [("op", "|")]:
        sides, sign = sides[::-1], FLIPPED[sign]
    if sides[0][:1] != [("op", "|")] or sides[0][-1:] != [("op", "|")] or not (name := head(sides[0][1:-1])):
        return None
    try:
        bound = same.constant(trees.parse(plain(sides[1])))
        inside = Region.ray(FLIPPED[sign], -bound).meet(Region.ray(sign, bound)) if "<" in sign else None
        outside = Region.ray(FLIPPED[sign], -bound).join(Region.ray(sign, bound)) if ">" in sign else None
    except Unreadable:
        return None
    region = inside or outside
    return Shape("region", (region,), name) if region and bound > 0 else None


def _value(tokens: list[Token]) -> list[Shape]:
    """A value without a name: a region, a bracketed thing, a matrix, a ratio, a number in a base, or a scalar."""
    tokens = bare(tokens)
    if not tokens:
        raise Unreadable("empty")
    if all(kind == "text" for kind, _ in tokens):
        return [_text(" ".join(str(value) for _, value in tokens))]
    tokens = unworded(tokens)
    for reader in (_region, _bracketed, _matrix, _ratio, _based):
        if (shape := reader(tokens)) is not None:
            return [shape]
    if has(tokens, ("=", *RELATIONS, r"\in", ",")):
        return _item(tokens) if not has(tokens, (",",)) else [read(tokens)]
    core, unit = split_unit(tokens)
    tree = trees.parse(core)
    return [Shape("scalar", (branch,), (), unit) for branch in trees.branches(tree)]


def _region(tokens: list[Token]) -> Shape | None:
    if tokens[0] == ("op", r"\mathbb") and bare(tokens[1:]) == [("name", "R")]:
        return Shape("region", (Region.line(),))
    if tokens == [("op", r"\emptyset")] or tokens == [("op", "{{"), ("op", "}}")]:
        return Shape("region", (Region(()),))
    if not has(tokens, (r"\cup", r"\cap", r"\setminus")):
        return None
    parts, signs = split(tokens, (r"\cup", r"\cap", r"\setminus"))
    if r"\cap" in signs and len(set(signs)) > 1:
        raise Unreadable("a mixture of set operations")
    found = [region_of(_value(part)[0]) for part in parts]
    if None in found:
        raise Unreadable("a set operation on what is no set of reals")
    region = found[0]
    for sign, other in zip(signs, found[1:], strict=True):
        region = {r"\cup": region.join, r"\cap": region.meet, r"\setminus": region.without}[sign](other)
    return Shape("region", (region,))


def _depth(tokens: Sequence[Token]) -> int:
    """How deep brackets that can be tuples nest."""
    steps = (step(token) for token in tokens if token != ("op", "{") and token != ("op", "}"))
    return max(accumulate(steps), default=0)


def _bracketed(tokens: list[Token]) -> Shape | None:
    """(a, b), [a, b), {a, b}, {x | x > 5}, \\langle a, b \\rangle; brackets around one thing are no brackets."""
    first, last = tokens[0], tokens[-1]
    opening, closing = first[1], last[1]
    if {first[0], last[0]} != {"op"} or (opening, closing) not in BRACKETS or partner(tokens, 0) != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    parts, _ = split(inner, (",", ";"))
    if opening == "{{":
        conditions, _ = split(inner, ("|", ":"))
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


def _builder(member: list[Token], condition: list[Token]) -> Shape:
    name = head(split(member, (r"\in",))[0][0])
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
    rows = [row for row in split(tokens[first + 1 : last], (r"\\",))[0] if row]
    cells = [[_value(cell)[0] for cell in split(row, ("&",))[0]] for row in rows]
    if transposed:
        cells = [list(column) for column in zip(*cells, strict=True)]
    if before:
        factor = trees.parse(before[:-1] if before[-1] == ("op", "*") else before)
        cells = [[Shape("scalar", (("*", factor, cell.parts[0]),)) for cell in row] for row in cells]
    return Shape("matrix", tuple(map(tuple, cells)))


def _ratio(tokens: list[Token]) -> Shape | None:
    if not has(tokens, (":",)):
        return None
    return Shape("ratio", tuple(_value(side)[0] for side in split(tokens, (":",))[0]))


def _based(tokens: list[Token]) -> Shape | None:
    """52_8, (52)_{8}, AB_{16}, 52_{\\text{eight}}: digits and a base."""
    sign = -1 if tokens[0] == ("op", "-") else 1
    tokens = tokens[sign < 0 :]
    at = next((i for i, token in enumerate(tokens) if token == ("op", "_")), None)
    if at is None:
        return None
    digits = [value for kind, value in bare(tokens[:at]) if (kind, value) not in BRACKET_TOKENS]
    base = "".join(str(value) for kind, value in tokens[at + 1 :] if (kind, value) not in BRACKET_TOKENS)
    base = NUMBER_WORDS.get(base.casefold(), base)
    text = "".join(str(value) for value in digits)
    if not re.fullmatch(r"\d{1,2}", base) or not re.fullmatch(r"[0-9A-Z]{1,1000}", text) or not 2 <= int(base) <= 36:
        return None
    if any(int(c, 36) >= int(base) for c in text) or not (re.search(r"\d", text) or int(base) > 10):
        return None
    return Shape("based", (sign * int(text, int(base)), int(base)))


def _text(words: str) -> Shape:
    key = text_key(words)
    if key in SPECIAL_TEXT:
        return Shape("region", (SPECIAL_TEXT[key],))
    if not key:
        raise Unreadable("empty")
    return Shape("text", (key,))
