"""Decoding: bit for bit what the gguf package decodes, in any cut into rows, and rotary rows back in their order."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quant.dtypes import DType, from_torch
from streaming.checkpoint import TensorInfo, decode, decode_into, decode_rows, open_checkpoint, unpermute
from streaming.checkpoint.blocks import SWAPPED_FIELDS
from streaming.checkpoint.encodings import LITTLE_ENDIAN_ONLY, READABLE
from tests.streaming.checkpoint.build import array, llama_tensors, write_gguf

ENCODED = {kind.name: number for number, kind in READABLE.items() if kind.encoding}

# float16 factors of a block by their offsets, where it is not one at 0
FACTORS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
WITHOUT_FIELDS = {"MXFP4", "NVFP4"}  # bytes alone


def random_blocks(name: str, rows: int, cols: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes of every block, with finite float16 factors: uint8 [rows, row_nbytes]."""
    kind = READABLE[ENCODED[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * cols // kind.block_values, kind.block_nbytes), dtype=np.uint8)
    for offset in FACTORS.get(name, (0,)):
        factors = rng.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = factors.view(np.uint8)
    if name == "IQ1_M":  # its factor is spread over the high nibbles of four words; 0x3A5C is 0.795
        scales = blocks[:, 48:56].view(np.uint16)
        scales[:] = (scales & 0x0FFF) | np.array([0xC000, 0x5000, 0xA000, 0x3000], np.uint16)
    return blocks.reshape(rows, -1)


def info_of(name: str, raw: np.ndarray[Any, Any], cols: int, **changes: Any) -> TensorInfo:
    kind = READABLE[ENCODED[name]]
    return TensorInfo("t", (len(raw), cols), kind.dtype, Path("model.gguf"), 0, raw.size, kind.encoding, **changes)


def reference(name: str, raw: np.ndarray[Any, Any]) -> torch.Tensor:
    with np.errstate(over="ignore"):  # MXFP4's largest exponents
        return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ENCODED[name])))


def test_every_encoding_is_there() -> None:
    """All that the package can take apart. It has no decoder for those of activations, and none for integers."""
    reference_has = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}
    assert set(ENCODED) == reference_has
    assert set(SWAPPED_FIELDS) == reference_has - LITTLE_ENDIAN_ONLY


@pytest.mark.parametrize("name", ENCODED)
def test_every_encoding_is_decoded_as_the_reference_decodes_it(name: str) -> None:
    raw = random_blocks(name, 12, 1024)
    found = decode_rows(info_of(name, raw, 1024), bytearray(raw.tobytes()), rows=(0, 12))
    assert torch.equal(found, reference(name, raw))


def test_factors_that_are_not_finite_are_decoded_as_the_reference_decodes_them(recwarn: Any) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (3, 256 // 256 * 66), dtype=np.uint8)
    blocks[:, :2] = np.array([[np.inf], [np.nan], [1.0]], np.float16).view(np.uint8)
    found = decode_rows(info_of("IQ2_XXS", blocks, 256), blocks.tobytes(), rows=(0, 3))
    assert found[0].isinf().all()
    assert found[1].isnan().all()
    assert found[2].isfinite().all()
    assert not recwarn.list


@pytest.mark.parametrize("name", sorted(set(ENCODED) - LITTLE_ENDIAN_ONLY))
def test_big_endian_blocks_are_turned_around(name: str) -> None:
    raw = random_blocks(name, 4, 512)
    swapped = raw.reshape(-1, READABLE[ENCODED[name]].block_nbytes).copy()
    for offset, nbytes in SWAPPED_FIELDS[name]:
        swapped[:, offset : offset + nbytes] = swapped[:, offset : offset + nbytes][:, ::-1].copy()
    assert name in WITHOUT_FIELDS or not np.array_equal(swapped, raw.reshape(swapped.shape))
    info = info_of(name, raw, 512, big_endian=True)
    assert torch.equal(decode_rows(info, swapped.tobytes(), rows=(0, 4)), reference(name, raw))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K", "IQ3_S", "MXFP4"])
def test_rows_can_be_decoded_on_their_own(name: str) -> None:
    raw = random_blocks(name, 9, 256)
    info, whole = info_of(name, raw, 256), reference(name, raw)
    for first, stop in ((0, 1), (3, 8), (8, 9), (4, 4)):
        found = decode_rows(info, raw[first:stop].tobytes(), rows=(first, stop))
        assert torch.equal(found, whole[first:stop])


@pytest.mark.parametrize("name", ENCODED)
def test_a_block_can_stand_alone(name: str) -> None:
    """A row of one block, by itself and at any address: no field of it lies where a wider word could be read."""
    size = READABLE[ENCODED[name]].block_values
    raw = random_blocks(name, 3, size)
    info, whole = info_of(name, raw, size), reference(name, raw)
    padded = torch.zeros(raw.size + 8, dtype=torch.uint8)
    for start in range(8):
        padded[start : start + raw.size] = torch.from_numpy(raw).view(-1)
        for row in range(3):
            source = padded[start + row * raw.shape[1] : start + (row + 1) * raw.shape[1]]
            assert torch.equal(decode_rows(info, source, rows=(row, row + 1)), whole[row : row + 1])
    assert torch.equal(decode_rows(info, raw[1].tobytes(), rows=(1, 2)), whole[1:2])


@pytest.mark.parametrize("heads", [0, 6])
def test_chunks_make_no_difference(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_1", 24, 64)
    info = info_of("Q4_1", raw, 64, rope_heads=heads)
    whole = decode_rows(info, raw.tobytes(), rows=(0, 24))
    monkeypatch.setattr(decode, "_CHUNK_VALUES", 5 * 64)
    assert torch.equal(decode_rows(info, raw.tobytes(), rows=(0, 24)), whole)


def test_rounding_to_a_narrower_dtype_happens_once() -> None:
    raw = random_blocks("Q4_1", 8, 64)
    out = torch.empty(8, 64, dtype=torch.bfloat16)
    decode_into(info_of("Q4_1", raw, 64), raw.tobytes(), out, first_row=0)
    assert torch.equal(out, reference("Q4_1", raw).bfloat16())


def test_decoding_fills_a_view_and_nothing_beside_it() -> None:
    raw = random_blocks("Q8_0", 4, 32)
    around = torch.full((6, 40), 7.0)
    decode_into(info_of("Q8_0", raw, 32), raw.tobytes(), around[1:5, 4:36], first_row=0)
    assert torch.equal(around[1:5, 4:36], reference("Q8_0", raw))
    assert around.sum() - around[1:5, 4:36].sum() == pytest.approx(7.0 * (6 * 40 - 4 * 32))


def sources(content: bytes, folder: Path) -> dict[str, Any]:
    """The same bytes as every kind of buffer that a reader may have."""
    (folder / "raw").write_bytes(content)
    with (folder / "raw").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    padded = torch.zeros(len(content) + 1, dtype=torch.uint8)
    padded[1:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {
        "bytes": content,
        "bytearray": bytearray(content),
        "a read-only memoryview": memoryview(content),
        "a map": mapped,
        "a numpy array": np.frombuffer(content, np.uint8),
        "a tensor": torch.frombuffer(bytearray(content), dtype=torch.uint8),
        "a tensor at an odd address": padded[1:],
    }


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ1_S"])
def test_any_buffer_will_do(name: str, tmp_path: Path) -> None:
    raw = random_blocks(name, 5, 256)
    for kind, source in sources(raw.tobytes(), tmp_path).items():
        found = decode_rows(info_of(name, raw, 256), source, rows=(0, 5))
        assert torch.equal(found, reference(name, raw)), kind


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k, by its description: first and second halves of a head take turns."""
    size = weight.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[torch.tensor(order)]


@pytest.mark.parametrize("shape", [(32, 5), (32,), (32, 2, 3)])
def test_unpermute_undoes_the_converters_permutation(shape: tuple[int, ...]) -> None:
    weight = torch.from_numpy(array(*shape))
    assert not torch.equal(permuted(weight, 4), weight)
    assert torch.equal(unpermute(permuted(weight, 4), heads=4), weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("heads", [0, 4])
def test_plain_numbers(dtype: torch.dtype, big_endian: bool, heads: int) -> None:
    weight = torch.from_numpy(array(32, 6)).to(dtype)
    stored = permuted(weight, heads) if heads else weight
    raw = stored.contiguous().view(torch.uint8).numpy().reshape(-1, dtype.itemsize)
    content = (raw[:, ::-1] if big_endian else raw).tobytes()
    info = TensorInfo("t", (32, 6), from_torch(dtype), Path("m"), 0, len(content), None, heads, big_endian)
    found = decode_rows(info, content, rows=(0, 32))
    assert found.dtype == dtype
    assert torch.equal(found, weight)
    part = slice(8, 24)  # heads 1 and 2
    nbytes = info.row_nbytes
    assert torch.equal(decode_rows(info, content[8 * nbytes : 24 * nbytes], rows=(8, 24)), weight[part])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_shift_is_rounded_once_where_its_numbers_are_written(dtype: torch.dtype, target: torch.dtype) -> None:
    """0.1 - 1 in float16 has fewer digits than in float32: the sum is made in the wider of float32 and the file's."""
    stored = torch.from_numpy(1 + 0.9 * array(64)).to(dtype)
    info = TensorInfo("t", (64,), from_torch(dtype), Path("m"), 0, stored.nbytes, shift=-1.0)
    out = torch.empty(64, dtype=target)
    decode_into(info, stored.view(torch.uint8), out, first_row=0)
    wide = stored.double() - 1.0 if dtype is torch.float64 else stored.float() - 1.0
    assert torch.equal(out, wide.to(target))


def test_rows_of_half_a_head_are_refused() -> None:
    raw = random_blocks("Q8_0", 32, 32)
    info = info_of("Q8_0", raw, 32, rope_heads=4)
    for first, stop in ((0, 12), (4, 12), (1, 2)):
        with pytest.raises(ValueError, match=f"rows {first} to {stop} do not begin and end with a head of 8 rows"):
            decode_rows(info, raw[first:stop].tobytes(), rows=(first, stop))


def test_bytes_of_another_count_are_refused() -> None:
    raw = random_blocks("Q8_0", 4, 32)
    with pytest.raises(ValueError, match="tensor 't': expected 3 rows of 34 bytes, found 136 bytes"):
        decode_rows(info_of("Q8_0", raw, 32), raw.tobytes(), rows=(0, 3))


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_file_through_and_through(big_endian: bool, tmp_path: Path) -> None:
    """What a writer wrote, the rotary rows in the converter's order, comes back as the model's own numbers."""
    weights = {name: torch.from_numpy(values) for name, values in llama_tensors().items()}
    stored = dict(weights)
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        stored[name] = permuted(weights[name], heads)
    arrays = {
        name: tensor.numpy().astype(np.float16 if tensor.ndim > 1 else np.float32) for name, tensor in stored.items()
    }
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=arrays, big_endian=big_endian))
    content = (tmp_path / "m.gguf").read_bytes()
    for name, ours in (
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        info = found.tensors[ours]
        values = decode_rows(info, content[info.offset : info.offset + info.nbytes], rows=(0, info.shape[0]))
        expected = weights[name].half() if weights[name].ndim > 1 else weights[name]
        assert torch.equal(values, expected), name
        assert info.dtype is (DType.F16 if weights[name].ndim > 1 else DType.F32)
