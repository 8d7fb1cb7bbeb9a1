"""The modules for text need neither torch nor numpy, and their optional packages only when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import streaming.tokenizer

_FOLDER = Path(streaming.tokenizer.__file__).parent
_MODULES = (
    "chat_template", "detokenizer", "generation_config", "gguf_tokenizer", "pretokenizers", "stopping",
    "text_decoding", "tokenizer", "tokenizer_config",
)  # fmt: skip


def test_importing_them_needs_no_package() -> None:
    blocked = ("torch", "numpy", "anyio", "tokenizers", "jinja2", "transformers", "huggingface_hub")
    lines = [
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))",
        *(f"import streaming.{m}" for m in _MODULES),
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=_FOLDER.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("package", "home"), [("tokenizers", "fast_tokenizer.py"), ("jinja2", "template_sandbox.py")])
def test_each_optional_package_is_imported_in_one_file(package: str, home: str) -> None:
    assert [path.name for path in sorted(_FOLDER.rglob("*.py")) if package in _imports(path)] == [home]


def _imports(path: Path) -> set[str]:
    """First parts of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
