"""PyTorch's own files without PyTorch: each tensor where torch.save put it, and strangers' pickles refused in words."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.dtypes import DType, to_torch
from streaming.checkpoint.decode import decode_rows
from streaming.checkpoint.pickles import read_pickle_header
from streaming.checkpoint.pt_objects import Ignored, plain_key
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointFormatError

STEPS = pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
BOTH = pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])


def saved(path: Path, content: object, *, as_zip: bool = True, protocol: int = 2) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=as_zip, pickle_protocol=protocol)
    return path


def numbers(info: TensorInfo) -> torch.Tensor:
    """The tensor as the decoder gives it from the file's bytes."""
    assert isinstance(info.file, Path)
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    assert len(raw) == info.nbytes
    if not info.shape:
        return torch.frombuffer(bytearray(raw), dtype=to_torch(info.dtype))[0]
    return decode_rows(info, raw, rows=(0, info.shape[0]))


def check(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """The file's tensors are exactly these, to the bit."""
    found, _ = read_pickle_header(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tuple(tensor.shape), name
        ours, theirs = numbers(found[name]), tensor.detach().contiguous()
        assert ours.dtype is theirs.dtype, name
        assert ours.view(-1).view(torch.uint8).equal(theirs.view(-1).view(torch.uint8)), name


def refused(path: Path) -> str:
    with pytest.raises(CheckpointFormatError) as caught:
        read_pickle_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_kind() -> dict[str, Any]:
    """A tensor of every dtype, and every way in which one can lie in a storage."""
    base = some(6, 8)
    kinds: dict[str, Any] = {
        dtype.value: torch.arange(1, 7).view(2, 3).to(to_torch(dtype))
        for dtype in DType
        if dtype.in_files and dtype is not DType.F8_E8M0
    }
    return kinds | {
        "F8_E8M0": torch.tensor([[0.5, 2.0, 4.0]]).to(torch.float8_e8m0fnu),
        "parameter": torch.nn.Parameter(some(3, 4, seed=1)),
        "buffer": torch.nn.Buffer(some(5, seed=2)),
        "transposed": some(4, 5, seed=3).t(),
        "permuted": some(2, 3, 4, seed=4).permute(2, 0, 1),
        "whole": base,
        "tied": base,
        "row": base[3],
        "rows": base[2:5],
        "columns": base[:, 3:5],
        "every second": base[::2, ::3],
        "expanded": some(1, 3, seed=5).expand(4, 3),
        "one row": some(9, 1, seed=6).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


@BOTH
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_tensor_is_found_as_torch_loads_it(as_zip: bool, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.bin", every_kind(), as_zip=as_zip, protocol=protocol)
    check(path, every_kind())
    if as_zip:  # torch cannot load its own legacy files where they hold float8
        check(path, torch.load(path, weights_only=False))


@BOTH
def test_a_modules_state_dict_with_its_metadata(as_zip: bool, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    check(saved(tmp_path / "model.bin", module.state_dict(), as_zip=as_zip), module.state_dict())


@BOTH
def test_tied_tensors_share_their_bytes(as_zip: bool, tmp_path: Path) -> None:
    table = some(4, 4)
    found, notes = read_pickle_header(saved(tmp_path / "m.bin", {"a": table, "b": table, "c": table[1]}, as_zip=as_zip))
    assert found["a"].offset == found["b"].offset == found["c"].offset - 16
    assert notes == ()


def test_rows_that_lie_in_order_need_no_strides(tmp_path: Path) -> None:
    found, _ = read_pickle_header(saved(tmp_path / "model.bin", every_kind()))
    strided = {name for name, info in found.items() if info.strides is not None}
    assert strided == {"transposed", "permuted", "columns", "every second", "expanded"}
    assert found["transposed"].strides == (1, 5)
    assert all(info.is_plain for name, info in found.items() if name not in strided)


@pytest.mark.parametrize("name", ["state_dict", "model", "anything"])
def test_the_only_dict_of_tensors_in_a_dict_is_the_model(name: str, tmp_path: Path) -> None:
    state = {0: {"exp_avg": some(2)}}
    tensors = {"x": some(2, 3)}
    content = {name: tensors, "optimizer": {"state": state, "lr": 1e-4}, "epoch": 3, "note": None}
    path = saved(tmp_path / "model.pt", content)
    check(path, tensors)
    assert read_pickle_header(path)[1] == (f"model.pt: the tensors are those of its entry {name!r}",)


def test_entries_that_are_no_tensors_are_left_out(tmp_path: Path) -> None:
    others = {
        "step": 7, "big": 2**70, "negative": -(2**33), "loss": 0.25, "name": "x", "raw": b"\x00\xff", "yes": True,
        "none": None, "list": [1, [2]], "set": {1, 2}, "device": torch.device("cpu"), "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16, "complex": 1 + 2j, ("a", 1): 3, 5: 6,
    }  # fmt: skip
    path = saved(tmp_path / "model.pt", {"x": some(2), **others})
    check(path, {"x": some(2)})


def test_a_tensor_with_attributes_of_its_own(tmp_path: Path) -> None:
    tensor = some(2, 3)
    tensor.note = "kept by torch"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(some(3))
    parameter.note = "as well"  # type: ignore[attr-defined]
    check(saved(tmp_path / "m.bin", {"x": tensor, "p": parameter}), {"x": tensor, "p": parameter})


def test_an_ordered_dict_as_python_2_wrote_it(tmp_path: Path) -> None:
    class Pairs:
        def __reduce__(self) -> tuple[Any, ...]:
            return OrderedDict, ([["x", some(2)]],)

    check(saved(tmp_path / "model.bin", Pairs()), {"x": some(2)})


def test_a_big_endian_file(tmp_path: Path) -> None:
    content = {"x": some(3, 4), "half": some(5).half(), "bytes": torch.arange(4, dtype=torch.uint8)}
    swapped = {name: tensor.view(torch.uint8).view(-1, tensor.itemsize).flip(1).reshape(tensor.shape[0], -1)
               for name, tensor in content.items()}  # fmt: skip
    turned = {
        name: swapped[name].contiguous().view(tensor.dtype).view(tensor.shape) for name, tensor in content.items()
    }
    path = rewritten(saved(tmp_path / "m.bin", turned), {"byteorder": b"big"})
    check(path, content)
    assert read_pickle_header(path)[0]["x"].big_endian


def rewritten(path: Path, changes: Mapping[str, bytes | None], **options: Any) -> Path:
    """The archive again with members replaced, added, or (None) left out."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    prefix = next(name for name in members if name.endswith("/data.pkl")).removesuffix("data.pkl")
    for name, content in changes.items():
        members[prefix + name] = content  # type: ignore[assignment]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return path


# --- refused: other kinds of files ----------------------------------------------------------------------------------


def as_tar(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"))


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "missing": (lambda path: None, "does not exist"),
    "text": (lambda path: path.write_bytes(b"hello" * 50), "is not a file of torch.save"),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), "is not a file of torch.save"),
    "a plain pickle": (lambda path: path.write_bytes(pickle.dumps({"x": 1})), "is not a file of torch.save"),
    "safetensors": (
        lambda path: path.write_bytes(b"\x02\0\0\0\0\0\0\0{}"), "is a safetensors file by its content",
    ),
    "gguf": (lambda path: path.write_bytes(b"GGUF" + bytes(60)), "is a GGUF file by its content"),
    "tar": (as_tar, "is a tar archive"),
    "git-lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_file_is_named(kind: str, tmp_path: Path) -> None:
    write, words = KINDS[kind]
    write(tmp_path / "model.bin")
    assert words in refused(tmp_path / "model.bin")


@BOTH
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([some(2)], "holds a list, not a dict"),
        (some(2), "holds a tensor, not a dict"),
        ({}, "holds no tensors"),
        ({"a": 1, "b": {"c": {"d": some(2)}}}, "holds no tensors"),
        ({"model": {"x": some(2)}, "ema": {"x": some(2)}}, "holds 2 dicts of tensors, ema, model"),
    ],
)
def test_what_holds_no_model_is_refused(as_zip: bool, content: object, words: str, tmp_path: Path) -> None:
    assert words in refused(saved(tmp_path / "model.pt", content, as_zip=as_zip))


class OwnTensor(torch.Tensor):
    """A subclass: its numbers may mean anything."""


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(some(3), 0.1, 0, torch.qint8)


@BOTH
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: some(2, 3).to_sparse(), "a sparse tensor"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "a complex128 tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "a conjugated or negated view"),
        (lambda: torch.zeros(2, device="meta"), "a tensor without data"),
        (lambda: some(2).as_subclass(OwnTensor), "'tests.streaming.checkpoint.test_pickles.OwnTensor'"),
        (lambda: torch.nn.Linear(2, 2), "'torch.nn.modules.linear.Linear'"),
        (quantized, "a quantized tensor"),
    ],
    ids=["sparse", "complex128", "conjugated", "meta", "subclass", "module", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain_are_refused(
    as_zip: bool, make: Callable[[], object], words: str, tmp_path: Path
) -> None:
    assert words in refused(saved(tmp_path / "model.bin", {"x": some(2), "odd": make()}, as_zip=as_zip))


# --- refused: hostile pickles ---------------------------------------------------------------------------------------


class Call:
    """Unpickled by Python, this would call a function."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


@BOTH
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "posix.system"), (eval, "builtins.eval"), (getattr, "builtins.getattr"), (io.open, "io.open"),
     (torch.load, "torch.serialization.load"), (torch.hub.load, "torch.hub.load")],
)  # fmt: skip
def test_a_call_of_anything_else_is_refused_by_name_and_not_made(
    as_zip: bool, function: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model.bin", {"x": some(2), "y": Call(function, f"touch {tmp_path}/made")}, as_zip=as_zip)
    assert name in refused(path)
    assert not (tmp_path / "made").exists()


def pickled(*operations: bytes) -> bytes:
    return b"\x80\x02" + b"".join(operations) + b"."


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def tensor_of(offset: bytes, shape: bytes, strides: bytes, storage: bytes = STORAGE) -> bytes:
    """{"x": a view of storage 0, which has 6 numbers}"""
    view = REBUILD + b"(" + storage + offset + shape + strides + b"\x89ccollections\nOrderedDict\n)RtR"
    return pickled(b"}X\x01\0\0\0x", view, b"s")


def huge(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "pickle exhausted"),
    "no end": (b"\x80\x02}", "pickle exhausted"),
    "an unknown operation": (pickled(b"\xff"), "unknown"),
    "an empty stack": (pickled(), "values left over"),
    "a pop too many": (pickled(b"0"), "never opened"),
    "a memo that is not there": (pickled(b"h\x07"), "refers to value 7"),
    "a memo far away": (pickled(b"}r\xff\xff\xff\xffj\xfe\xff\xff\xff"), "refers to value 4294967294"),
    "deep tuples": (pickled(b")" + b"\x85" * 30_000 + b"}\x86"), "holds a tuple, not a dict"),
    "a deep tuple as a key": (pickled(b"})" + b"\x85" * 30_000 + b"K\x01s"), "holds no tensors"),
    "open groups": (pickled(b"(" * 30_000), "nested more than"),
    "a tall stack": (pickled(b"N" * 300_000), "stacks more than"),
    "a text of 4 GB": (pickled(b"X\xff\xff\xff\xffx"), "expected 4294967295 bytes"),
    "a number of a megabit": (pickled(b"\x8b\x00\x00\x02\x00" + b"\x7f" * 0x20000), "a number of"),
    "digits without end": (pickled(b"I" + b"9" * 100_000 + b"\n"), ""),
    "an instance": (pickled(b"(cos\nsystem\no"), "'os.system'"),
    "an instance by name": (pickled(b"(ios\nsystem\n"), "INST"),
    "a new object": (pickled(b"ccollections\nOrderedDict\n)\x81"), "NEWOBJ"),
    "an extension": (pickled(b"\x82\x01"), "EXT1"),
    "a global by stack": (b"\x80\x04X\x02\0\0\0osX\x06\0\0\0system\x93.", "'os.system'"),
    "a global of a number": (b"\x80\x04K\x01K\x02\x93.", "by something that is no text"),
    "a call of a number": (pickled(b"K\x01)R"), "calls a int"),
    "a call of a dtype": (pickled(b"ctorch\nfloat32\n)R"), "calls torch.float32"),
    "a persistent text": (pickled(b"Psomething\n"), "PERSID"),
    "items of a number": (pickled(b"K\x01K\x02K\x03s"), "sets items of a int"),
    "a key without a value": (pickled(b"}(K\x01u"), "a key that has no value"),
    "a list in itself": (pickled(b"]q\x00h\x00a"), "holds a list"),
    "no storage": (tensor_of(b"K\x00", b"K\x02\x85", b"K\x01\x85", b"N"), "without a storage"),
    "another storage": (
        tensor_of(b"K\x00", b"K\x02\x85", b"K\x01\x85", STORAGE.replace(b"\x000X", b"\x009X")),
        "'9' is not in the file",
    ),
    "a larger storage": (
        tensor_of(b"K\x00", b"K\x02\x85", b"K\x01\x85", STORAGE.replace(b"K\x06", b"K\x07")), "should have 28 bytes",
    ),
    "a view beyond its storage": (tensor_of(b"K\x01", b"K\x06\x85", b"K\x01\x85"), "needs 28 bytes of its storage"),
    "strides beyond its storage": (
        tensor_of(b"K\x00", b"K\x02K\x02\x86", b"K\x05K\x01\x86"), "needs 28 bytes of its storage",
    ),
    "a negative offset": (tensor_of(huge(-1), b"K\x02\x85", b"K\x01\x85"), "not numbers from 0 up"),
    "a negative stride": (tensor_of(b"K\x05", b"K\x02\x85", huge(-1) + b"\x85"), "not numbers from 0 up"),
    "a shape of True": (tensor_of(b"K\x00", b"\x88\x85", b"K\x01\x85"), "not numbers from 0 up"),
    "too few strides": (tensor_of(b"K\x00", b"K\x02K\x03\x86", b"K\x01\x85"), "one stride for each dim"),
    "a shape that overflows": (
        tensor_of(b"K\x00", huge(2**40) * 2 + b"\x86", b"K\x00K\x00\x86"), "overflows",
    ),
    "a shape that overflows to zero": (
        tensor_of(b"K\x00", huge(2**62) + huge(4) + b"\x86", b"K\x00K\x00\x86"), "overflows",
    ),
    "one number a trillion times": (tensor_of(b"K\x00", huge(10**12) + b"\x85", b"K\x00\x85"), "repeats few numbers"),
    "a thousand dims": (
        tensor_of(b"K\x00", b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t"), "not numbers from 0 up",
    ),
    "a hundred dims": (tensor_of(b"K\x00", b"(" + b"K\x01" * 100 + b"t", b"(" + b"K\x01" * 100 + b"t"), "100 dims"),
    "a call without arguments": (pickled(REBUILD, b")R"), "has 0 arguments"),
}  # fmt: skip
HOSTILE["a name that is no text"] = (
    HOSTILE["a view beyond its storage"][0].replace(b"X\x01\0\0\0x", b"X\x03\0\0\0\xed\xa0\x80", 1), "no valid text",
)  # fmt: skip


def six_numbers(path: Path) -> Path:
    return saved(path, {"x": some(6)})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_in_words(name: str, tmp_path: Path) -> None:
    content, words = HOSTILE[name]
    assert words in refused(rewritten(six_numbers(tmp_path / "model.bin"), {"data.pkl": content}))


@pytest.mark.parametrize("key", [2**61 - 1, -1, 1.0, True, None, (1, 2), b"x"])
def test_a_key_whose_hash_a_stranger_can_choose_is_not_kept(key: object) -> None:
    assert isinstance(plain_key(key), Ignored)


def test_the_hand_written_pickle_is_right_but_for_its_faults(tmp_path: Path) -> None:
    content = tensor_of(b"K\x01", b"K\x02\x85", b"K\x03\x85")
    check(rewritten(six_numbers(tmp_path / "model.bin"), {"data.pkl": content}), {"x": some(6)[1::3]})


def test_all_tensors_that_are_wrong_are_named_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.bin", {"a": some(3), "b": some(4), "c": some(5)})
    with zipfile.ZipFile(path) as archive:
        keys = [name.rpartition("/")[2] for name in archive.namelist() if "/data/" in name]
    rewritten(path, {f"data/{keys[0]}": bytes(8), f"data/{keys[2]}": None})
    with pytest.raises(CheckpointFormatError) as caught:
        read_pickle_header(path)
    assert [problem.split("tensor ")[1][:3] for problem in caught.value.problems] == ["'a'", "'c'"]


# --- refused: broken archives ---------------------------------------------------------------------------------------


def test_a_compressed_member_is_refused(tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path / "m.bin", {"x": torch.zeros(999)}), {}, compression=zipfile.ZIP_DEFLATED)
    assert "is compressed" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.pkl": None}, "it has 0 data.pkl"),
        ({"constants.pkl": b"x"}, "is a TorchScript program"),
        ({"byteorder": b"middle"}, "its byteorder is b'middle'"),
        ({"data/0": None}, "storage '0' is not in the file"),
        ({"data/0": b"short"}, "should have 24 bytes, the file has 5"),
    ],
)
def test_an_archive_whose_members_are_not_those_of_torch(
    changes: dict[str, bytes | None], words: str, tmp_path: Path
) -> None:
    assert words in refused(rewritten(six_numbers(tmp_path / "model.bin"), changes))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    path = six_numbers(tmp_path / "model.bin")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(archive.namelist()[0], b"again")
    assert "is there twice" in refused(path)


def test_members_that_overlap_or_lie_elsewhere(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.bin", {"x": some(6), "y": some(6, seed=1)})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        x, y = (info for info in archive.infolist() if "/data/" in info.filename)
        directory = archive.start_dir
    size_of_x = (
        whole.find(struct.pack("<I", x.header_offset), directory) - 22
    )  # in its line: packed, whole, ..., offset
    offset_of_y = whole.find(struct.pack("<I", y.header_offset), directory)
    path.write_bytes(patched(whole, size_of_x, struct.pack("<2I", 200, 200)))
    assert "overlap" in refused(path)
    path.write_bytes(patched(whole, size_of_x, struct.pack("<2I", 1 << 30, 1 << 30)))
    assert "lies outside the file" in refused(path)
    path.write_bytes(patched(whole, offset_of_y, struct.pack("<I", x.header_offset)))
    assert "is not where the directory says" in refused(path)


def patched(content: bytes, at: int, part: bytes) -> bytes:
    return content[:at] + part + content[at + len(part) :]


@BOTH
@STEPS
def test_a_file_cut_short_anywhere_is_refused(as_zip: bool, step: int, tmp_path: Path) -> None:
    content = saved(tmp_path / "model.bin", {"x": some(3), "y": some(2).half()}, as_zip=as_zip).read_bytes()
    path = tmp_path / "cut.bin"
    for nbytes in range(0, len(content), step):
        path.write_bytes(content[:nbytes])
        refused(path)


@BOTH
@STEPS
def test_a_changed_byte_gives_words_or_tensors(as_zip: bool, step: int, tmp_path: Path) -> None:
    content = saved(tmp_path / "model.bin", {"x": some(3), "y": some(2).half()}, as_zip=as_zip).read_bytes()
    path = tmp_path / "changed.bin"
    for at in range(0, len(content), step):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
        with suppress(CheckpointFormatError):
            for info in read_pickle_header(path)[0].values():
                assert info.offset + info.nbytes <= len(content)


def test_a_zip64_archive_is_read(tmp_path: Path) -> None:
    path = six_numbers(tmp_path / "model.bin")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as out:
                out.write(content)
    check(path, {"x": some(6)})


def test_bytes_after_the_last_storage_of_a_legacy_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.bin", {"x": some(3)}, as_zip=False)
    path.write_bytes(path.read_bytes() + b"more")
    assert "4 trailing bytes" in refused(path)
