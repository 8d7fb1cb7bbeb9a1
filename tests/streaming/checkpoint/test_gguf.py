"""The GGUF header: read as the gguf package's reader reads it; each way to be wrong has its own words."""

from __future__ import annotations

import re
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.encodings import READABLE
from streaming.checkpoint.gguf import read_gguf_header
from streaming.errors import CheckpointError, CheckpointFormatError, OptionError
from tests.streaming.checkpoint.build import (
    LLAMA_KEYS,
    array,
    gguf_bytes,
    llama_tensors,
    pair,
    tensor_entry,
    text,
    write_gguf,
)

Q = gguf.GGMLQuantizationType


def problems_of(content: bytes, folder: Path) -> tuple[str, ...]:
    path = folder / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError) as caught:
        read_gguf_header(path)
    assert all(str(path) in problem for problem in caught.value.problems)
    return caught.value.problems


def test_the_types_are_those_of_the_reference() -> None:
    assert {number: kind.name for number, kind in READABLE.items()} == {
        number: gguf.GGMLQuantizationType(number).name for number in READABLE
    }
    assert {number: (kind.block_values, kind.block_nbytes) for number, kind in READABLE.items()} == {
        number: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] for number in READABLE
    }


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_header_is_read_as_the_reference_reads_it(big_endian: bool, tmp_path: Path) -> None:
    types = {} if big_endian else {"blk.0.attn_q.weight": Q.Q8_0, "token_embd.weight": Q.Q4_1}
    path = write_gguf(tmp_path / "model.gguf", types=types, big_endian=big_endian)
    found, reference = read_gguf_header(path), gguf.GGUFReader(path)
    assert found.big_endian == big_endian
    fields = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert list(found.metadata) == list(fields)
    for key, field in fields.items():
        assert found.metadata[key] == field.contents(), key
    assert list(found.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = found.tensors[tensor.name]
        assert info.shape == tuple(reversed([int(dim) for dim in tensor.shape]))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert (info.encoding.name if info.encoding else info.dtype.value) == tensor.tensor_type.name
        assert info.big_endian == big_endian


def test_every_scalar_type_and_array_is_read(tmp_path: Path) -> None:
    scalars = {"B": (0, 200), "b": (1, -5), "H": (2, 60_000), "h": (3, -300), "I": (4, 2**31), "i": (5, -(2**31)),
               "f": (6, 0.5), "Q": (10, 2**63), "q": (11, -(2**62)), "d": (12, 0.1)}  # fmt: skip
    pairs = [pair(code, kind, struct.pack(f"<{code}", value)) for code, (kind, value) in scalars.items()]
    pairs += [
        pair(f"{code}s", 9, struct.pack(f"<IQ2{code}", kind, 2, value, 0)) for code, (kind, value) in scalars.items()
    ]
    pairs += [pair("yes", 7, b"\1"), pair("flags", 9, struct.pack("<IQ2B", 7, 2, 1, 0))]
    pairs += [pair("words", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("größe"))]
    pairs += [pair("bytes", 8, text(b"\xff\xfe"))]
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(pairs))
    found = read_gguf_header(tmp_path / "model.gguf").metadata
    for code, (_, value) in scalars.items():
        assert (found[code], found[f"{code}s"]) == (value, [value, 0])
    assert (found["yes"], found["flags"], found["words"]) == (True, [True, False], ["a", "", "größe"])
    assert found["bytes"].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_version_2_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([pair("a", 4, bytes(4))], version=2))
    assert dict(read_gguf_header(tmp_path / "model.gguf").metadata) == {"a": 0}


def test_the_files_own_alignment_is_used(tmp_path: Path) -> None:
    content = gguf_bytes([pair("general.alignment", 4, struct.pack("<I", 256))], [tensor_entry("t", (4,), 0, 0)])
    content = content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 256) + bytes(16)
    (tmp_path / "model.gguf").write_bytes(content)
    assert read_gguf_header(tmp_path / "model.gguf").tensors["t"].offset == len(content) - 16


F32, F16, Q4_0 = 0, 1, 2
ALIGN = "general.alignment"
FAULTS: dict[str, tuple[bytes, str]] = {
    "another file": (b"PK\x03\x04" * 10, "is not a GGUF file: it begins with b'PK"),
    "nothing but magic": (b"GGUF", "cut short or broken"),
    "version 1": (gguf_bytes(version=1), "is GGUF version 1; versions 2 and 3 can be read"),
    "version 4": (gguf_bytes(version=4), "is GGUF version 4"),
    "too many tensors": (gguf_bytes(counts=(2**60, 0)), f"says {2**60} tensors"),
    "too many pairs": (gguf_bytes(counts=(0, 2**63)), f"says {2**63} metadata pairs"),
    "a key twice": (gguf_bytes([pair("a", 4, bytes(4))] * 2), "duplicate metadata key 'a'"),
    "a string beyond the end": (gguf_bytes([pair("a", 8, struct.pack("<Q", 2**40))]), "cut short or broken"),
    "an unknown value type": (gguf_bytes([pair("a", 13, bytes(8))]), "'a' has the unknown value type 13"),
    "an array of arrays": (gguf_bytes([pair("a", 9, struct.pack("<IQ", 9, 1))]), "'a' has the unknown value type 9"),
    "an endless array": (gguf_bytes([pair("a", 9, struct.pack("<IQ", 6, 2**62))]), f"says {2**62} items in 'a'"),
    "endless strings": (gguf_bytes([pair("a", 9, struct.pack("<IQ", 8, 2**61))]), f"says {2**61} strings in 'a'"),
    "a string of an array beyond the end": (
        gguf_bytes([pair("a", 9, struct.pack("<IQQ", 8, 1, 2**63))]),
        "cut short or broken",
    ),
    "an alignment of 0": (gguf_bytes([pair(ALIGN, 4, bytes(4))]), "general.alignment is 0, not a power of two"),
    "an alignment of 48": (gguf_bytes([pair(ALIGN, 4, struct.pack("<I", 48))]), "is 48, not a power of two"),
    "an alignment in words": (gguf_bytes([pair(ALIGN, 8, text("32"))]), "is '32', not a power of two"),
    "no dims": (gguf_bytes(entries=[tensor_entry("t", (), F32, 0)]), "tensor 't' has 0 dims"),
    "five dims": (gguf_bytes(entries=[tensor_entry("t", (1,) * 5, F32, 0)]), "tensor 't' has 5 dims"),
    "an empty dim": (gguf_bytes(entries=[tensor_entry("t", (4, 0), F32, 0)]), r"shape \[0, 4\] has a dim of size 0"),
    "a tensor twice": (
        gguf_bytes(entries=[tensor_entry("t", (8,), F32, 0), tensor_entry("t", (8,), F32, 32)], data=bytes(64)),
        "duplicate tensor 't'",
    ),
    "half a block": (
        gguf_bytes(entries=[tensor_entry("t", (40, 2), Q4_0, 0)], data=bytes(64)),
        "tensor 't': rows of 40 values are not a whole number of Q4_0 blocks of 32",
    ),
    "a vector in blocks": (gguf_bytes(entries=[tensor_entry("t", (32,), Q4_0, 0)], data=bytes(32)), "has one dim"),
    "a type that is not decoded": (
        gguf_bytes(entries=[tensor_entry("t", (256, 1), 15, 0), tensor_entry("u", (256, 1), 15, 0)]),
        "tensor 't' and 1 more: type Q8_K cannot be decoded; known are F32, F16, BF16, F64, Q4_0",
    ),
    "a type that is not known": (gguf_bytes(entries=[tensor_entry("t", (32, 1), 99, 0)]), "type number 99 cannot"),
    "integers": (gguf_bytes(entries=[tensor_entry("t", (8,), 26, 0)], data=bytes(32)), "type I32 cannot be decoded"),
    "an overlap": (
        gguf_bytes(entries=[tensor_entry("t", (16,), F32, 0), tensor_entry("u", (8,), F32, 32)], data=bytes(96)),
        "tensor 'u' has offset 32, but the tensors before it end at 64",
    ),
    "a gap": (
        gguf_bytes(entries=[tensor_entry("t", (8,), F32, 0), tensor_entry("u", (8,), F32, 64)], data=bytes(96)),
        "tensor 'u' has offset 64, but the tensors before it end at 32",
    ),
    "an offset off the alignment": (
        gguf_bytes(entries=[tensor_entry("t", (8,), F32, 8)], data=bytes(64)),
        "tensor 't' has offset 8, but the tensors before it end at 0",
    ),
    "cut short": (
        gguf_bytes(entries=[tensor_entry("t", (8,), F32, 0)], data=bytes(31)),
        r"cut short \(truncated\): tensor 't' ends at byte 96, the file has 95",
    ),
    "a size beyond all files": (gguf_bytes(entries=[tensor_entry("t", (2**62, 2**62), F32, 0)]), "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_words(fault: str, tmp_path: Path) -> None:
    content, words = FAULTS[fault]
    problems = problems_of(content, tmp_path)
    assert re.search(words, problems[0]), problems


def test_a_type_with_no_big_endian_form_is_refused_there(tmp_path: Path) -> None:
    little = gguf_bytes(entries=[tensor_entry("t", (256, 1), 16, 0)], data=bytes(66))
    (tmp_path / "little.gguf").write_bytes(little)
    assert read_gguf_header(tmp_path / "little.gguf").tensors["t"].nbytes == 66
    head = b"GGUF" + struct.pack(">IQQQ", 3, 1, 0, 1) + b"t" + struct.pack(">IQQIQ", 2, 256, 1, 16, 0)
    (problem,) = problems_of(head + bytes(-len(head) % 32) + bytes(66), tmp_path)
    assert "tensor 't': type IQ2_XXS is not defined in a big-endian file" in problem


def test_a_type_that_the_package_decodes_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(entries=[tensor_entry("t", (256, 1), 21, 0)], data=bytes(110)))
    assert read_gguf_header(path).tensors["t"].nbytes == 110
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OptionError, match=r"'t': type IQ3_S is decoded by the package gguf.*: pip install gguf"):
        read_gguf_header(path)
    path.write_bytes(gguf_bytes(entries=[tensor_entry("t", (256, 1), 23, 0)], data=bytes(136)))
    assert read_gguf_header(path).tensors["t"].encoding == READABLE[23].encoding  # IQ4_XS needs none


def test_every_wrong_tensor_is_reported(tmp_path: Path) -> None:
    entries = [
        tensor_entry("a", (40, 2), Q4_0, 0),
        tensor_entry("b", (8,), F32, 64),
        tensor_entry("c", (8, 0), F32, 96),
        tensor_entry("d", (8, 1), 24, 96),
    ]
    problems = problems_of(gguf_bytes(entries=entries, data=bytes(256)), tmp_path)
    assert [re.search("tensor '(.)'", problem)[1] for problem in problems] == ["d", "a", "c"]  # type: ignore[index]


def test_bytes_after_the_last_tensor_are_noted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    assert open_checkpoint(path).notes == ()
    with path.open("ab") as file:
        file.write(bytes(100))
    (note,) = open_checkpoint(path).notes
    assert "100 bytes after the last tensor are left out" in note


@pytest.mark.parametrize(
    "fault", ["an endless array", "endless strings", "too many tensors", "a string beyond the end"]
)
def test_a_lying_length_allocates_nothing(fault: str, tmp_path: Path) -> None:
    tracemalloc.start()
    problems_of(FAULTS[fault][0], tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def small_gguf() -> bytes:
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
        pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("d")),
        pair("tokenizer.ggml.scores", 9, struct.pack("<IQ2f", 6, 2, 0.5, 1.5)),
    ]
    entries = [tensor_entry("token_embd.weight", (8, 4), F32, 0), tensor_entry("b", (32, 2), Q4_0, 128)]
    return gguf_bytes(pairs, entries, array(50).tobytes())


@pytest.mark.parametrize("cut", ["first", "second"])
def test_a_file_that_ends_anywhere_says_so(cut: str, tmp_path: Path) -> None:
    """Cut before every byte, a model of one file and each of a model's two parts: never opened, never another error."""
    keys = {key: value for key, value in LLAMA_KEYS.items() if not isinstance(value, list)}
    tensors = {name: array(*(4,) * values.ndim) for name, values in llama_tensors().items()}
    halves = [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    for number, (half, own_keys) in enumerate(zip(halves, (keys, {}), strict=True)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 11}
        write_gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", keys={**own_keys, **split}, tensors=half)
    path = tmp_path / f"m-0000{1 if cut == 'first' else 2}-of-00002.gguf"
    whole = path.read_bytes()
    last = max(info.offset + info.nbytes for info in read_gguf_header(path).tensors.values())
    for length in range(last):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut short|is empty|not a GGUF file") as caught:
            open_checkpoint(tmp_path)
        assert str(path) in str(caught.value)


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
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(small_gguf())
    for position, value in flips:
        content[position % len(content)] = value
    path.write_bytes(content[: kept % (len(content) + 1)] if cut else content)
    try:
        found = read_gguf_header(path)
    except CheckpointError:
        return
    assert all(info.offset + info.nbytes <= path.stat().st_size for info in found.tensors.values())
    assert len(list(found.metadata.items())) == len(found.metadata)


@settings(max_examples=200, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_model_is_refused_or_opened(
    flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same through the names and the configuration: never another error."""
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    if not whole.exists():
        keys = {key: value for key, value in LLAMA_KEYS.items() if not isinstance(value, list)}
        write_gguf(whole, keys=keys, tensors={**llama_tensors(), "rope_freqs.weight": np.ones(8, np.float32)})
    content = bytearray(whole.read_bytes())
    for position, value in flips:
        content[position % 1500] = value  # the header's part
    (folder / "damaged model.gguf").write_bytes(content)
    try:
        open_checkpoint(folder / "damaged model.gguf")
    except CheckpointError:
        return
