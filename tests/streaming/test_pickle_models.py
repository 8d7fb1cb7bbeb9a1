"""Models in PyTorch's own files: streamed, they are what their tensors are in safetensors files, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.cli import run
from tests.streaming.checkpoint.test_pickles import rewritten
from tests.streaming.resident import resident_model, run_resident, same_bits

Tensors = dict[str, torch.Tensor]
IDS = [3, 141, 59, 26, 5, 3]
PARTS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


@pytest.fixture(scope="session")
def original(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=2, files=1, seed=3))


def view_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """The same numbers, lying differently: transposed, every second column of a wider table, or with a row between."""
    if tensor.ndim == 1:
        return torch.stack([tensor, tensor], dim=1)[:, 0]
    if turn == 0:
        return tensor.t().contiguous().t()
    if turn == 1:
        return torch.stack([tensor, -tensor], dim=2)[:, :, 0]
    return torch.stack([tensor, -tensor], dim=1)[:, 0]


def plain(root: Path, tensors: Tensors) -> None:
    torch.save(tensors, root / "pytorch_model.bin")
    torch.save({"lr": 1e-4, "model.norm.weight": torch.zeros(3)}, root / "training_args.bin")


def legacy(root: Path, tensors: Tensors) -> None:
    torch.save({"state_dict": tensors, "epoch": 3}, root / "model.pt", _use_new_zipfile_serialization=False)


def views(root: Path, tensors: Tensors) -> None:
    torch.save({name: view_of(tensor, turn % 3) for turn, (name, tensor) in enumerate(tensors.items())}, root / "m.pth")


def parts(root: Path, tensors: Tensors) -> None:
    place = {name: PARTS[turn % 2] for turn, name in enumerate(tensors)}
    for part in PARTS:
        torch.save({name: torch.nn.Parameter(t) for name, t in tensors.items() if place[name] == part}, root / part)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    torch.save(tensors, root / "stale.bin")


def big_endian(root: Path, tensors: Tensors) -> None:
    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.view(torch.uint8)
            .view(-1, tensor.itemsize)
            .flip(1)
            .contiguous()
            .view(tensor.dtype)
            .view(tensor.shape)
        )

    path = root / "pytorch_model.bin"
    torch.save({name: swapped(tensor) for name, tensor in tensors.items()}, path)
    rewritten(path, {"byteorder": b"big"})


WAYS: dict[str, Callable[[Path, Tensors], None]] = {
    "plain": plain, "legacy": legacy, "views": views, "parts": parts, "big-endian": big_endian,
}  # fmt: skip


def written(original: Path, root: Path, way: str) -> Path:
    root.mkdir()
    shutil.copy(original / "config.json", root)
    WAYS[way](root, load_file(original / "model.safetensors"))
    return root


def differences(found: LLM, original: Path, **options: Any) -> list[str]:
    model = resident_model(original, **options)
    logits = found.logits(IDS)
    found.wait_loaded()
    stored = dict(found.shell.named_parameters())
    wrong = [name for name, expected in model.named_parameters() if not same_bits(stored[name], expected)]
    return wrong + ["logits"] * (not same_bits(logits, run_resident(model, IDS).logits))


@pytest.mark.parametrize("quantization", ["none", "int8_per_channel"])
@pytest.mark.parametrize("way", WAYS)
def test_streamed_from_pickles_equals_resident(way: str, quantization: str, original: Path, tmp_path: Path) -> None:
    with LLM(written(original, tmp_path / "model", way), quantization=quantization) as llm:
        assert differences(llm, original, quantization=quantization) == []


def test_one_file_is_a_model_too(original: Path, tmp_path: Path) -> None:
    with LLM(written(original, tmp_path / "model", "legacy") / "model.pt", reader="threads") as llm:
        assert differences(llm, original) == []


@pytest.mark.parametrize("way", ["plain", "parts", "big-endian"])
def test_from_the_cache_of_arrays_it_is_the_same(way: str, original: Path, tmp_path: Path) -> None:
    folder = written(original, tmp_path / "model", way)
    for _ in ("written", "found"):
        with LLM(folder, load_format="npcache") as llm:
            assert differences(llm, original) == []


@pytest.mark.parametrize("way", ["legacy", "parts"])
def test_verify_compares_with_what_torch_loads(
    way: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(original, tmp_path / "model", way)
    assert run(["verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]


def test_verify_sees_a_difference(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(original, tmp_path / "model", "plain")
    real = torch.load

    def changed(*args: Any, **options: Any) -> Any:
        return {name: tensor + 1 for name, tensor in real(*args, **options).items()}

    monkeypatch.setattr(torch, "load", changed)
    assert run(["verify", str(folder), "--json"]) == 1
