"""Limits that keep the tree easy to learn: circles, chains, parameters, lengths of modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from grimp import build_graph

MAX_CHAIN = 20
MAX_PARAMETERS = 7
MAX_LINES = 600
# Only modules with such a signature are parsed, because parsing all takes seconds.
_MAYBE_WIDE = re.compile(rf"def __init__\((?:(?:(?!:\n)[^,])*,){{{MAX_PARAMETERS + 1}}}")


def imports_of(package: str) -> dict[str, set[str]]:
    """Return what each module imports, in functions and for type checkers too.

    The root package is left out: it loads each name on first use.
    """
    graph = build_graph(package, cache_dir=None)
    return {
        module: graph.find_modules_directly_imported_by(module) - {package}
        for module in graph.modules - {package}
    }


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def longest_chain(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of the longest chain, each of which imports the next."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(imports).static_order():
        below = (chains[name] for name in sorted(imports.get(module, ())))
        chains[module] = [module, *max(below, key=len, default=[])]
    return max(chains.values(), key=len)


def wide_constructors(module: Path) -> Iterator[str]:
    """Yield the classes whose constructors take more than MAX_PARAMETERS."""
    text = module.read_text("utf-8")
    if not _MAYBE_WIDE.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                taken = method.args
                names = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs][1:]
                if len(names) > MAX_PARAMETERS:
                    yield f"{module.name}: {node.name} takes {len(names)} parameters"


def length(module: Path) -> int:
    """Return how many lines a module has."""
    return module.read_bytes().count(b"\n")
