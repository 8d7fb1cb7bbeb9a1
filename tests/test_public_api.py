"""The public face: every name in `__all__` is there, nothing public is left out of it, and each says what it is for."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [package for package in ("quant", "layers", "streaming") if (ROOT / package / "__init__.py").exists()]
MODULES = sorted(path for package in ("quant", "layers", "streaming") for path in (ROOT / package).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def documentable(tree: ast.Module, *, described: frozenset[str] = frozenset()) -> list[tuple[str, ast.AST]]:
    """Public classes and functions of a module, and the public methods of its public classes.

    `forward` of a module is described by its class, a protocol's method by the protocol, overloads and setters by the
    definition that they belong to.
    """
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
            found += [
                (f"{node.name}.{method.name}", method)
                for method in methods
                if _is_public(method) and method.name not in described
            ]
    return found


@cache
def protocol_methods() -> frozenset[str]:
    """The methods that the tree's protocols describe; a class that implements one need not repeat it."""
    return frozenset(
        method.name
        for path in MODULES
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(method)
    )


def _is_public(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list}
    return not method.name.startswith("_") and method.name != "forward" and not decorators & {"overload", "setter"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_public_name_says_what_it_is_for(path: Path) -> None:
    tree = parsed(path)
    assert ast.get_docstring(tree), f"{path}: the first line must say what the module is for"
    missing = [
        name
        for name, node in documentable(tree, described=protocol_methods())
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not ast.get_docstring(node)
    ]
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_all_is_there_once_and_dir_shows_it(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
    assert set(names) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_for_its_users_is_in_all(package: str) -> None:
    """The names that type checkers see (imported in `__init__`) are the names in `__all__`."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(parsed(ROOT / package / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES
        for alias in node.names
    }
    assert imported == set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_that_a_package_raises_on_purpose_is_public(package: str) -> None:
    errors = [node.name for node in parsed(ROOT / package / "errors.py").body if isinstance(node, ast.ClassDef)]
    assert errors
    assert set(errors) <= set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_does_not_exist_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(package).no_such_name


def test_a_missing_docstring_would_be_found() -> None:
    tree = ast.parse(
        "class A:\n    def m(self): ...\n    def _p(self): ...\n    def forward(self): ...\ndef f(): ...\n"
    )
    assert [name for name, _ in documentable(tree)] == ["A", "A.m", "f"]
    assert [name for name, _ in documentable(tree, described=frozenset({"m"}))] == ["A", "f"]
