"""Changes one line of a function, as a mistake would."""

import ast
import random

SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE,
    ast.GtE: ast.Lt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot,
}  # fmt: skip


class _Mutation(ast.NodeTransformer):
    """Changes the operator or constant number ``place``, counted in the order of a walk."""

    def __init__(self, place: int):
        self.left = place

    def _is_chosen(self) -> bool:
        self.left -= 1
        return self.left == -1

    def _operator(self, operator):
        made = SWAPPED.get(type(operator))
        return made() if made and self._is_chosen() else operator

    def visit_BinOp(self, node):
        self.generic_visit(node)
        node.op = self._operator(node.op)
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        node.op = self._operator(node.op)
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.ops = [self._operator(operator) for operator in node.ops]
        return node

    def visit_Return(self, node):
        self.generic_visit(node)
        if node.value is not None and self._is_chosen():
            node.value = ast.UnaryOp(ast.Not(), node.value)
        return node


def mutated(head: str, body: str, seed: int) -> str:
    """Return ``body``, which continues ``head``, with one operator or returned value changed, chosen by ``seed``."""
    name = ast.parse(head).body[-1].name
    counter = _Mutation(10**9)
    counter.visit(_function(head + body, name))
    places = 10**9 - counter.left
    tree = _function(head + body, name)
    _Mutation(random.Random(seed).randrange(places)).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def _function(text: str, name: str) -> ast.FunctionDef:
    return next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
