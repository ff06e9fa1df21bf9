"""Applies a mutation to the source of a program."""

from __future__ import annotations

import ast
import random

from tests.mutants.operators import Edit, Operator, step_with
from tests.mutants.sites import EVALUATION, Site, optimizer_steps, scaler_steps

IMPORT = "from tests.mutants import effects as mutant"


def mutate(source: str, operator: Operator, seed: int = 0) -> str | None:
    """The mutated program; None where the operator finds nothing to change in it.

    Where it finds several sites and changes one, `seed` chooses.
    """
    tree = ast.parse(source)
    found = operator.find(tree)
    if not found:
        return None
    chosen = found if operator.every else [random.Random(seed).choice(found)]
    new = {id(site.node): (site, operator.edit) for site in chosen}
    for find, edit in operator.also:
        new |= {id(site.node): (site, edit) for site in find(tree)}
    # Every other step is counted, so that a later onset and its place in the record are known.
    for site in optimizer_steps(tree):
        new.setdefault(id(site.node), (site, step_with("")))
    for site in scaler_steps(tree):
        new.setdefault(id(site.node), (site, _counted))
    tree = _Edits(new).visit(tree)
    tree.body.insert(_after_the_head(tree), ast.parse(IMPORT).body[0])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _counted(site: Site) -> str:
    assert isinstance(site.node, ast.Call)
    return f"mutant.stepped({ast.unparse(site.node.args[0])}, {site.text})"


def _after_the_head(tree: ast.Module) -> int:
    """The place after the docstring and the imports from the future."""

    def of_the_head(node: ast.stmt) -> bool:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")

    return next((at for at, node in enumerate(tree.body) if not of_the_head(node)), len(tree.body))


class _Edits(ast.NodeTransformer):
    """Puts new source where chosen nodes were, and keeps evaluations free of effects."""

    def __init__(self, new: dict[int, tuple[Site, Edit]]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)  # first what is inside, so that the text of this node shows it
        if isinstance(node, ast.FunctionDef) and node.name in EVALUATION:
            node.decorator_list.insert(0, ast.parse("mutant.unmutated", mode="eval").body)
        if id(node) not in self._new:
            return node
        site, edit = self._new[id(node)]
        text = edit(site)
        if isinstance(node, ast.stmt):
            return ast.parse(text).body if text else ast.Pass()
        return ast.parse(text, mode="eval").body
