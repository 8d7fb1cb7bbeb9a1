"""--dtype: what the shell is built in, from files of one float dtype or of several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.errors import OptionError
from streaming.options import LoadOptions
from streaming.prepare import prepare

IDS = [3, 17, 99, 4]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def plain(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=2, files=1, dtype="float32", seed=7))


def written(folder: Path, plain: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any) -> Path:
    """The plain model with its tensors changed and with other keys in config.json (None: without the key)."""
    folder.mkdir()
    weights = load_file(plain / "model.safetensors")
    save_file({name: change(name, tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text()) | config
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def logits_of(folder: Path, dtype: str) -> Any:
    with LLM(folder, dtype=dtype) as llm:
        return llm.logits(IDS).numpy()


def test_float64_on_disk_is_brought_into_the_shells_dtype(plain: Path, tmp_path: Path) -> None:
    doubles = written(tmp_path / "doubles", plain, lambda name, tensor: tensor.double())
    for dtype in ("float32", "bfloat16", "float16"):
        assert np.array_equal(logits_of(doubles, dtype), logits_of(plain, dtype))
    assert prepare(str(doubles), LoadOptions(dtype="float32")).warnings == (
        "21 tensors stored in float64 become float32 (the first: model.layers.0.input_layernorm.weight)",
    )


def test_several_dtypes_on_disk_are_one_in_the_shell(plain: Path, tmp_path: Path) -> None:
    """Norms in float32, the attention in float16, the rest in bfloat16; the model is asked for in float32."""

    def mixed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "norm" in name:
            return tensor
        return tensor.half() if "self_attn" in name else tensor.bfloat16()

    several = written(tmp_path / "several", plain, mixed)
    same = written(tmp_path / "same", plain, lambda name, tensor: mixed(name, tensor).float())
    assert np.array_equal(logits_of(several, "float32"), logits_of(same, "float32"))
    assert prepare(str(several), LoadOptions(dtype="float32")).warnings == ()
    told = prepare(str(several), LoadOptions(dtype="bfloat16")).warnings
    assert [re.sub(r" \(.*", "", text) for text in told] == [
        "5 tensors stored in float32 become bfloat16",
        "8 tensors stored in float16 become bfloat16",
    ]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "float16"), ("half", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16"),
        ("float", "float32"), ("float32", "float32"),
    ],
)  # fmt: skip
def test_what_is_asked_for_overrides_the_config(asked: str, expected: str, plain: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "half", plain, lambda name, tensor: tensor, torch_dtype="float16")
    assert prepare(str(folder), LoadOptions(dtype=asked)).dtype.torch_name == expected


def test_without_the_configs_word_the_most_frequent_dtype_of_what_is_used_counts(plain: Path, tmp_path: Path) -> None:
    def half_the_blocks(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if ".layers.0." in name else tensor.half()

    folder = written(tmp_path / "files", plain, half_the_blocks, torch_dtype=None, dtype=None)
    assert prepare(str(folder), LoadOptions()).dtype.torch_name == "float16"
    weights = load_file(folder / "model.safetensors")
    beyond = {f"model.layers.7.{number}.weight": torch.zeros(1000, 1000) for number in range(2)}
    save_file(weights | beyond, folder / "model.safetensors")
    assert prepare(str(folder), LoadOptions()).dtype.torch_name == "float16"


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--dtype 'float8' is not known: choose one of auto, half, float16"):
        LoadOptions(dtype="float8")
