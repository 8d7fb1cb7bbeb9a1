"""Shards of several ranks: each file holds what that rank keeps, to the bit, and is all that the rank reads again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.write_tiny_model import TinyModel
from layers.cuts import scale_scope
from quant.shared_scales import Scope
from streaming import cli
from streaming.cut_storing import store_part
from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.hooks import Hooks
from streaming.layer_parts import load_parts
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.sharded import MANIFEST, part_name
from tests.streaming.cut_loading import load_on_ranks
from tests.streaming.resident import same_bits
from tests.streaming.test_cut_combinations import Folders as Models
from tests.streaming.test_sharded import change_manifest, error_of, save
from tests.streaming.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")
Folders = Callable[[TinyModel], Path]
BLOCKS = TinyModel(layers=1, intermediate_size=176, files=1)  # parts of 88 and 44: they end within blocks of 128
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
FOUR: dict[str, Any] = {"tensor_parallel_size": 4}
BOTH: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 4}


def flags(given: Mapping[str, Any]) -> list[str]:
    """The options of a command line."""
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def full_names(stored: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{param.rpartition('.')[0]}.{name}": tensor
        for param, tensors in stored.items() for name, tensor in tensors.items()
    }  # fmt: skip


def check_saved(model: Path, out: Path, mesh: Mapping[str, Any], scheme: str = "none", *, fmt: str = "auto") -> None:
    """Save; every rank's file holds what the rank keeps of the model itself, and a load from the folder keeps it too,
    reading each of those bytes once and nothing else."""
    assert save(model, out, "--load-format", fmt, "--quantization", scheme, *flags(mesh)) == 0
    options = LoadOptions(load_format=fmt, quantization=scheme, reader="threads", **mesh)
    plans, kept = load_on_ranks(str(model), options)
    again, found = load_on_ranks(str(out), LoadOptions(reader="threads", **mesh))
    for rank, (direct, prepared) in enumerate(zip(kept, again, strict=True)):
        expected, written = full_names(direct), load_file(out / part_name(rank))
        loaded = full_names(found[rank])
        assert written.keys() == expected.keys() == loaded.keys()
        for name, tensor in expected.items():
            assert written[name].shape == tensor.shape, name
            assert same_bits(written[name], tensor), f"rank {rank}: {name}"
            assert same_bits(loaded[name], tensor), f"rank {rank}: {name}"
        assert [file.name for file in prepared.read_plan.files if isinstance(file, Path)] == [part_name(rank)]
        assert prepared.plan.read_nbytes == prepared.plan.kept_nbytes == plans[rank].plan.kept_nbytes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


# --- what is written


@pytest.mark.parametrize("scheme", ["none", "fp8_per_block", "fp8_per_tensor", "int4_per_group:64:asym", "nvfp4"])
@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=["2", "4"])
def test_each_file_holds_what_its_rank_keeps(
    tiny_folder: Folders, tmp_path: Path, scheme: str, mesh: dict[str, Any]
) -> None:
    model = tiny_folder(BLOCKS)
    check_saved(model, tmp_path / "out", mesh, scheme)
    prepared = prepare(str(model), LoadOptions(quantization=scheme, **mesh))
    scopes = {
        scale_scope(param, section)
        for spec in prepared.specs for param in spec.params for section in range(len(param.sections))
    }  # fmt: skip
    assert (Scope.MAXIMA in scopes) is (scheme != "none")


@pytest.mark.parametrize(
    ("name", "mesh", "scheme"),
    [
        ("llama, tied", FOUR, "int8_per_channel"),  # the last ranks have no rows of the vocabulary
        ("phi3", TWO, "mxfp4"),
        pytest.param("llama", {"pipeline_parallel_size": 2, **TWO}, "fp8_per_block", marks=pytest.mark.slow),
        pytest.param("llama, tied", {"pipeline_parallel_size": 2}, "none", marks=pytest.mark.slow),
        ("gpt2", TWO, "fp8_per_channel"),  # biases that one rank alone has
        pytest.param("qwen3_moe", {"expert_parallel_size": 2}, "fp8_per_block", marks=pytest.mark.slow),
        ("qwen3_moe", {"expert_parallel_size": 3, "expert_placement": "round_robin"}, "none"),
        pytest.param("qwen2_moe", BOTH, "int4_per_group:32", marks=pytest.mark.slow),
        ("mixtral", TWO | {"expert_map": "[[0, 1, 2], [3, 0, 4]]", "expert_parallel_size": 2}, "fp8_per_tensor"),
        ("deepseek_v3, fp8", BOTH, "none"),
    ],
)
def test_every_mesh_is_saved(models: Models, tmp_path: Path, name: str, mesh: dict[str, Any], scheme: str) -> None:
    folder, fmt = models.of(name)
    check_saved(folder, tmp_path / "out", mesh, scheme, fmt=fmt)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("modelopt: FP8, phi3", TWO),  # q, k and v have one scale on disk, so have their parts
        ("fp8: 24x40, phi3", TWO),
        ("fp8: 48x20", FOUR),
        ("gptq: gptq_ordered", TWO),
        ("gptq: awq, phi3", TWO),
        ("compressed: nvfp4, phi3", TWO),
        ("gpt_oss, mxfp4", {"expert_parallel_size": 2}),
        ("experts: gptq_ordered", TWO),
    ],
)  # fmt: skip
def test_what_is_quantized_on_disk_is_saved_as_its_parts_are_kept(
    models: Models, tmp_path: Path, name: str, mesh: dict[str, Any]
) -> None:
    folder, fmt = models.of(name)
    check_saved(folder, tmp_path / "out", mesh, fmt=fmt)


def test_the_manifest_says_how_ranks_share_the_model(models: Models, tmp_path: Path) -> None:
    folder, _ = models.of("mixtral")
    mesh = {"expert_parallel_size": 2, "expert_map": "[[0, 1, 2], [3, 0, 4]]"}
    assert save(folder, tmp_path / "out", *flags(mesh)) == 0
    found = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert found["version"] == 3
    assert [found[f"{name}_parallel_size"] for name in ("tensor", "expert", "pipeline")] == [1, 2, 1]
    assert found["expert_map"] == [[0, 1, 2], [3, 0, 4]]
    assert found["expert_placement"] == "linear"
    assert [file["name"] for file in found["files"]] == [part_name(0), part_name(1)]


def test_a_folder_that_holds_the_same_for_as_many_ranks_is_left_alone(
    shards: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    assert save(model, shards, "--quantization", "fp8_per_block", *flags(TWO)) == 0
    assert "for 2 ranks (tensor parallel size 2 and expert parallel size 1): holds the same already" in (
        capfd.readouterr().out
    )
    found = error_of(
        capfd, "save-shards", model, "--out", shards, "--quantization", "fp8_per_block", *flags(FOUR), status=2
    )
    assert "does not hold the same" in found
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before


def test_no_more_than_a_layer_of_each_rank_is_asked_for(
    tiny_folder: Folders, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_folder(TinyModel(layers=12, files=1, vocab_size=64))
    whole = prepare(str(model), LoadOptions()).plan.kept_nbytes
    limits = ["--window", "64KiB", "--memory"]
    assert save(model, tmp_path / "out", *flags(TWO), *limits, str(whole // 2)) == 0
    found = error_of(capfd, "save-shards", model, "--out", tmp_path / "small", *flags(TWO), *limits, "20KiB")
    assert "--memory 20.0 KiB is too small: " in found
    assert "are needed for a layer of each rank" in found
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--read-sharing", "shared"], "--read-sharing shared: save-shards loads every rank in one process"),
        (["--rank-timeout", "5"], "--rank-timeout 5.0: save-shards loads every rank in one process"),
        (["--remote-cache", "c"], "--remote-cache c: save-shards reads a layer at a time and keeps no copy"),
        (["--safetensors-load-strategy", "eager"], "eager: save-shards reads a layer at a time, and would read whole"),
    ],
)
def test_options_without_a_meaning_are_refused(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    found = error_of(capfd, "save-shards", model, "--out", tmp_path / "out", *flags(TWO), *given, status=2)
    assert words in found
    assert not (tmp_path / "out").exists()


# --- what is read


@pytest.fixture
def model(tiny_folder: Folders) -> Path:
    return tiny_folder(BLOCKS)


@pytest.fixture
def shards(model: Path, tmp_path: Path) -> Path:
    """Of two ranks, in fp8_per_block."""
    assert save(model, tmp_path / "shards", "--quantization", "fp8_per_block", *flags(TWO)) == 0
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "this run has tensor parallel size 1 and expert parallel size 1"),
        (FOUR, "this run has tensor parallel size 4 and expert parallel size 1"),
        (TWO | {"pipeline_parallel_size": 2}, "expert parallel size 1, 2 stages"),
    ],
)
def test_another_mesh_is_refused_with_both(shards: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        prepare(str(shards), LoadOptions(**asked))
    assert "was saved for tensor parallel size 2 and expert parallel size 1; this run has " in str(caught.value)
    assert words in str(caught.value)


def test_experts_in_other_places_are_refused(models: Models, tmp_path: Path) -> None:
    folder, _ = models.of("qwen3_moe")
    mesh: dict[str, Any] = {"expert_parallel_size": 2}
    assert save(folder, tmp_path / "out", *flags(mesh)) == 0
    words = "was saved for expert placement linear; this run has expert placement round_robin: save it again"
    with pytest.raises(CheckpointError, match=words):
        prepare(str(tmp_path / "out"), LoadOptions(expert_placement="round_robin", **mesh))
    experts = prepare(str(folder), LoadOptions()).config.moe
    assert experts is not None
    turned = [list(range(1, experts.num_experts)), [0]]
    with pytest.raises(CheckpointError, match=r"saved for expert placement linear; this run has expert map \(\(1, "):
        prepare(str(tmp_path / "out"), LoadOptions(expert_map=turned, **mesh))


def test_the_files_of_other_ranks_are_not_opened(shards: Path) -> None:
    (shards / part_name(1)).unlink()
    assert prepare(str(shards), LoadOptions(**TWO)).plan.read_nbytes > 0
    with pytest.raises(CheckpointError, match=f"{part_name(1)}: .*{MANIFEST} names it"):
        prepare(str(shards), LoadOptions(**TWO), rank=1)


def test_a_file_of_another_size_is_refused_by_its_rank(shards: Path) -> None:
    size = (shards / part_name(1)).stat().st_size
    os.truncate(shards / part_name(1), size - 8)
    with pytest.raises(CheckpointError, match=f"{part_name(1)}: has {size - 8} bytes, but {MANIFEST} says {size}"):
        prepare(str(shards), LoadOptions(**TWO), rank=1)


def test_another_ranks_file_is_not_taken_for_its_own(shards: Path) -> None:
    """Rank 1 has fewer rows of the vocabulary."""
    shutil.copy(shards / part_name(0), shards / part_name(1))
    files = json.loads((shards / MANIFEST).read_text())["files"]
    change_manifest(shards, files=[files[0], files[0] | {"name": part_name(1)}])
    with pytest.raises(CheckpointError, match="but the model keeps BF16"):
        prepare(str(shards), LoadOptions(**TWO), rank=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline_parallel_size": None}, "pipeline_parallel_size is None, not of type int"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 2}, "is no multiple of tensor parallel size 4"),
        ({"tensor_parallel_size": 10**9}, "tensor_parallel_size is 1000000000, more than 4096"),
        ({"tensor_parallel_size": 1}, "files names one of rank 1, but there are 1 ranks"),
        ({"tensor_parallel_size": 4}, "files names none of rank 2, of 4 ranks"),
        ({"expert_placement": "nearby"}, "expert placement 'nearby' is not known"),
        ({"expert_map": [[0], 1]}, "expert_map is [[0], 1], not a list of expert numbers for each rank"),
        ({"expert_map": [[True]]}, "expert_map is [[True]], not a list"),
    ],
)
def test_a_manifest_of_no_mesh_is_named(shards: Path, changes: dict[str, Any], words: str) -> None:
    change_manifest(shards, **changes)
    with pytest.raises(CheckpointFormatError) as caught:
        prepare(str(shards), LoadOptions(**TWO))
    assert MANIFEST in str(caught.value)
    assert words in str(caught.value)


def test_a_manifest_of_version_2_is_of_one_rank_and_read(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert save(model, out) == 0
    manifest = json.loads((out / MANIFEST).read_text())
    for name in ("pipeline_parallel_size", "expert_placement", "expert_map"):
        del manifest[name]
    (out / MANIFEST).write_text(json.dumps(manifest | {"version": 2}))
    assert prepare(str(out), LoadOptions()).plan.read_nbytes == prepare(str(model), LoadOptions()).plan.kept_nbytes


def test_a_rank_that_lacks_rows_of_the_table_reads_its_own_first(shards: Path, model: Path, tmp_path: Path) -> None:
    """They cannot be fetched on their own then."""
    plan = prepare(str(shards), LoadOptions(**TWO)).plan
    assert (plan.table, plan.layers[0].name) == (None, "embed")
    assert save(model, tmp_path / "stages", "--pipeline-parallel-size", "1") == 0
    plan = prepare(str(tmp_path / "stages"), LoadOptions()).plan
    assert plan.table is not None
    assert plan.layers[-1].name == "embed"


# --- what goes wrong


def test_a_rank_that_fails_ends_the_others_that_agree_with_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [prepare(str(model), LoadOptions(quantization="fp8_per_tensor", **TWO), rank=rank) for rank in (0, 1)]

    def fail(item: Any, *given: Any, **named: Any) -> None:
        if item.param.cut.parts[0].start and item.param.name.endswith("gate_up_proj.weight"):
            raise ValueError("broken on purpose")
        store_part(item, *given, **named)

    monkeypatch.setattr("streaming.item_storing.store_part", fail)
    with pytest.raises(Exception, match=r"layer layers.0, stage quantize, tensor .*ValueError: broken on purpose"):
        load_parts(ranks, "layers.0", hooks=Hooks())


def test_what_a_crash_leaves_is_refused_wherever_it_comes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, rename = list[Path](), Path.rename

    def keep_state(self: Path, target: Path) -> Path:
        states.append(Path(shutil.copytree(self.parent, tmp_path / f"before {target.name}")))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", keep_state)
    assert save(model, tmp_path / "out", *flags(TWO)) == 0
    assert [left.name for left in states] == [
        f"before {name}" for name in (part_name(0), part_name(1), "config.json", MANIFEST)
    ]
    for left in states:
        with pytest.raises(CheckpointError):
            prepare(str(left), LoadOptions(**TWO))


def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_whole(tiny_folder: Folders, tmp_path: Path) -> None:
    model, out = tiny_folder(TinyModel(layers=48, files=1)), tmp_path / "out"
    arguments = ["save-shards", str(model), "--out", str(out), "--quantization", "fp8_per_block", *flags(TWO)]
    process = subprocess.Popen([sys.executable, "-m", "streaming", *arguments], start_new_session=True)
    until(lambda: (out / f"{part_name(1)}.partial").exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / MANIFEST).exists()
    with pytest.raises(CheckpointError):
        prepare(str(out), LoadOptions(**TWO))


# --- in words


def test_inspect_shows_the_slices_of_the_rank_that_is_asked_for(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(model), "--layer", "0", "--rank", "1", *flags(TWO)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "rank 1 of 2 (tensor parallel size 2 and expert parallel size 1)"
    layer = "    <- model.layers.0"
    found = [line.partition(" (")[0] for line in lines]
    assert f"{layer}.self_attn.k_proj.weight BF16 [32, 64] rows 16 to 32 as part 'k'" in found
    assert f"{layer}.mlp.up_proj.weight BF16 [176, 64] rows 88 to 176 as part 'up'" in found
    assert f"{layer}.mlp.down_proj.weight BF16 [64, 176] rows 0 to 64, columns 88 to 176" in found
    assert f"{layer}.input_layernorm.weight BF16 [64]" in found
    assert cli.run(["inspect", str(model), "--json", "--rank", "1", *flags(TWO)]) == 0
    plain = json.loads(capfd.readouterr().out)
    assert (plain["rank"], plain["ranks"]) == (1, 2)
    words = error_of(capfd, "inspect", model, "--rank", "2", *flags(TWO), status=2)
    assert "--rank 2: 0 to 1 are the ranks that the options ask for" in words
    assert "--rank 1: 0 is the only rank" in error_of(capfd, "inspect", model, "--rank", "1", status=2)


def test_the_debug_log_names_the_rank_and_its_slice(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="streaming.item_words")
    ranks = [prepare(str(model), LoadOptions(quantization="fp8_per_block", **TWO), rank=rank) for rank in (0, 1)]
    load_parts(ranks, "layers.0", hooks=Hooks())
    lines = [record.getMessage() for record in caplog.records if record.name == "streaming.item_words"]
    assert (
        "layers.0: model.layers.0.self_attn.v_proj.weight BF16 [32, 64] -> model.layers.0.self_attn.qkv_proj.weight "
        "[fp8_per_block_16x128] part 'v', rows 16 to 32 (rank 1 of 2)"
    ) in lines
    down = "layers.0: model.layers.0.mlp.down_proj.weight BF16 [64, 176] -> model.layers.0.mlp.down_proj.weight"
    ends = [line.rpartition("], ")[2] for line in lines if line.startswith(down)]
    assert sorted(ends) == [
        "rows 0 to 64, columns 0 to 88 (rank 0 of 2)",
        "rows 0 to 64, columns 88 to 176 (rank 1 of 2)",
    ]
