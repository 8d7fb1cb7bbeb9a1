"""All experts of a layer in one tensor, gate and up in turns: they are parted whichever way a matrix lies."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streaming import LLM, LoadOptions
from streaming.prepare import prepare
from tests.streaming.resident import same_bits
from tests.streaming.test_streamed_equals_eager import DEFAULT, SMALLEST, Case, differences
from tests.test_against_transformers import write_checkpoint

CHANGES = {
    "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4, "intermediate_size": 40,
    "vocab_size": 160,
}  # fmt: skip
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the family's files are: an expert's matrix is [in, out]."""
    folder = tmp_path_factory.mktemp("usual")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(import_module("transformers"), "gpt_oss", CHANGES, folder=folder)
    return folder


@pytest.fixture(scope="module")
def turned(usual: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with [out, in]: it is told by the down projections, which are not square."""
    folder = tmp_path_factory.mktemp("turned")
    tensors = load_file(usual / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    (folder / "config.json").write_bytes((usual / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("way", ["usual", "turned"])
def test_sections_are_the_even_and_the_odd_outputs_of_each_expert(
    way: str, usual: Path, turned: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(way)
    tensors = load_file(usual / "model.safetensors")
    with LLM(str(folder), dtype="float32") as llm:
        llm.wait_loaded()
        kept = {name: tensor.detach() for name, tensor in llm.shell.named_parameters()}
        assert llm.stats().bytes_read == sum(tensor.nbytes for tensor in tensors.values())  # nothing is read twice
    rows = [tensors[GATE_UP][expert].T[first::2] for expert in range(3) for first in (0, 1)]
    assert same_bits(kept[f"{GATE_UP}.weight"], torch.cat(rows))
    assert same_bits(kept[f"{DOWN}.weight"], torch.cat([tensors[DOWN][expert].T for expert in range(3)]))
    biases = [tensors[f"{GATE_UP}_bias"][expert][first::2] for expert in range(3) for first in (0, 1)]
    assert same_bits(kept[f"{GATE_UP}.bias"], torch.cat(biases))
    assert same_bits(kept[f"{DOWN}.bias"], tensors[f"{DOWN}_bias"].flatten())


@pytest.mark.parametrize("case", [
    Case("gpt_oss", "none", SMALLEST, "process", "bfloat16"), Case("gpt_oss", "mxfp4", DEFAULT, "threads", "bfloat16"),
    Case("gpt_oss", "fp8_per_block", SMALLEST, "threads", "float32"),
], ids=str)  # fmt: skip
def test_streamed_equals_eager_where_experts_are_out_by_in(turned: Path, case: Case) -> None:
    assert differences(turned, case) == []


def test_a_missing_expert_tensor_is_named_as_experts_are(usual: Path, tmp_path: Path) -> None:
    tensors = load_file(usual / "model.safetensors")
    del tensors[DOWN]
    (tmp_path / "config.json").write_bytes((usual / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Exception, match=r"experts\.2\.down_proj\.weight is missing"):
        prepare(str(tmp_path), LoadOptions())


def test_the_dummy_format_makes_experts_up(usual: Path) -> None:
    assert json.loads((usual / "config.json").read_text(encoding="utf-8"))["model_type"] == "gpt_oss"
    with LLM(str(usual), load_format="dummy", dtype="bfloat16") as llm:
        assert llm.logits([1, 2, 3]).isfinite().all()
