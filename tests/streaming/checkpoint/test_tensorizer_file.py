"""tensorizer's format: files that its own package wrote are read to the bit; broken ones are refused in words."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quant.dtypes import DType
from streaming import LLM
from streaming.checkpoint.tensorizer_file import dtype_of, read_tensorizer_header
from streaming.errors import CheckpointFormatError
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.streaming.resident import resident_model, run_resident, same_bits

IDS = [5, 9, 2, 7]


def serialized(path: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    tensorizer = pytest.importorskip("tensorizer")
    serializer = tensorizer.TensorSerializer(str(path), **options)
    serializer.write_state_dict(tensors)
    serializer.close()
    return path


@pytest.fixture(scope="module")
def folder(four_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, serialized by the package."""
    made = tmp_path_factory.mktemp("tensorizer")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(four_layers.glob("*.safetensors")):
        tensors |= load_file(file)
    (made / "config.json").write_bytes((four_layers / "config.json").read_bytes())
    serialized(made / "model.tensors", tensors)
    return made


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_the_package_wrote_gives_the_same_logits(folder: Path, four_layers: Path) -> None:
    expected = run_resident(resident_model(four_layers), IDS).logits
    for model in (folder, folder / "model.tensors"):
        with LLM(model, load_format="tensorizer") as llm:
            assert same_bits(llm.logits(IDS), expected)


@pytest.mark.filterwarnings("ignore")
def test_every_tensor_lies_where_the_index_says(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.tensor([1.5, -2.0]).bfloat16(),
        "c": torch.tensor(7, dtype=torch.int64), "d": torch.tensor([[1, 2]], dtype=torch.float16),
        "e": torch.tensor([True, False]),
    }  # fmt: skip
    path = serialized(tmp_path / "x.tensors", tensors)
    found, notes = read_tensorizer_header(path)
    data = path.read_bytes()
    assert notes == ()
    assert {name: info.shape for name, info in found.items()} == {k: tuple(v.shape) for k, v in tensors.items()}
    for name, info in found.items():
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[info.offset : info.offset + info.nbytes] == raw


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = serialized(tmp_path / "x.tensors", {"a": torch.arange(300, dtype=torch.float32), "b": torch.ones(3)})
    data = path.read_bytes()
    end = max(info.offset + info.nbytes for info in read_tensorizer_header(path)[0].values())
    for size in {*range(1, 400, 7), end - 1}:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointFormatError, match=r"x\.tensors"):
            read_tensorizer_header(path)


def written(path: Path, *, version: int = 1, flags: int = 0, count: int = 1, index: bytes = b"") -> Path:
    head = b"|TZR|" + struct.pack("<I32sQ8xQ", version, flags.to_bytes(32, "little"), 0, count)
    path.write_bytes(head + struct.pack("<Q", len(index)) + index + bytes(64))
    return path


def entry(name: bytes, dtype: bytes, shape: tuple[int, ...], offset: int, nbytes: int) -> bytes:
    names = struct.pack("<H", len(name)) + name + b"\x02" + bytes([len(dtype)]) + dtype
    return names + bytes([len(shape)]) + struct.pack(f"<{len(shape)}I", *shape) + struct.pack("<3Q", 0, offset, nbytes)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"version": 3}, "is encrypted"),
        ({"version": 4, "flags": 1}, "is encrypted"),
        ({"version": 9}, "data version 9; 1 to 5 are known"),
        ({"version": 5, "flags": 8}, "feature flags (0x8) that are not known"),
        ({"count": 2**63}, "at most 262,144 are read"),
        ({"count": 2}, "its index is broken"),
        ({"index": entry(b"a", b"<f4", (2,), 0, 4)}, "has 4 bytes, but shape [2] of float32 takes 8"),
        ({"index": entry(b"a", b"<f4", (2,), 0, 0)}, "was saved without data"),
        ({"index": entry(b"a", b"<f4", (2,), 2**40, 8)}, "(truncated)"),
        ({"index": entry(b"a", b">f4", (2,), 0, 8)}, "has dtype '>f4', which is not known"),
        ({"index": entry(b"\x1e[1]", b"<f4", (2,), 0, 8)}, "has a path of several steps"),
        ({"index": entry(b"a", b"<f4", (2**32 - 1,) * 20, 0, 8)}, "has a shape of 20 dims that cannot be"),
        ({"index": entry(b"a", b"<f4", (2,), 0, 8) * 2, "count": 2}, "tensor 'a' is there twice"),
        ({"index": entry(b"\xff", b"<f4", (2,), 0, 8)}, "its index is broken"),
    ],
)
def test_what_is_broken_or_not_supported_is_told(tmp_path: Path, made: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointFormatError) as caught:
        read_tensorizer_header(written(tmp_path / "x.tensors", **made))
    assert words in str(caught.value)
    assert "x.tensors" in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tensors"
    path.write_bytes(b"something else entirely, and long enough for a header " * 4)
    with pytest.raises(CheckpointFormatError, match="is not a tensorizer file"):
        read_tensorizer_header(path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("<f2", DType.F16), ("|b1", DType.BOOL), ("<i2\0torch.bfloat16", DType.BF16), ("<V3", None), ("x\0torch.x", None)],
)
def test_dtypes_have_numpys_names_or_torchs(name: str, dtype: DType | None) -> None:
    assert dtype_of(name) is dtype


@pytest.mark.filterwarnings("ignore")
def test_strategies_go_with_the_format(folder: Path, four_layers: Path) -> None:
    expected = run_resident(resident_model(four_layers), IDS).logits
    with LLM(folder, load_format="tensorizer", safetensors_load_strategy="eager") as llm:
        assert same_bits(llm.logits(IDS), expected)
    assert prepare(str(folder), LoadOptions(load_format="tensorizer")).checkpoint.format == "tensorizer"
