"""Ranks that share the reading: no byte is read twice, and every rank keeps what it keeps when it reads for itself."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.errors import ShardError
from layers.parallel import SingleGroup, StandInGroup
from layers.topology import Topology
from streaming import cli
from streaming.distributed import DistributedGroup, ProcessGroups
from streaming.errors import LayerLoadError, OptionError
from streaming.load_plan import LoadItem
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.tiny import raw_config
from tests.streaming.coded import write_coded
from tests.streaming.cut_loading import check_parts, load_stored
from tests.streaming.ranks.threaded import open_ranked
from tests.streaming.test_distributed import PeerError, on_ranks
from tests.streaming.test_fp8_on_disk import FP8, in_blocks
from tests.test_against_transformers import write_checkpoint

SHARED: dict[str, Any] = {"read_sharing": "shared"}
FAMILIES = ("llama", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe", "phi3")
TURNS = zip(FAMILIES, itertools.cycle(("none", "fp8_per_tensor", "int4_per_group:64:asym")), strict=False)


def plans_of(folder: Path, **options: Any) -> list[Prepared]:
    """The plans of every rank."""
    asked = LoadOptions(**options)
    return [prepare(str(folder), asked, rank=rank) for rank in range(asked.topology().world)]


def runs_read(plan: Prepared) -> Iterator[tuple[str, int, int]]:
    """(file, first byte, byte behind the last) of every run of bytes that a rank reads."""
    for piece in plan.read_plan.pieces:
        run, stride = piece.run_nbytes or piece.nbytes, piece.stride_nbytes
        for at in range(piece.nbytes // run if run else 0):
            first = piece.file_offset + at * stride
            yield str(plan.read_plan.files[piece.file]), first, first + run


def overlaps(runs: Sequence[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Where a run begins within an earlier one."""
    ends: dict[str, int] = {}
    found = []
    for file, first, stop in sorted(runs):
        if first < ends.get(file, 0):
            found.append((file, first))
        ends[file] = max(stop, ends.get(file, 0))
    return found


def covered(runs: Sequence[tuple[str, int, int]]) -> int:
    """Bytes of all runs, each once."""
    total, at, end = 0, "", 0
    for file, first, stop in sorted(runs):
        begin = first if file != at else max(first, end)
        total += max(0, stop - begin)
        at, end = file, stop if file != at else max(stop, end)
    return total


def shared_items(plan: Prepared) -> list[LoadItem]:
    return [item for item in plan.plan.items if item.shared is not None]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "scheme"), list(TURNS))
def test_every_rank_keeps_its_part_and_nothing_is_read_twice(
    name: str, scheme: str, ranks: int, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = import_module("transformers")
        transformers.logging.set_verbosity_error()
        model_type, changes = FAMILY_CASES.get(name, (name, {}))
        write_checkpoint(transformers, model_type, {**changes, "vocab_size": 160}, folder=tmp_path)
    alone = LoadOptions(quantization=scheme)
    try:
        plans = check_parts(
            str(tmp_path), LoadOptions(quantization=scheme, tensor_parallel_size=ranks, read_sharing="shared"), alone
        )
    except ShardError as error:
        if "heads" not in str(error):
            raise
        return
    runs = [run for plan in plans for run in runs_read(plan)]
    assert overlaps(runs) == []
    apart = plans_of(tmp_path, quantization=scheme, tensor_parallel_size=ranks)
    assert covered(runs) == covered([run for plan in apart for run in runs_read(plan)])
    assert overlaps([run for plan in apart for run in runs_read(plan)])


@pytest.mark.parametrize("quantization", ["none", "int8_per_channel"])
def test_scales_on_disk_are_read_once(quantization: str, tmp_path: Path) -> None:
    config = {**FP8, "weight_block_size": [48, 20]}
    coded, _ = write_coded(
        tmp_path, in_blocks(48, 20, torch.float32), config=config, model=TinyModel(layers=1, family="phi3")
    )
    options = LoadOptions(quantization=quantization, tensor_parallel_size=2, read_sharing="shared")
    plans = check_parts(str(coded), options, LoadOptions(quantization=quantization))
    assert overlaps([run for plan in plans for run in runs_read(plan)]) == []
    leaves = {item.leaf for item in shared_items(plans[0])}
    assert any("scale" in leaf for leaf in leaves)


def test_all_ranks_see_the_same_items_with_the_same_owner_in_the_same_order(
    tiny_folder: Callable[[TinyModel], Path],
) -> None:
    """4 ranks, 2 key/value heads: pairs of ranks share those, all of them the norms and the rows of down_proj."""
    plans = plans_of(tiny_folder(TinyModel(layers=3, files=1)), tensor_parallel_size=4, **SHARED)
    seen = [
        {(item.tensor.name, item.file_offset): item.shared for item in shared_items(plan) if item.shared}
        for plan in plans
    ]
    for (first, one), (second, other) in itertools.combinations(enumerate(seen), 2):
        common = [key for key, shared in one.items() if second in shared.ranks]
        assert common == [key for key, shared in other.items() if first in shared.ranks]
        assert common
        assert all(one[key].owner == other[key].owner and one[key].ranks == other[key].ranks for key in common)
    assert {shared.ranks for one in seen for shared in one.values()} == {(0, 1), (2, 3), (0, 1, 2, 3)}


def test_owners_read_about_as_much_as_each_other(tiny_folder: Callable[[TinyModel], Path]) -> None:
    plans = plans_of(tiny_folder(TinyModel(layers=4, files=1)), tensor_parallel_size=4, **SHARED)
    owned = [sum(item.nbytes for item in shared_items(plan) if not item.is_received) for plan in plans]
    assert max(owned) - min(owned) <= max(item.nbytes for item in shared_items(plans[0]))


def test_the_plan_counts_what_is_read_and_what_comes_from_other_ranks(
    tiny_folder: Callable[[TinyModel], Path],
) -> None:
    folder = tiny_folder(TinyModel(layers=2, files=1))
    plans, apart = (plans_of(folder, tensor_parallel_size=2, **way) for way in (SHARED, {}))
    for plan, other in zip(plans, apart, strict=True):
        assert plan.plan.read_nbytes < other.plan.read_nbytes
        assert plan.plan.read_nbytes == sum(piece.read_nbytes for piece in plan.read_plan.pieces)
        assert other.plan.received_nbytes == 0
    both = [(other.plan.read_nbytes, plan.plan.read_nbytes) for plan, other in zip(plans, apart, strict=True)]
    for way, at in (({}, 0), (SHARED, 1)):
        asked = LoadOptions(tensor_parallel_size=2, **way)
        ranks = prepare(str(folder), asked, every_rank=True).plan.ranks
        assert [one.by_sharing for one in ranks] == both
        assert [one.read_nbytes for one in ranks] == [found[at] for found in both]
    sent = sum(item.nbytes for plan in plans for item in shared_items(plan) if not item.is_received)
    assert sum(plan.plan.received_nbytes for plan in plans) == sent


def test_what_comes_from_other_ranks_takes_no_window_and_is_counted_beside_it(
    tiny_folder: Callable[[TinyModel], Path],
) -> None:
    """A window of the largest weight that passes: each weight waits for the one before."""
    folder = tiny_folder(TinyModel(layers=2, files=1))
    options: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": "int8_per_channel", **SHARED}
    (plan, *_) = plans_of(folder, **options)
    received = [item for item in plan.plan.items if item.is_received]
    assert {item.index for item in received}.isdisjoint(plan.read_plan.window_offsets)
    assert {item.index for item in received}.isdisjoint(piece.item for piece in plan.read_plan.pieces)
    (apart, *_) = plans_of(folder, tensor_parallel_size=2, quantization="int8_per_channel")
    assert plan.budget.window_nbytes < apart.budget.window_nbytes
    largest = max(item.nbytes for item in received if not item.direct)
    assert plan.budget.convert_nbytes >= apart.budget.convert_nbytes + 2 * largest
    narrow = max(one.plan.largest_staged_nbytes for one in plans_of(folder, **options))
    check_parts(
        str(folder),
        LoadOptions(window=narrow, **options),
        LoadOptions(quantization="int8_per_channel"),
    )


def test_each_replica_reads_for_itself(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_type, changes = FAMILY_CASES["mixtral"]
        write_checkpoint(import_module("transformers"), model_type, changes, folder=tmp_path)
    mesh = {"tensor_parallel_size": 2, "expert_parallel_size": 4, **SHARED}
    plans = check_parts(str(tmp_path), LoadOptions(**mesh), LoadOptions())
    items = [[(item.tensor.name, item.shared) for item in shared_items(plan)] for plan in plans]
    assert items[0] == items[2]
    assert items[1] == items[3]
    assert items[0]
    assert not any("experts" in item.param.name for plan in plans for item in shared_items(plan))


def test_a_mapped_file_is_no_place_for_what_another_rank_sends(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(layers=2, files=1))
    options = LoadOptions(safetensors_load_strategy="lazy", tensor_parallel_size=2, read_sharing="shared")
    plans = [prepare(str(folder), options, rank=rank) for rank in range(2)]
    for plan in plans:
        received = {(item.param.name, item.stored_name) for item in plan.plan.items if item.is_received}
        assert received
        assert received.isdisjoint(plan.read_plan.mapped)
    with (
        open_ranked(folder) as one,
        open_ranked(folder, tensor_parallel_size=2, safetensors_load_strategy="lazy", **SHARED) as ranked,
    ):
        torch.testing.assert_close(ranked.logits([1, 2, 3]), one.logits([1, 2, 3]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_answer_as_one_alone(ranks: int, tiny_folder: Callable[[TinyModel], Path]) -> None:
    """Over real process groups: a broadcast among all ranks, messages among some (key/value heads of pairs)."""
    folder = tiny_folder(TinyModel(layers=2, files=1))
    with open_ranked(folder, quantization="int8_per_channel") as one:
        logits = one.logits([1, 2, 3, 4])
    with open_ranked(folder, quantization="int8_per_channel", tensor_parallel_size=ranks, **SHARED) as ranked:
        torch.testing.assert_close(ranked.logits([1, 2, 3, 4]), logits, rtol=0, atol=1e-4)
        assert ranked.model.wait_loaded(20)
        stats, plan = ranked.model.stats(), ranked.model.prepared.plan
        assert (stats.bytes_read, stats.bytes_received) == (plan.read_nbytes, plan.received_nbytes)
        assert plan.received_nbytes > 0


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)])
def test_a_rank_that_does_not_come_is_an_error_and_no_hang(ranks: tuple[int, ...]) -> None:
    """Rank 2 waits for rank 1, among all and among some."""

    def work(groups: ProcessGroups, rank: int) -> str:
        assert isinstance(groups.reads, DistributedGroup)
        groups.reads.process_group._set_default_timeout(timedelta(seconds=0.3))
        try:
            if rank == 2:
                groups.reads.broadcast(torch.zeros(8, dtype=torch.uint8), root=1, ranks=ranks)
            return ""
        except PeerError as error:
            return str(error)

    found = on_ranks(Topology(tensor=3), work, timeout_s=20)
    assert found[2] in ("a broadcast of (0, 1, 2)", "receiving from rank 1 of (1,)")


def test_a_load_without_the_other_ranks_is_refused(tiny_folder: Callable[[TinyModel], Path]) -> None:
    (plan, _) = plans_of(tiny_folder(TinyModel(layers=1, files=1)), tensor_parallel_size=2, **SHARED)
    with pytest.raises(LayerLoadError, match="shared with ranks that are not there"):
        load_stored(plan)


def test_options_that_share_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'some' is not known: choose one of none, shared"):
        LoadOptions(read_sharing="some", tensor_parallel_size=2)
    with pytest.raises(OptionError, match="give a --tensor-parallel-size of at least 2"):
        LoadOptions(read_sharing="shared", expert_parallel_size=2)
    (tmp_path / "config.json").write_text(json.dumps(raw_config("mixtral")))
    with pytest.raises(OptionError, match="made-up weights are not read"):
        plans_of(tmp_path, load_format="dummy", tensor_parallel_size=2, **SHARED)


def test_experts_that_are_read_in_no_common_order_are_not_shared(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_type, changes = FAMILY_CASES["mixtral"]
        write_checkpoint(import_module("transformers"), model_type, changes, folder=tmp_path)
    with pytest.raises(OptionError, match="--enable-expert-parallel keeps each expert on one rank"):
        plans_of(tmp_path, tensor_parallel_size=2, moe_load="routed_first", **SHARED)


def test_a_group_of_one_has_what_it_reads_and_a_stand_in_has_zeros_for_the_rest() -> None:
    given = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert SingleGroup().broadcast(given.clone(), root=0, ranks=(0,)).tolist() == [1, 2, 3]
    assert StandInGroup(2, 1).broadcast(given.clone(), root=1, ranks=(0, 1)).tolist() == [1, 2, 3]
    assert StandInGroup(2, 1).broadcast(given.clone(), root=0, ranks=(0, 1)).tolist() == [0, 0, 0]


def test_the_command_shows_what_each_rank_reads_both_ways(
    tiny_folder: Callable[[TinyModel], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder(TinyModel(layers=2, files=1)))
    read = {}
    for way in ("none", "shared"):
        command = ["plan", folder, "--tensor-parallel-size", "2", "--read-sharing", way]
        assert cli.run([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        read[way] = [rank["bytes_read"] for rank in found["ranks"]]
        assert found["bytes_read"] == read[way][0]
        assert cli.run(command) == 0
        head, *lines = capsys.readouterr().out.splitlines()[-3:]
        assert head.split()[:5] == ["rank", "read", "apart", "shared", "kept"]
        assert [line.split()[0] for line in lines] == ["0", "1"]
    assert found["bytes_read_by_sharing"] == read
    assert sum(read["shared"]) < sum(read["none"])
