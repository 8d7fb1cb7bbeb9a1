"""The collectives of process groups, by real ones: each rank is a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from layers.parallel import SingleGroup
from layers.topology import Topology
from streaming.distributed import DistributedGroup, ProcessGroups, Store, join_groups

CPU = torch.device("cpu")


class PeerError(Exception):
    """What the tests' groups raise."""


def on_ranks(
    topology: Topology, work: Callable[[ProcessGroups, int], object], *, timeout_s: float = 20.0
) -> list[object]:
    """What `work(groups, rank)` returns on each rank."""
    port, world = Future[int](), topology.world

    def blame(words: str, ranks: tuple[int, ...], error: Exception) -> Exception:
        return PeerError(f"{words} of {ranks}")

    def run(rank: int) -> object:
        if rank == 0:
            store = Store.serve("127.0.0.1", world=world, timeout_s=20)
            port.set_result(store.port)
        else:
            store = Store.connect("127.0.0.1", port.result(20), world=world, timeout_s=20)
        groups = join_groups(store, topology.at(rank), device=CPU, timeout_s=timeout_s, blame=blame)
        try:
            with torch.inference_mode():
                return work(groups, rank)
        finally:
            groups.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_sums_of_half_precision_are_added_in_float32_and_rounded_once() -> None:
    parts = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16

    def work(groups: ProcessGroups, rank: int) -> torch.Tensor:
        return groups.forward.tensor.all_reduce(parts[rank : rank + 1])

    assert [float(x) for x in on_ranks(Topology(tensor=3), work)] == [258.0] * 3  # type: ignore[arg-type]


def test_maxima_and_gathers_are_in_the_order_of_the_ranks() -> None:
    def work(groups: ProcessGroups, rank: int) -> tuple[list[float], list[list[int]]]:
        most = groups.maxima.maximum(torch.tensor([float(rank), -float(rank)]))
        gathered = groups.forward.tensor.all_gather(torch.tensor([rank, 7 * rank], dtype=torch.int32))
        return most.tolist(), [x.tolist() for x in gathered]

    assert on_ranks(Topology(tensor=2), work) == [([1.0, 0.0], [[0, 0], [1, 7]])] * 2


def test_rows_find_their_ranks_and_the_way_back_though_some_have_none() -> None:
    send = [[2, 0, 1], [0, 0, 0], [1, 3, 0]]  # send[r][s]: rows from rank r to rank s

    def work(groups: ProcessGroups, rank: int) -> tuple[list[list[int]], tuple[int, ...], bool]:
        group = groups.forward.expert
        rows = [[rank, to, at] for to in range(3) for at in range(send[rank][to])]
        x = torch.tensor(rows, dtype=torch.bfloat16).reshape(-1, 3)
        found, counts = group.all_to_all(x, send[rank])
        back = group.give_back(found * 2, counts, send[rank])
        return found.int().tolist(), counts, torch.equal(back, x * 2)

    assert on_ranks(Topology(expert=3), work) == [
        ([[0, 0, 0], [0, 0, 1], [2, 0, 0]], (2, 0, 1), True),
        ([[2, 1, 0], [2, 1, 1], [2, 1, 2]], (0, 0, 3), True),
        ([[0, 2, 0]], (1, 0, 0), True),
    ]


def test_tensors_without_numbers_pass_every_collective() -> None:
    def work(groups: ProcessGroups, rank: int) -> list[tuple[int, ...]]:
        group, x = groups.forward.tensor, torch.empty(0, 4)
        found, _ = group.all_to_all(x, [0, 0])
        return [tuple(y.shape) for y in (group.all_reduce(x), *group.all_gather(x), found)]

    assert on_ranks(Topology(tensor=2), work) == [[(0, 4)] * 4] * 2


def test_a_mesh_has_the_groups_that_its_ranks_share() -> None:
    def work(groups: ProcessGroups, rank: int) -> tuple[tuple[int, ...], ...]:
        found = (groups.forward.tensor, groups.forward.expert, groups.maxima, groups.world)
        return tuple(group.ranks for group in found if isinstance(group, DistributedGroup))

    first, second, everyone = (0, 1), (2, 3), (0, 1, 2, 3)
    assert on_ranks(Topology(tensor=2, expert=4), work) == [
        *[(first, everyone, first, everyone)] * 2,
        *[(second, everyone, second, everyone)] * 2,
    ]


def test_experts_cut_like_dense_layers_need_no_group_of_their_own() -> None:
    def work(groups: ProcessGroups, rank: int) -> tuple[bool, bool]:
        return isinstance(groups.forward.expert, SingleGroup), groups.world is None

    assert on_ranks(Topology(tensor=2), work) == [(True, True)] * 2


def test_a_stage_sends_to_the_next() -> None:
    def work(groups: ProcessGroups, rank: int) -> list[float] | None:
        assert groups.world is not None
        if rank == 0:
            groups.world.send(torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), to=1)
            return None
        found: list[float] = groups.world.receive((1, 2), torch.bfloat16, source=0, device=CPU)[0].tolist()
        return found

    assert on_ranks(Topology(pipeline=2), work) == [None, [1.5, 2.5]]


def test_a_rank_that_does_not_come_is_blamed_in_place_of_the_back_ends_own_error() -> None:
    done = threading.Event()

    def work(groups: ProcessGroups, rank: int) -> str | None:
        if rank == 1:
            assert done.wait(20)
            return None
        with pytest.raises(PeerError) as caught:
            groups.forward.tensor.all_reduce(torch.ones(1))
        done.set()
        return str(caught.value)

    assert on_ranks(Topology(tensor=2), work, timeout_s=0.5) == ["a sum of (0, 1)", None]
