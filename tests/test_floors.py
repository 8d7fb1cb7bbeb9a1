"""Who may import whom: quant stands on torch, layers on quant, streaming on both; planning needs no large package.

The rules read the tree's own source, so a module that is added tomorrow is under them tomorrow.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("quant", "layers", "streaming")
ALLOWED = {"quant": {"torch", "triton", "quant"}, "layers": {"torch", "quant", "layers"}}
RUNTIME_ONLY = {
    "anyio", "asyncio", "concurrent", "fcntl", "glob", "io", "mmap", "multiprocessing", "pathlib", "queue",
    "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "urllib",
}  # fmt: skip
EVERYWHERE = {"torch", "anyio", "numpy"}  # third-party packages that more than one file may import

# What runs before torch is there: these must import neither torch nor anyio nor numpy. Any module that says [no-torch]
# in its docstring is held to it too.
PLANNING_PATH = (
    "quant/__init__.py", "quant/dtypes.py", "quant/errors.py", "quant/scheme.py", "quant/sections.py",
    "quant/wide.py", "quant/float8.py", "quant/int8.py", "quant/policy.py",
    "layers/__init__.py", "layers/errors.py", "layers/config.py", "layers/model_config.py", "layers/weights.py",
    "layers/architecture.py", "layers/models/*.py",
    "streaming/__init__.py", "streaming/__main__.py", "streaming/cli*.py", "streaming/errors.py",
    "streaming/options.py", "streaming/checkpoint/*.py", "streaming/plan.py", "streaming/read_plan.py",
    "streaming/budget.py", "streaming/prepare.py", "streaming/reader.py", "streaming/reading.py", "streaming/sizes.py",
    "streaming/stats.py", "streaming/remote/*.py", "streaming/trace.py", "streaming/timeline.py",
    "streaming/progress.py", "streaming/matching.py", "streaming/reader_choice.py",
    "layers/kv_forms.py", "layers/kv_scales.py",
)  # fmt: skip


def sources(*packages: str) -> list[Path]:
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert found, f"no source under {packages}"
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that the code imports, wherever the statement stands; `from a import b` gives both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which floor it is from"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def dotted_names(tree: ast.AST) -> Iterator[str]:
    """Every `a.b` that the code reads from a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def uses(tree: ast.AST, part: str) -> bool:
    """Whether the code imports `part`, or reads it as an attribute."""
    return any(name == part or name.startswith(f"{part}.") for name in {*imports_of(tree), *dotted_names(tree)})


def top_levels(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(parsed(path))}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def third_party(path: Path) -> set[str]:
    return {name for name in top_levels(path) if name not in sys.stdlib_module_names and name not in PACKAGES}


def planning_modules() -> list[str]:
    listed = {path for pattern in PLANNING_PATH for path in ROOT.glob(pattern)}
    declared = {path for path in sources(*PACKAGES) if "[no-torch]" in (ast.get_docstring(parsed(path)) or "")}
    return sorted(module_name(path) for path in listed | declared)


def module_level(tree: ast.Module) -> ast.Module:
    """The module without its functions and its `if TYPE_CHECKING:` blocks: what runs when it is imported."""

    class Strip(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST | None:
            inside_a_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            return None if inside_a_function or for_types else self.generic_visit(node)

    stripped = Strip().visit(tree)
    assert isinstance(stripped, ast.Module)
    return stripped


@pytest.mark.parametrize("package", ALLOWED)
def test_a_floor_imports_only_what_it_stands_on(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(extra)
        for path in sources(package)
        if (extra := top_levels(path) - ALLOWED[package] - sys.stdlib_module_names)
    }
    assert not wrong


@pytest.mark.parametrize("package", ALLOWED)
def test_the_lower_floors_know_no_files_threads_or_processes(package: str) -> None:
    for path in sources(package):
        assert not top_levels(path) & RUNTIME_ONLY, path
        of_the_system = {name for name in dotted_names(parsed(path)) if name.startswith("os.")}
        assert of_the_system <= {"os.environ"}, path  # a library's own switches may be looked up
        calls = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "open"], path


def test_no_package_imports_tests_or_examples() -> None:
    for path in sources(*PACKAGES):
        assert not top_levels(path) & {"tests", "examples"}, path


@pytest.mark.parametrize("part", ["torch.cuda", "torch.distributed"])
def test_devices_and_ranks_live_in_two_files_at_most(part: str) -> None:
    users = [path for path in sources(*PACKAGES) if uses(parsed(path), part)]
    assert len(users) <= 2, users


def test_every_other_package_is_imported_in_one_file_only() -> None:
    users: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for name in third_party(path) - EVERYWHERE:
            users.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in users.items() if len(files) > 1}


def test_planning_imports_neither_torch_nor_anyio_nor_numpy() -> None:
    modules = planning_modules()
    assert {"quant.dtypes", "layers.weights", "streaming.errors"} <= set(modules)
    program = f"""
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "anyio", "numpy"):
            raise ImportError(f"the planning path must not import {{name}}")

sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_modules_import_each_other_in_no_circle() -> None:
    names = {module_name(path): path for path in sources(*PACKAGES)}
    graph = {
        name: {found for found in imports_of(module_level(parsed(path))) if found in names and found != name}
        for name, path in names.items()
    }
    # `from package import module` also names the package; a package is no circle with the modules that it gathers.
    graph = {name: {found for found in users if not name.startswith(f"{found}.")} for name, users in graph.items()}
    while leaves := [name for name, users in graph.items() if not users]:
        graph = {name: users - set(leaves) for name, users in graph.items() if name not in leaves}
    assert not graph


def test_the_rules_see_what_they_look_for() -> None:
    tree = ast.parse("import a.b\ndef f():\n    from c import d\n    return torch.cuda.device_count()")
    assert set(imports_of(tree)) == {"a.b", "c", "c.d"}
    assert uses(tree, "torch.cuda")
    assert not uses(tree, "torch.cud")
    assert uses(ast.parse("import torch.distributed.nn"), "torch.distributed")
    assert uses(ast.parse("from torch import distributed"), "torch.distributed")
    top = module_level(
        ast.parse("import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    import d")
    )
    assert set(imports_of(top)) == {"a"}
    with pytest.raises(AssertionError, match="relative import"):
        list(imports_of(ast.parse("from . import a")))
