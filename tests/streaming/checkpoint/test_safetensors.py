"""The safetensors header: what is right is read as the reference reads it; each way to be wrong has its own words."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quant.dtypes import DType, to_torch
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.errors import CheckpointError, CheckpointFormatError
from tests.streaming.checkpoint.build import array, entry, safetensors_bytes


def problems_of(content: bytes, folder: Path) -> tuple[str, ...]:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError) as caught:
        read_safetensors_header(path)
    assert all(str(path) in problem for problem in caught.value.problems)
    return caught.value.problems


def test_every_dtype_is_read_where_the_reference_reads_it(tmp_path: Path) -> None:
    written = {dtype.value.lower(): torch.zeros(3, 5).to(to_torch(dtype)) for dtype in DType if dtype.in_files}
    written["scalar"], written["empty"] = torch.tensor(7.0), torch.zeros(0, 4)
    path = tmp_path / "all dtypes.safetensors"
    save_file(written, path, metadata={"format": "pt"})
    found = read_safetensors_header(path)
    raw = path.read_bytes()
    with safe_open(path, "pt") as reference:
        assert set(found) == set(reference.keys())
        for name, info in found.items():
            expected = reference.get_tensor(name)
            assert info.shape == tuple(expected.shape)
            assert to_torch(info.dtype) == expected.dtype
            assert info.is_plain
            expected_bytes = expected.reshape(-1).view(torch.uint8).numpy().tobytes() if expected.numel() else b""
            assert raw[info.offset : info.offset + info.nbytes] == expected_bytes


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"b": entry([2], 8, 16), "a": entry([2], 0, 8)}, bytes(16)))
    assert list(read_safetensors_header(path)) == ["a", "b"]


def test_a_padded_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"a": entry([2], 0, 8)}).encode()
    path.write_bytes(safetensors_bytes(text + b" " * 37, bytes(8)))
    assert read_safetensors_header(path)["a"].offset == 8 + len(text) + 37


ONE = {"a": entry([2], 0, 8)}
FAULTS: dict[str, tuple[bytes, str]] = {
    "shorter than a length": (b"\x01\x02\x03", "is 3 bytes long"),
    "not safetensors": (b"PK\x03\x04" + b"x" * 100, "is not a safetensors file"),
    "header over the limit": (struct.pack("<Q", 100_000_001) + b"{}", "100000000 at most are possible"),
    "cut inside the header": (safetensors_bytes(ONE)[:-10], r"cut short inside its header \(truncated\)"),
    "no JSON": (safetensors_bytes(b"{nothing}"), "header is not valid"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "header is not valid"),
    "a list": (safetensors_bytes(b"[]"), "does not begin with {"),
    "a space first": (safetensors_bytes(b" {}"), "does not begin with {"),
    "deep nesting": (safetensors_bytes(b'{"a":' * 200_000), "header is not valid: it is nested too deeply"),
    "NaN": (safetensors_bytes(b'{"a": NaN}'), "NaN is not a JSON number"),
    "a huge integer": (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "header is not valid"),
    "a name twice": (
        safetensors_bytes(b'{"a":%b,"a":%b}' % ((json.dumps(entry([2], 0, 8)).encode(),) * 2), bytes(8)),
        "duplicate key 'a'",
    ),
    "a field twice": (
        safetensors_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "duplicate key 'dtype'",
    ),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"n": 1}}), "__metadata__"),
    "an entry that is no object": (safetensors_bytes({"a": 3}), "tensor 'a': its entry should have dtype"),
    "a missing field": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}), r"found \['dtype', 'shape'\]"),
    "a field too many": (safetensors_bytes({"a": {**entry([2], 0, 8), "x": 1}}, bytes(8)), "its entry should have"),
    "an unknown dtype": (safetensors_bytes({"a": entry([2], 0, 8, "F33")}, bytes(8)), "unknown dtype 'F33'; known are"),
    "a dtype that is a list": (safetensors_bytes({"a": {**ONE["a"], "dtype": []}}, bytes(8)), "unknown dtype"),
    "a negative dim": (safetensors_bytes({"a": entry([-2], 0, 8)}, bytes(8)), r"shape \[-2\] is not a list of sizes"),
    "a float dim": (safetensors_bytes({"a": entry([2.0], 0, 8)}, bytes(8)), r"shape \[2.0\] is not"),
    "a bool dim": (safetensors_bytes({"a": entry([True, 2], 0, 8)}, bytes(8)), r"shape \[True, 2\] is not"),
    "a shape that is no list": (safetensors_bytes({"a": {**ONE["a"], "shape": 2}}, bytes(8)), "shape 2 is not"),
    "a product that overflows": (safetensors_bytes({"a": entry([2**33, 2**31], 0, 0)}), "overflows"),
    "zero times an overflow": (safetensors_bytes({"a": entry([2**62, 2**62, 0], 0, 0)}), "overflows"),
    "a dim beyond 64 bits": (safetensors_bytes({"a": entry([2**80], 0, 0)}), "is not a list of sizes"),
    "many large dims": (safetensors_bytes({"a": entry([2**62] * 50_000, 0, 0)}), "overflows"),
    "bytes that are not the shape's": (
        safetensors_bytes({"a": entry([3], 0, 8)}, bytes(8)),
        r"shape \[3\] of F32 needs 12 bytes, data_offsets \[0, 8\] hold 8",
    ),
    "offsets the wrong way round": (safetensors_bytes({"a": entry([2], 8, 0)}, bytes(8)), "end before they begin"),
    "a negative offset": (safetensors_bytes({"a": entry([2], -8, 0)}, bytes(8)), r"\[-8, 0\] are not"),
    "three offsets": (safetensors_bytes({"a": {**ONE["a"], "data_offsets": [0, 8, 9]}}, bytes(8)), "are not"),
    "an overlap": (
        safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "tensors 'a' and 'b' overlap: the first ends at data byte 8, the second begins at 4",
    ),
    "a hole": (
        safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, bytes(20)),
        "4 bytes before tensor 'b' are not covered",
    ),
    "a hole at the start": (safetensors_bytes({"a": entry([2], 4, 12)}, bytes(12)), "4 bytes before tensor 'a'"),
    "cut short": (safetensors_bytes(ONE, bytes(3)), r"cut short by 5 bytes \(truncated\).*beyond the end is 'a'"),
    "trailing bytes": (safetensors_bytes(ONE, bytes(72)), "64 trailing bytes after the last tensor"),
    "trailing bytes only": (safetensors_bytes({}, bytes(5)), "5 trailing bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_words(fault: str, tmp_path: Path) -> None:
    content, words = FAULTS[fault]
    (problem,) = problems_of(content, tmp_path)
    assert re.search(words, problem), problem


# what the reference lets pass and this parser does not
LENIENT = {"a space first", "a name twice", "a field twice", "a field too many", "deep nesting", "metadata of numbers"}


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - LENIENT))
def test_the_reference_refuses_the_same(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FAULTS[fault][0])
    with pytest.raises((SafetensorError, OSError)), safe_open(path, "np"):
        pass


def test_truncation_names_both_sizes(tmp_path: Path) -> None:
    content = safetensors_bytes(ONE, bytes(8))
    (problem,) = problems_of(content[:-4], tmp_path)
    assert f"its header needs {len(content)} bytes, the file has {len(content) - 4}" in problem


def test_every_wrong_tensor_is_reported(tmp_path: Path) -> None:
    header = {"a": entry([3], 0, 8), "b": entry([2], 8, 16, "F99"), "c": entry([2], 16, 24), "d": entry([-1], 0, 1)}
    problems = problems_of(safetensors_bytes(header, bytes(24)), tmp_path)
    assert [problem.split("tensor ")[1][:3] for problem in problems] == ["'a'", "'b'", "'d'"]


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


STAND_INS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: path.parent.mkdir(exist_ok=True), "does not exist"),
    "a dangling link": (lambda path: path.symlink_to("../blobs/gone"), r"is a link to ../blobs/gone, which does not"),
    "a folder": (lambda path: path.mkdir(), "is a folder where a file should be"),
    "a pipe": (_make_fifo, "is not a regular file"),
    "an empty file": (lambda path: path.touch(), r"is empty \(0 bytes\)"),
    "a git-lfs pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4976698672\n"),
        "git-lfs pointer of 73 bytes.*git lfs pull",
    ),
    "a link's text": (lambda path: path.write_text("../../blobs/2883f1"), "copied without its links"),
}


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_what_is_no_weights_file_is_called_what_it_is(stand_in: str, tmp_path: Path) -> None:
    make, words = STAND_INS[stand_in]
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        read_safetensors_header(path)
    assert str(path) in str(caught.value)


def test_no_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:  # tests may run as root, whom no file mode stops
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(ONE, bytes(8)))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointFormatError, match=r"may not be read \(no permission\)"):
        read_safetensors_header(path)


def test_a_lying_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_999_999) + b"{" * 100)
    tracemalloc.start()
    with pytest.raises(CheckpointFormatError, match="cut short"):
        read_safetensors_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=200, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    kept=st.integers(0, 10_000),
    cut=st.booleans(),
)
def test_damage_is_refused_or_harmless(
    flips: list[tuple[int, int]], kept: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is damaged: a CheckpointError, or a header whose every byte lies inside the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    header = {"a": entry([4, 2], 0, 32), "b": entry([3], 32, 44), "__metadata__": {"format": "pt"}}
    content = bytearray(safetensors_bytes(header, array(11).tobytes()))
    for position, value in flips:
        content[position % len(content)] = value
    path.write_bytes(content[: kept % (len(content) + 1)] if cut else content)
    try:
        found = read_safetensors_header(path)
    except CheckpointError:
        return
    size = path.stat().st_size
    assert all(info.offset + info.nbytes <= size for info in found.values())
    assert all(int(np.prod(info.shape)) * info.dtype.itemsize == info.nbytes for info in found.values())
