"""DeepSeek-V3's table: true names, shapes and sizes; opened and accounted for whatever its family."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from examples.write_deepseek_index import DeepSeek, tensor_table, write_index
from streaming import cli
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.account import Amount, make_account

ROOT = Path(__file__).parents[2]
SMALL = DeepSeek(
    layers=3, dense_layers=1, experts=4, hidden=256, intermediate=384, expert_intermediate=128, heads=2, q_rank=64,
    kv_rank=64, nope_dim=16, rope_dim=8, value_dim=16, vocab=320, files=5,
)  # fmt: skip
# opens the folder given, accounts for it, and prints what it found and the peak of its memory in KiB
MEASURED = """
import re, sys
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.account import make_account
checkpoint = open_checkpoint(sys.argv[1])
total = make_account(checkpoint).total
unopened = sum(len(file.reasons) for file in checkpoint.unopened)
with open("/proc/self/status") as status:  # not getrusage, which counts the process that started this one too
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]
print(total.tensors, unopened, total.nbytes, peak)
"""


def test_the_table_is_deepseek_v3s() -> None:
    table = {row.name: (row.dtype, row.shape) for row in tensor_table(DeepSeek())}
    assert len(table) == 91_991
    assert table["model.layers.3.mlp.experts.255.gate_proj.weight"] == ("F8_E4M3", (2048, 7168))
    assert table["model.layers.3.mlp.experts.255.gate_proj.weight_scale_inv"] == ("F32", (16, 56))
    assert table["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == ("F8_E4M3", (576, 7168))
    assert table["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ("F32", (5, 56))
    assert table["model.layers.61.eh_proj.weight"] == ("BF16", (7168, 14336))
    sizes = {name: prod(shape) for name, (_, shape) in table.items()}
    assert round(sum(sizes.values()) / 1e9) == 685  # as the hub counts its elements, scales and all
    model = [size for name, size in sizes.items() if ".layers.61." not in name and not name.endswith("_scale_inv")]
    assert round(sum(model) / 1e9) == 671  # as published, without the layer behind the last


def test_an_independent_reader_finds_the_same(tmp_path: Path) -> None:
    count = write_index(tmp_path, SMALL)
    expected = {row.name: (row.dtype, row.shape) for row in tensor_table(SMALL)}
    files = sorted(tmp_path.glob("*.safetensors"))
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                entry = file.get_slice(name)
                found[name] = (entry.get_dtype(), tuple(entry.get_shape()))
    assert found == expected
    assert len(files) == SMALL.files
    assert count == len(expected)
    checkpoint = open_checkpoint(tmp_path)
    assert {name: (info.dtype.value, info.shape) for name, info in checkpoint.tensors.items()} == expected


def test_the_account_adds_up_by_dtype_and_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(tmp_path, SMALL)
    table = list(tensor_table(SMALL))
    counts, sizes = Counter(row.dtype for row in table), Counter[str]()
    for row in table:
        sizes[row.dtype] += row.nbytes
    account = make_account(open_checkpoint(tmp_path))
    assert account.by_form == {form: Amount(counts[form], sizes[form]) for form in counts}
    assert list(account.by_form) == sorted(sizes, key=lambda form: -sizes[form])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert account.total == Amount(len(table), index["metadata"]["total_size"])

    assert cli.run(["inspect", "--files", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model_type"] == "deepseek_v3"
    assert (found["tensors"], found["bytes"]) == (len(table), index["metadata"]["total_size"])
    by_file = Counter(index["weight_map"].values())
    assert {Path(file["name"]).name: file["tensors"] for file in found["files"]} == by_file
    assert cli.run(["inspect", "--files", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + SMALL.files + 1
    assert lines[-1].split()[:2] == ["total", str(len(table))]


def test_files_and_layer_are_two_listings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", "--files", "--layer", "0", str(tmp_path)]) == 2
    assert "--layer 0 goes with the listing by layer, not with --files" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_table_opens_in_half_a_gibibyte(tmp_path: Path) -> None:
    write_index(tmp_path, DeepSeek())
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tensors, unopened, nbytes, peak_kib = map(int, run.stdout.split())
    assert tensors + unopened == 91_991
    assert (unopened, nbytes) == (1488, 677_371_302_240)  # three files hold the layer that predicts further tokens
    assert peak_kib < 512 * 1024


# plans the folder given for the options given, prints the JSON, and last the peak of its memory in KiB
PLANNED = """
import re, sys
from streaming import cli
status = cli.run(["plan", *sys.argv[1:], "--json"])
with open("/proc/self/status") as file:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1])
sys.exit(status)
"""


@pytest.mark.slow
def test_the_true_size_is_planned_for_every_rank_of_a_mesh_within_a_gibibyte(tmp_path: Path) -> None:
    model = DeepSeek()
    write_index(tmp_path, model)
    used = [row for row in tensor_table(model) if ".layers.61." not in row.name]
    expert = sum(row.nbytes for row in used if row.name.startswith("model.layers.3.mlp.experts.0."))
    sparse, whole = model.layers - model.dense_layers, sum(row.nbytes for row in used)
    assert round(expert / 1e6) == 44
    for tensor, experts in ((1, 1), (8, 8), (1, 64), (8, 64)):
        mesh = ["--tensor-parallel-size", str(tensor), "--expert-parallel-size", str(experts)]
        command = [sys.executable, "-c", PLANNED, str(tmp_path), *mesh]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        *_, plan, peak_kib = run.stdout.splitlines()
        ranks = json.loads(plan)["ranks"]
        assert int(peak_kib) < 1 << 20
        assert [rank["rank"] for rank in ranks] == list(range(max(tensor, experts)))
        own = model.experts // experts
        assert [rank["experts"] for rank in ranks] == [
            list(range(rank * own, (rank + 1) * own)) for rank in range(len(ranks))
        ]
        most = whole - sparse * (model.experts - own) * expert  # with all of what is not an expert's
        if tensor == 1:
            assert {rank["bytes_read"] for rank in ranks} == {most}
        else:
            assert all(sparse * own * expert < rank["bytes_read"] < most for rank in ranks)
