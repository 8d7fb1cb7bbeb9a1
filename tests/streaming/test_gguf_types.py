"""Models whose matrices are kept in each of GGUF's block types: streamed equals what the gguf package decodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from streaming import LoadOptions
from streaming.checkpoint.encodings import READABLE
from streaming.commands.verify import compare
from streaming.prepare import prepare
from tests.streaming.checkpoint.build import LLAMA_KEYS, array, llama_tensors, write_gguf

SIZES = {"llama.embedding_length": 256, "llama.feed_forward_length": 512, "llama.rope.dimension_count": 64}
SHAPES = {
    "token_embd": (40, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256), "blk.0.attn_v": (128, 256),
    "blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (512, 256), "blk.0.ffn_up": (512, 256),
    "blk.0.ffn_down": (256, 512),
}  # fmt: skip
NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
FACTORS = {  # float16 factors by their offsets, where a block has not one at 0
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
BLOCK_TYPES = [kind.name for kind in READABLE.values() if kind.encoding]


def random_rows(name: str, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Random blocks with small factors: uint8 [rows, row_nbytes]."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = np.random.default_rng(shape).integers(0, 256, (shape[0] * shape[1] // values, nbytes), dtype=np.uint8)
    for offset in FACTORS.get(name, (0,)):
        blocks[:, offset : offset + 2] = np.array([0.01], np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 122
    if name == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 48
    if name == "IQ1_M":  # 0x211F, 0.01, in the high nibbles of four words
        scales = blocks[:, 48:].view(np.uint16)
        scales[:] = (scales & 0x0FFF) | np.array([0xF000, 0x1000, 0x1000, 0x2000], np.uint16)
    return blocks.reshape(shape[0], -1)


def write_model(path: Path, name: str) -> Path:
    keys = {key: value for key, value in {**LLAMA_KEYS, **SIZES}.items() if not isinstance(value, list)}
    tensors = {f"{norm}.weight": array(256) for norm in NORMS}
    blocks = {f"{tensor}.weight": random_rows(name, shape) for tensor, shape in SHAPES.items()}
    return write_gguf(path, keys=keys, tensors={**tensors, **blocks}, stored=dict.fromkeys(blocks, name))


@pytest.mark.parametrize("given", ["", "model-00002-of-00002.gguf"])
def test_a_model_in_parts_is_streamed_whole(given: str, tmp_path: Path) -> None:
    keys = {key: value for key, value in LLAMA_KEYS.items() if not isinstance(value, list)}
    tensors = list(llama_tensors().items())
    for number in range(2):
        own = {**(keys if number == 0 else {}), "split.no": number, "split.count": 2}
        part = tmp_path / f"model-0000{number + 1}-of-00002.gguf"
        write_gguf(part, keys={**own, "split.tensors.count": len(tensors)}, tensors=dict(tensors[number::2]))
    prepared = prepare(str(tmp_path / given), LoadOptions(dtype="float32"))
    report = compare(prepared, [1, 5, 7, 30], argparse.Namespace(quantization="none", quiet=True, json=False))
    assert (report.differences, report.logits) == ([], 2 * 4 * 40)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_block_type_is_streamed_as_the_reference_decodes_it(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", name)
    prepared = prepare(str(path), LoadOptions(dtype="float32"))
    report = compare(prepared, [1, 5, 7, 30], argparse.Namespace(quantization="none", quiet=True, json=False))
    assert report.differences == []
    assert report.stored >= 8
    assert report.logits == 2 * 4 * 40
