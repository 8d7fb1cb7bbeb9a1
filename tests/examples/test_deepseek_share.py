"""One rank's share of a tiny DeepSeek is what its plan says, computed through all layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.deepseek_share import SMOKE, SMOKE_MESH, LayerShare, Share, main, measure
from examples.write_deepseek_index import Numbers, write_index
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare

ALL_NUMBERS = Numbers(experts=SMOKE.experts, rows=SMOKE.vocab, codes_nbytes=1 << 30)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    write_index(folder, SMOKE, numbers=ALL_NUMBERS)
    return folder


def test_the_share_is_read_and_computed_through_all_layers(deepseek: Path) -> None:
    tensor, expert = SMOKE_MESH
    share = measure(deepseek, tensor=tensor, expert=expert)
    plan = prepare(str(deepseek), LoadOptions(tensor_parallel_size=tensor, expert_parallel_size=expert)).plan
    assert (share.read_nbytes, share.kept_nbytes) == (plan.read_nbytes, plan.kept_nbytes)
    assert (share.ranks, share.own_experts, share.logits_shape) == (4, (0, 1), (16, SMOKE.vocab))
    assert share.finite
    assert [layer.name for layer in share.layers] == ["layers.0", "layers.1", "layers.2", "layers.3", "head", "embed"]
    assert sum(layer.read_nbytes for layer in share.layers) == share.read_nbytes
    assert all(layer.read_s > 0 for layer in share.layers)
    assert all(layer.forward_s > 0 for layer in share.layers[:-1])
    sparse = share.layers[SMOKE.dense_layers : SMOKE.layers]
    assert sum(layer.rows for layer in sparse) > 0
    assert all(1 < layer.experts <= SMOKE.experts for layer in sparse)
    assert (share.layers[0].rows, share.layers[0].experts) == (0, 0)


def test_numbers_are_the_same_each_time_and_none_is_lost_on_the_way(deepseek: Path, tmp_path: Path) -> None:
    write_index(tmp_path, SMOKE, numbers=ALL_NUMBERS)
    for path in deepseek.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    with LLM(deepseek) as llm:
        logits = llm.logits(range(16))
        llm.wait_loaded()
        assert not llm.stats().warnings  # no tensor of zeros alone, none that is not finite
    assert logits.isfinite().all()
    assert torch.unique(logits.argmax(-1)).numel() > 1


def test_where_no_number_is_written_there_are_holes(tmp_path: Path) -> None:
    write_index(tmp_path, SMOKE, numbers=Numbers(experts=0, rows=1, codes_nbytes=1))
    from safetensors import safe_open

    path = tmp_path / "model-00001-of-000005.safetensors"
    with safe_open(path, framework="pt") as file:
        table = file.get_tensor("model.embed_tokens.weight")
        codes = file.get_tensor("model.layers.0.self_attn.q_a_proj.weight").float()
        norm = file.get_tensor("model.layers.0.input_layernorm.weight")
        scale = file.get_tensor("model.layers.0.self_attn.q_a_proj.weight_scale_inv")
    assert table[0].abs().min() > 0
    assert not table[1:].any()
    assert codes.flatten()[0].abs() >= 0.5
    assert not codes.flatten()[1:].any()
    assert norm.unique().tolist() == [1.0]
    assert scale.unique().tolist() == [2.0**-6]


def test_the_smoke_run_prints_a_line_for_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "read", "kept", "read", "forward", "rows", "experts"]
    assert [line.split()[0] for line in lines] == [
        "layers.0", "layers.1", "layers.2", "layers.3", "head", "embed", "total", "rank",
    ]  # fmt: skip
    assert lines[-1].startswith("rank 0 of 4, experts 0 to 1: loaded after ")
    assert "all finite" in lines[-1]


def test_the_figures_come_as_json_too(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ["--tensor-parallel-size", "1", "--expert-parallel-size", "2"]
    assert main([str(deepseek), *mesh, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layers = [LayerShare(**layer) for layer in found.pop("layers")]
    share = Share(layers=tuple(layers), **found)
    assert (share.ranks, list(share.own_experts)) == (2, [0, 1, 2, 3])


def test_a_folder_or_the_smoke_run(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(deepseek), "--smoke"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "give a folder, or --smoke and no folder" in capsys.readouterr().err
