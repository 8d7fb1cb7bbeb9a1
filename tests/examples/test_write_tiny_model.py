"""The tiny checkpoints are what transformers expects of each family, and the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from examples.write_tiny_model import ARCHITECTURES, TinyModel, main, write_tiny_model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_transformers_finds_every_tensor_it_wants_and_no_other(tmp_path: Path, family: str, tied: bool) -> None:
    import transformers

    folder = write_tiny_model(tmp_path, model=TinyModel(family=family, tied=tied))
    loaded: tuple[Any, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values()), report
    assert type(model).__name__ == ARCHITECTURES[family]
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 160)
    assert 0.1 < logits.std() < 100


def test_the_seed_decides_the_numbers_and_nothing_else_does(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "first", model=TinyModel(seed=1, files=1))
    again = write_tiny_model(tmp_path / "again", model=TinyModel(seed=1, files=1))
    other = write_tiny_model(tmp_path / "other", model=TinyModel(seed=2, files=3, layers=2))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    ours, theirs = tensors_of(first), tensors_of(other)
    assert not torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])
    same = tensors_of(write_tiny_model(tmp_path / "same", model=TinyModel(seed=1, files=5, layers=2, tied=True)))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in same.items())


@pytest.mark.parametrize("files", [1, 2, 4])
def test_the_index_names_every_tensor_of_every_file(tmp_path: Path, files: int) -> None:
    write_tiny_model(tmp_path, model=TinyModel(files=files))
    stored: dict[str, str] = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored |= dict.fromkeys(opened.keys(), file.name)
    assert len(set(stored.values())) == files
    index_file = tmp_path / "model.safetensors.index.json"
    assert index_file.exists() == (files > 1)
    if files > 1:
        index = json.loads(index_file.read_text())
        assert index["weight_map"] == stored
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tmp_path).values())
        assert index["metadata"]["total_size"] == total


def test_dtype_is_that_of_every_tensor_and_of_the_config(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model=TinyModel(dtype="float16"))
    assert {tensor.dtype for tensor in tensors_of(tmp_path).values()} == {torch.float16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "gpt9"}, "family 'gpt9' is not one of llama, mistral, qwen2, qwen3, phi3, gemma, "),
        ({"heads": 6, "kv_heads": 4}, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"files": 0}, r"files \(0\) must be between 1 and the number of tensors \(30\)"),
        ({"family": "phi3", "head_dim": 8}, r"phi3: heads \(4\) x head_dim \(8\) must be 64"),
    ],
)
def test_what_cannot_be_written_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModel(**options)


def test_the_command_line_takes_the_same_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--family", "qwen3", "--layers", "1", "--tied", "--files", "1"])
    assert capsys.readouterr().out == f"wrote {tmp_path}: config.json, model.safetensors\n"
    assert "model.layers.0.self_attn.q_norm.weight" in tensors_of(tmp_path)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--files", "99"])
    assert "files (99) must be between 1" in capsys.readouterr().err
