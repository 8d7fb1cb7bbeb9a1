"""Load formats: what each takes, how `auto` chooses, and that none opens another's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import streaming.checkpoint
from layers.errors import ModelConfigError
from streaming.checkpoint import LOAD_FORMATS, open_checkpoint
from streaming.errors import CheckpointError, OptionError
from tests.streaming.checkpoint.build import array, write_folder, write_gguf

X = {"x": array(2, 2)}


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    assert {"auto", "hf", "safetensors", "pt", "npcache", "gguf"} <= set(LOAD_FORMATS)
    with pytest.raises(OptionError, match=f"unknown --load-format 'zip'; known are {', '.join(LOAD_FORMATS)}"):
        open_checkpoint(tmp_path, load_format="zip")


def test_auto_takes_gguf_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).format == "gguf"
    write_folder(tmp_path, {"model.safetensors": X})
    assert open_checkpoint(tmp_path).format == "safetensors"
    assert open_checkpoint(tmp_path, load_format="gguf").format == "gguf"


def test_auto_does_not_prefer_gguf_to_pickles(tmp_path: Path) -> None:
    write_gguf(write_folder(tmp_path, {}) / "model.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is not a file of torch\.save"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("load_format", ["hf", "safetensors"])
def test_explicit_formats_keep_to_their_files(load_format: str, tmp_path: Path) -> None:
    write_gguf(write_folder(tmp_path, {}) / "model.gguf")
    with pytest.raises(CheckpointError, match=r"no weights; looked for \*\.safetensors.*found only model\.gguf"):
        open_checkpoint(tmp_path, load_format=load_format)
    with pytest.raises(CheckpointError, match=f"format {load_format} reads"):
        open_checkpoint(tmp_path / "model.gguf", load_format=load_format)


def test_gguf_keeps_to_its_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"model.safetensors": X})
    with pytest.raises(CheckpointError, match=r"no weights; looked for \*\.gguf"):
        open_checkpoint(root, load_format="gguf")
    with pytest.raises(CheckpointError, match="format gguf reads"):
        open_checkpoint(root / "model.safetensors", load_format="gguf")


def test_mistrals_own_layout_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"consolidated.safetensors": X})
    assert set(open_checkpoint(root).tensors) == {"x"}
    (root / "params.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"params\.json: n_heads is missing"):
        open_checkpoint(root)
    write_folder(root, {"model.safetensors": X})
    assert [file.name for file in open_checkpoint(root).files] == ["model.safetensors"]


def test_opening_imports_nothing_heavy(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", {"model.safetensors": X})
    write_gguf(tmp_path / "model.gguf")
    program = (
        "import sys\n"
        "from streaming.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]: open_checkpoint(path).metadata.get('tokenizer.ggml.tokens')\n"
        "heavy = {'torch', 'numpy', 'anyio', 'gguf', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "folder"), str(tmp_path / "model.gguf")],
        capture_output=True, text=True, check=False, cwd=Path(streaming.checkpoint.__path__[0]).parent.parent,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_are_there() -> None:
    assert all(hasattr(streaming.checkpoint, name) for name in streaming.checkpoint.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streaming.checkpoint.nothing
