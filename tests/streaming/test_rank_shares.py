"""What `plan` says of every rank is what each rank's own plan comes to."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from examples.deepseek_share import SMOKE
from examples.write_deepseek_index import tensor_table, write_index
from examples.write_tiny_model import TinyModel
from layers.cuts import cut_param
from layers.topology import Topology
from layers.weights import ParamSpec
from streaming import cli
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.test_against_transformers import write_checkpoint

MESHES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"expert_parallel_size": 4},
    {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    {"tensor_parallel_size": 2, "expert_parallel_size": 2, "pipeline_parallel_size": 2},
    {"expert_parallel_size": 3, "expert_placement": "round_robin"},
    {"expert_parallel_size": 2, "expert_map": [[0, 1, 2, 3, 4], [4, 5, 6, 7]]},
    {"tensor_parallel_size": 4, "expert_parallel_size": 4, "moe_load": "routed_first"},
]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek-V3 in blocks of FP8, holes instead of numbers."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    write_index(folder, SMOKE)
    return folder


def check_shares(model: Path, **options: Any) -> list[tuple[int, int]]:
    """Bytes read and kept of every rank, the same from one plan as from all of them."""
    load = LoadOptions(**options)
    world = load.topology().world
    found = prepare(str(model), load, every_rank=True).plan.ranks
    plans = [prepare(str(model), load, rank=rank).plan for rank in range(world)]
    assert [share.rank for share in found] == list(range(world))
    shares = [(share.read_nbytes, share.kept_nbytes) for share in found]
    assert shares == [(plan.read_nbytes, plan.kept_nbytes) for plan in plans]
    return shares


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_of_a_mesh_is_told_as_it_plans_itself(deepseek: Path, mesh: dict[str, Any]) -> None:
    check_shares(deepseek, **mesh)


def test_one_that_is_quantized_anew_too(deepseek: Path) -> None:
    check_shares(deepseek, tensor_parallel_size=2, expert_parallel_size=4, quantization="fp8_per_channel")


@pytest.mark.parametrize("quantization", ["none", "int8_per_channel", "fp8_per_tensor"])
def test_a_dense_model_too(four_layers: Path, quantization: str) -> None:
    shares = check_shares(four_layers, tensor_parallel_size=2, quantization=quantization)
    assert len(set(shares)) == 2  # the vocabulary of 160 rows is cut 128 to 32


def test_made_up_weights_are_read_from_nowhere(four_layers: Path) -> None:
    assert {read for read, _ in check_shares(four_layers, tensor_parallel_size=2, load_format="dummy")} == {0}


def test_a_tied_table_is_on_the_first_and_the_last_stage(tiny_folder: Callable[[TinyModel], Path]) -> None:
    shares = check_shares(tiny_folder(TinyModel(layers=3, tied=True)), pipeline_parallel_size=3)
    table = 160 * 64 * 2  # rows, columns, bytes
    assert [read - shares[1][0] for read, _ in shares] == [table, 0, table + 64 * 2]  # and the last norm


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen2_moe"])
def test_fused_tensors_of_experts_too(tmp_path: Path, name: str) -> None:
    write_checkpoint(import_module("transformers"), *FAMILY_CASES[name], folder=tmp_path)
    check_shares(tmp_path, tensor_parallel_size=2)
    check_shares(tmp_path, tensor_parallel_size=2, expert_parallel_size=2)


def test_experts_are_shared_out_and_the_rest_is_on_every_rank(deepseek: Path) -> None:
    expert = sum(row.nbytes for row in tensor_table(SMOKE) if row.name.startswith("model.layers.1.mlp.experts.0."))
    found = prepare(str(deepseek), LoadOptions(expert_parallel_size=3), every_rank=True).plan.ranks
    whole = prepare(str(deepseek), LoadOptions()).plan.read_nbytes
    sparse = SMOKE.layers - SMOKE.dense_layers
    assert [share.experts for share in found] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert [whole - share.read_nbytes for share in found] == [sparse * expert * gone for gone in (5, 5, 6)]


def test_no_layer_is_measured_twice_that_is_like_another(deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(param: ParamSpec, topology: Topology) -> ParamSpec | None:
        asked.append(param.name.partition(".layers.")[2])
        return cut_param(param, topology)

    monkeypatch.setattr("streaming.rank_shares.cut_param", noted)
    prepare(str(deepseek), LoadOptions(tensor_parallel_size=2, expert_parallel_size=4), every_rank=True)
    experts = [name for name in asked if name.endswith(".mlp.experts.gate_up_proj.weight")]
    assert experts == ["1.mlp.experts.gate_up_proj.weight"] * 4


# --- the command


def test_the_command_has_a_line_and_an_entry_for_each_rank(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ["--tensor-parallel-size", "2", "--expert-parallel-size", "4"]
    assert cli.run(["plan", str(deepseek), *mesh, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    plans = [prepare(str(deepseek), LoadOptions(**MESHES[2]), rank=rank).plan for rank in range(4)]
    assert [rank.pop("experts") for rank in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks == [
        {"rank": rank, "bytes_read": one.read_nbytes, "bytes_kept": one.kept_nbytes} for rank, one in enumerate(plans)
    ]
    assert cli.run(["plan", str(deepseek), *mesh]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "tensor parallel size 2 and expert parallel size 4: 4 ranks, of which this is rank 0"
    assert [line.split()[0] for line in lines[-4:]] == ["0", "1", "2", "3"]
    assert [line.rpartition("  ")[2] for line in lines[-4:]] == ["0-1", "2-3", "4-5", "6-7"]


def test_one_rank_has_an_entry_and_no_line(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = prepare(str(deepseek), LoadOptions()).plan
    assert cli.run(["plan", str(deepseek), "--json"]) == 0
    entry = {"rank": 0, "bytes_read": plan.read_nbytes, "bytes_kept": plan.kept_nbytes, "experts": list(range(8))}
    assert json.loads(capsys.readouterr().out)["ranks"] == [entry]
    assert cli.run(["plan", str(deepseek)]) == 0
    assert "rank" not in capsys.readouterr().out


def test_ranks_that_share_the_reading_are_planned_one_by_one(
    four_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "read_sharing": "shared"}
    plans = [prepare(str(four_layers), LoadOptions(**options), rank=rank).plan for rank in range(2)]
    assert cli.run(["plan", str(four_layers), "--tensor-parallel-size", "2", "--read-sharing", "shared", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["bytes_read"] for rank in ranks] == [plan.read_nbytes for plan in plans]


def test_numbers_that_follow_each_other_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(tmp_path, SMOKE)
    mapped = "[[0, 1, 2, 5, 7], [3, 4, 6]]"
    assert cli.run(["plan", str(tmp_path), "--expert-parallel-size", "2", "--expert-map", mapped]) == 0
    assert [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()[-2:]] == ["0-2, 5, 7", "3-4, 6"]
