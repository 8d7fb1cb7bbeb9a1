"""A GGUF model on a server is the local file to the bit; what cannot be read from a server is told in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from streaming import LLM, OptionError
from streaming.checkpoint import open_checkpoint
from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.remote.header_bytes import FIRST_NBYTES
from tests.streaming.checkpoint.build import LLAMA_KEYS, llama_tensors, write_gguf
from tests.streaming.remote.range_server import Handler, serving, times
from tests.streaming.remote.remote_model import logits

TOKENS = 40
BLOCKS = {"blk.0.ffn_up.weight": GGMLQuantizationType.Q8_0, "token_embd.weight": GGMLQuantizationType.Q4_0}
LONG = {**LLAMA_KEYS, "general.description": "x" * (5 * FIRST_NBYTES)}  # the header takes several requests


def write_split(folder: Path, *, counts: tuple[int, int] = (2, 2), numbers: tuple[int, int] = (0, 1)) -> list[Path]:
    """The same model in two parts, which say of themselves what is given."""
    tensors = llama_tensors()
    names = list(tensors)
    halves = [names[:5], names[5:]]
    paths = []
    for place, (half, count, number) in enumerate(zip(halves, counts, numbers, strict=True)):
        keys: dict[str, Any] = {"split.count": count, "split.no": number, "split.tensors.count": len(names)}
        path = folder / f"m-{place + 1:05}-of-00002.gguf"
        paths.append(
            write_gguf(path, keys={**(LLAMA_KEYS if place == 0 else {}), **keys}, tensors={n: tensors[n] for n in half})
        )
    return paths


@pytest.mark.parametrize("keys", [LLAMA_KEYS, LONG])
@pytest.mark.parametrize("load_format", ["auto", "remote", "gguf"])
def test_a_remote_gguf_gives_the_local_logits_to_the_bit(
    tmp_path: Path, keys: dict[str, Any], load_format: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys=keys, types=BLOCKS)
    with serving(tmp_path) as server:
        found = logits(f"{server.url}m.gguf", load_format=load_format)
        assert server.asked("m.gguf") == len(server.requests)  # nothing else lies beside it
    assert torch.equal(found, logits(str(path)))


def test_a_header_takes_few_requests_however_long_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys={**LLAMA_KEYS, "general.description": "x" * (40 * FIRST_NBYTES)})
    with serving(tmp_path) as server:
        open_checkpoint(f"{server.url}m.gguf")
        assert 1 < len(server.requests) <= 7


def test_a_header_that_is_cut_off_is_taken_up_where_it_ended(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys=LONG)

    def cut(handler: Handler) -> bool:
        return handler.answer(cut_after=1000)

    with serving(tmp_path) as server:
        server.faults = [times(3, cut)]
        assert open_checkpoint(f"{server.url}m.gguf").tensors


def test_any_part_of_a_split_model_brings_all(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    with serving(tmp_path) as server:
        for part in (first, second):
            assert torch.equal(logits(server.url + part.name), logits(str(first)))
        second.unlink()
        with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: is not there") as caught:
            open_checkpoint(server.url + first.name)
    assert "\n" not in str(caught.value)


def test_the_tokenizer_comes_from_the_files_own_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys={**LLAMA_KEYS, "tokenizer.ggml.model": "llama"})
    with serving(tmp_path) as server, LLM(f"{server.url}m.gguf") as llm, LLM(str(tmp_path / "m.gguf")) as local:
        assert llm.tokenizer.vocab_size == local.tokenizer.vocab_size == TOKENS
        assert llm.tokenizer.piece(7) == "token 7"


def test_a_copy_is_kept_and_read_the_next_time(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    path = write_gguf(tmp_path / "served" / "m.gguf")
    copies = tmp_path / "copies"
    with serving(tmp_path / "served") as server:
        first = logits(f"{server.url}m.gguf", remote_cache=str(copies))
        (copy,) = copies.rglob("m.gguf")
        assert copy.read_bytes() == path.read_bytes()
        assert open_checkpoint(f"{server.url}m.gguf", remote_cache=str(copies)).files == (copy,)
        assert torch.equal(logits(f"{server.url}m.gguf", remote_cache=str(copies)), first)


def test_a_broken_remote_gguf_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size - 100)
    (tmp_path / "text.gguf").write_bytes(b"not a model at all")
    with serving(tmp_path) as server:
        with pytest.raises(CheckpointFormatError, match=r"http://.*m\.gguf: is cut short"):
            open_checkpoint(f"{server.url}m.gguf")
        with pytest.raises(CheckpointFormatError, match=r"http://.*text\.gguf: is not a GGUF file"):
            open_checkpoint(f"{server.url}text.gguf")
        with pytest.raises(CheckpointError, match=r"part 7 of 99999; .* at most 1000"):
            open_checkpoint(f"{server.url}m-00007-of-99999.gguf")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.tensors"])
def test_a_file_that_cannot_be_read_from_a_server_is_told_what_can(name: str) -> None:
    with pytest.raises(OptionError, match=r"cannot be read from a server: a remote model is .* or a \.gguf file"):
        open_checkpoint(f"http://host/model/{name}")


def test_a_folder_without_safetensors_is_told_what_can_be_read(tmp_path: Path, four_layers: Path) -> None:
    (tmp_path / "config.json").write_bytes((four_layers / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with serving(tmp_path) as server:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is not there .* or a \.gguf file"):
            open_checkpoint(server.url)
        (tmp_path / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"config\.json: is missing; .* or a \.gguf file"):
            open_checkpoint(server.url)
