"""The README's promises: its commands and its code run as written, its lists are complete, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from layers.models import FAMILIES
from quant.disk_forms.methods import method_names
from quant.registry import scheme_names
from streaming.checkpoint.encodings import READABLE
from streaming.checkpoint.formats import LOAD_FORMATS
from streaming.cli import COMMANDS, make_parser
from streaming.read_strategy import STRATEGIES
from tests.readme_models import stand_ins

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
FENCE = re.compile(r"(<!-- slow -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of the README; `slow` where the line before it says so."""

    language: str
    text: str
    slow: bool


BLOCKS = [Block(found[2], found[3], bool(found[1])) for found in FENCE.finditer(README)]


def params(language: str) -> list[object]:
    """The blocks of a language as parameters of a test, each called by its first words."""
    return [
        pytest.param(block.text, marks=[pytest.mark.slow] if block.slow else [], id=block.text.split("\n")[0][:40])
        for block in BLOCKS
        if block.language == language
    ]


def run(command: list[str], folder: Path, own: Mapping[str, str]) -> None:
    """Run in a folder, with the environment's own programs first; `own`: further variables."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **own}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("text", params("bash"))
def test_commands_run_as_written(text: str, tmp_path: Path) -> None:
    lines = [line for line in text.splitlines() if not line.startswith("make ")]
    with stand_ins(tmp_path, "\n".join(lines)) as (commands, own):
        run(["bash", "-euo", "pipefail", "-c", commands], tmp_path, own)


@pytest.mark.parametrize("text", params("python"))
def test_code_runs_as_written(text: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(text, encoding="utf-8")
    run([sys.executable, "block.py"], tmp_path, {"HF_HUB_OFFLINE": "1"})


def test_every_block_is_run_or_is_text() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", "text"}
    assert README.count("\n```") == 2 * len(BLOCKS)
    assert README.count("<!-- slow -->") == sum(block.slow for block in BLOCKS)


def test_make_has_every_target_that_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test", "test-all"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_every_option_that_is_named_exists() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = {option for command in commands.values() for option in command._option_string_actions}  # type: ignore[union-attr]
    others = {"--extra-index-url", "--no-deps", "--nproc-per-node"}  # pip's, torchrun's
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - others
    assert named - known == set()


def test_every_command_is_shown() -> None:
    assert set(COMMANDS) == set(re.findall(r"firstlayer ([a-z-]+) ", README))


def test_every_format_and_strategy_has_its_line() -> None:
    found = re.search(r"^### Models, formats, strategies$(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert found
    named = set(re.findall(r"[a-z_]+", found[1]))
    assert set(LOAD_FORMATS) - {"hf", "instanttensor"} <= named
    assert set(STRATEGIES) - {"torchao"} <= named


def test_every_method_and_scheme_has_its_row() -> None:
    found = re.search(r"^## Quantization$(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert found
    rows = " ".join(line.split(" | ")[0] for line in found[1].splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`([\w-]+)", rows))
    assert named >= {*method_names(), *scheme_names()} - {"none"}


def row(name: str) -> str:
    """What the table of "What is supported" says is there now."""
    found = re.search(rf"^\| {name} \| (.*?) \|", README, re.MULTILINE)
    assert found, name
    return found[1]


def test_what_is_supported_is_what_there_is() -> None:
    assert row("schemes").split(", ") == list(scheme_names())
    assert re.findall(r"\b(?:B?F\d\d|T?I?Q\d_\w+|[MN]\w*FP4)\b", row("formats")) == [
        kind.name for kind in READABLE.values()
    ]
    assert [family.model_type for family in FAMILIES] == sorted(family.model_type for family in FAMILIES)
    named = set(re.findall(r"\b[a-z]+\d?(?:_[a-z0-9]+)*\b(?= \(|,|;|$)", row("families")))
    assert named >= {family.model_type for family in FAMILIES}


def tree() -> set[str]:
    """The paths of the file tree."""
    (text,) = (block.text for block in BLOCKS if block.text.startswith("quant/"))
    folder, paths = "", set()
    for line in text.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        else:
            paths.add(folder + name)
    return paths


def test_the_tree_lists_every_module_and_no_other() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for package in ("quant", "layers", "streaming", "examples")
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    listed = {str(path.relative_to(ROOT)) for pattern in tree() for path in ROOT.glob(pattern)}
    assert [pattern for pattern in tree() if not list(ROOT.glob(pattern))] == []
    assert modules - listed == set()


def test_links_and_files_that_are_named_exist() -> None:
    targets = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    headings = {"#" + re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in HEADINGS}
    links = [link for link in targets if link not in headings]
    files = re.findall(r"`((?:quant|layers|streaming|examples)/[\w/.]+)`", README)
    assert links
    assert files
    assert [name for name in (*links, *files) if not (ROOT / name).exists()] == []
