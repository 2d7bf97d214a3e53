"""Micro arithmetic: expressions of one to five operators whose answer takes as many exact steps.

Every number that appears on the way lies between 0 and 9,999 and subtraction never goes below zero, so a step is small enough
for a model of 0.15 M parameters to learn, most of the time, while five steps in one go are not. That gap is what makes it a
reasoning task: writing the steps out pays. Products of two-digit numbers are the steps that small models get wrong.

    12+3*(20-6)   ->   12+3*14 = 12+42 = 54
"""

import ast
import random

MAX_OPERAND = 50
MAX_VALUE = 9_999
PRECEDENCE = {"+": 1, "-": 1, "*": 2}

Tree = int | tuple[str, "Tree", "Tree"]


def step(op: str, left: int, right: int) -> int:
    """The value of one step."""
    return left + right if op == "+" else left - right if op == "-" else left * right


def allowed(op: str, left: int, right: int) -> bool:
    """Whether the task has this step."""
    return 0 <= step(op, left, right) <= MAX_VALUE


def expression(rng: random.Random, operators: int) -> Tree:
    """Draw a random expression tree with this many operators in which every step is allowed."""
    while True:
        tree = _grow(rng, operators)
        if value(tree) is not None:
            return tree


def _grow(rng: random.Random, operators: int) -> Tree:
    if operators == 0:
        return rng.randint(1, MAX_OPERAND)
    left = rng.randrange(operators)
    return rng.choice("+-*"), _grow(rng, left), _grow(rng, operators - 1 - left)


def value(tree: Tree) -> int | None:
    """The value of a tree, or None where a step of it is not allowed."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree[0], value(tree[1]), value(tree[2])
    return step(op, left, right) if left is not None and right is not None and allowed(op, left, right) else None


def text(tree: Tree) -> str:
    """Write a tree with as few parentheses as its meaning allows: `(2+3)*4`, `9-(5-2)`, `2+3+4`."""
    if isinstance(tree, int):
        return str(tree)
    op, left, right = tree
    left_text, right_text = text(left), text(right)
    if isinstance(left, tuple) and PRECEDENCE[left[0]] < PRECEDENCE[op]:
        left_text = f"({left_text})"
    if isinstance(right, tuple) and PRECEDENCE[right[0]] <= PRECEDENCE[op]:
        right_text = f"({right_text})"
    return left_text + op + right_text


def parse(expression: str) -> Tree:
    """The tree of a written expression: what `text` writes, read back."""
    symbols = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}

    def tree(node: ast.expr) -> Tree:
        if isinstance(node, ast.Constant):
            return node.value
        return symbols[type(node.op)], tree(node.left), tree(node.right)

    return tree(ast.parse(expression, mode="eval").body)


def reduce_once(tree: Tree, slip: int = 0) -> Tree:
    """Carry out the leftmost step whose operands are numbers; `slip` is added to its result (a wrong step)."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    if isinstance(left, tuple):
        return op, reduce_once(left, slip), right
    if isinstance(right, tuple):
        return op, left, reduce_once(right, slip)
    return min(MAX_VALUE, max(0, step(op, left, right) + slip))  # a slip may lead to steps that the task has not


def chain(tree: Tree, slips: dict[int, int] | None = None) -> list[str]:
    """The expression after each step, to the last number; `slips` maps a step's index to an error made there."""
    steps = []
    while isinstance(tree, tuple):
        tree = reduce_once(tree, (slips or {}).get(len(steps), 0))
        steps.append(text(tree))
    return steps


def prompt(rng: random.Random, level: int) -> tuple[str, str]:
    """One problem of `level` operators: the expression and its answer."""
    tree = expression(rng, level)
    return text(tree), str(value(tree))
