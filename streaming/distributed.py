"""The process groups of a run on several ranks: torch.distributed behind `layers.parallel.Group`.

Process groups are made by themselves, from a key-value store that rank 0 holds: nothing is registered in torch's
global default group, so two models can live in one process. gloo carries CPU tensors, NCCL those of CUDA devices.

The forward's groups and the loader's are different ones: their calls come from different threads in no common order,
and on one group they would be taken for each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them; its types do not say so
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOp

from layers.parallel import Group, Groups, SingleGroup
from layers.topology import Topology
from streaming.ranks.waits import Meter

Blame = Callable[[str, tuple[int, ...], Exception], BaseException]
"""The error to raise in place of a collective's own: given what was being done, by which ranks, and that error."""

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Store:
    """Where ranks of one run find each other. `host`: rank 0's address as the others see it."""

    host: str
    port: int
    tcp: TCPStore

    @classmethod
    def serve(cls, host: str, *, world: int, timeout_s: float) -> Store:
        """Rank 0's end, on a port that the system picks. It takes connections from where `host` leads only: loopback
        stays loopback. `timeout_s`: how long ranks wait for one that is on its way."""
        listener = socket.create_server(("127.0.0.1" if is_local(host) else "", 0), backlog=4 * world)
        port = listener.getsockname()[1]
        tcp = TCPStore(
            host, port, world, True, timedelta(seconds=timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        return cls(host, port, tcp)

    @classmethod
    def connect(cls, host: str, port: int, *, world: int, timeout_s: float) -> Store:
        """Another rank's."""
        tcp = TCPStore(host, port, world, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        return cls(host, port, tcp)


def is_local(host: str) -> bool:
    """Whether an address is this machine's loopback."""
    return host.startswith("127.") or host in ("localhost", "::1")


@dataclass(frozen=True)
class DistributedGroup:
    """Ranks 0 ... size - 1 of a process group, of which this process is `rank` (see layers.parallel.Group).

    `ranks`: their numbers in the world. Every failing collective raises what `blame` makes of it.
    """

    process_group: Any
    ranks: tuple[int, ...]
    rank: int
    blame: Blame
    meter: Meter | None = None  # told of each collective of all ranks

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x in x's dtype; half precision is added in float32 and rounded once."""
        wide = x.float() if x.dtype in _HALVES else x
        return self._reduce(wide, ReduceOp.SUM, "a sum").to(x.dtype)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all ranks' x."""
        return self._reduce(x, ReduceOp.MAX, "a maximum")

    def _reduce(self, x: torch.Tensor, how: Any, words: str) -> torch.Tensor:
        if not x.numel():
            return x
        out, options = x.contiguous(), AllreduceOptions()
        options.reduceOp = how
        self._wait(words, lambda: self.process_group.allreduce([out], options))
        return out

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's x, all of one shape, in the order of the ranks."""
        if not x.numel():
            return (x,) * self.size
        own = _as_bytes(x)
        found = [torch.empty_like(own) for _ in self.ranks]
        self._wait("a gather", lambda: self.process_group.allgather([found], [own]))
        return tuple(_from_bytes(raw, x.dtype, x.shape) for raw in found)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows for every rank, `send` of each -> the rows that came for this one, and how many from each.

        The counts are exchanged first.
        """
        counts = torch.tensor(list(send), dtype=torch.int64, device=x.device)
        coming = torch.empty_like(counts)
        self._wait("an exchange", lambda: self.process_group.alltoall_base(coming, counts, [], []))
        received = tuple(int(count) for count in coming.tolist())
        return self._exchange(x, send, received), received

    def give_back(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """The way back of an all_to_all."""
        return self._exchange(x, received, sent)

    def broadcast(self, x: torch.Tensor, *, root: int, ranks: Sequence[int]) -> torch.Tensor:
        """Fill x (contiguous) with that of rank `root`; entered by `ranks` alone, of which root is one. Is x."""
        if not x.numel():
            return x
        raw, options = _as_bytes(x), BroadcastOptions()  # a view: x is contiguous
        if len(ranks) == self.size:
            options.rootRank = root
            self._wait("a broadcast", lambda: self.process_group.broadcast([raw], options))
        elif root == self.rank:
            for other in ranks:
                if other != root:
                    self.send(x, to=other)
        else:
            self._receive_into(raw, root)
        return x

    def _exchange(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        raw = _as_bytes(x)
        out = raw.new_empty(sum(receive), raw.shape[1])
        self._wait("an exchange", lambda: self.process_group.alltoall_base(out, raw, list(receive), list(send)))
        return _from_bytes(out, x.dtype, (sum(receive), *x.shape[1:]))

    def send(self, x: torch.Tensor, *, to: int) -> None:
        """Send x to rank `to` of the group, which must be receiving one of its shape."""
        if x.numel():
            words, raw = f"sending to rank {self.ranks[to]}", _as_bytes(x)
            self._wait(words, lambda: self.process_group.send([raw], to, 0), on=(self.ranks[to],))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int, device: torch.device) -> torch.Tensor:
        """What rank `source` of the group sends."""
        out = torch.empty(*shape, dtype=dtype, device=device)
        if out.numel():
            self._receive_into(_as_bytes(out), source)  # a view: out is contiguous
        return out

    def _receive_into(self, raw: torch.Tensor, source: int) -> None:
        words = f"receiving from rank {self.ranks[source]}"
        self._wait(words, lambda: self.process_group.recv([raw], source, 0), on=(self.ranks[source],))

    def _wait(self, words: str, begin: Callable[[], Any], *, on: tuple[int, ...] | None = None) -> None:
        """`on`: the ranks that are waited for, where not for all."""
        begin_s = time.monotonic()
        try:
            begin().wait()
        except RuntimeError as error:  # torch's DistBackendError is one; gloo's own are nothing finer
            raise self.blame(words, on or self.ranks, error) from error
        if self.meter is not None and on is None:
            self.meter.note(begin_s)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes of a row]: not every dtype is known to every back end, and bytes are moved unchanged."""
    return x.contiguous().reshape(x.shape[0] if x.dim() else 1, prod(x.shape[1:])).view(torch.uint8)


def _from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return raw.view(dtype).reshape(tuple(shape))


@dataclass(frozen=True)
class ProcessGroups:
    """A rank's groups. `forward`: of the model's steps. `maxima`: the loader's, over the ranks of a tensor group.
    `reads`: over the same ranks, to share what one of them has read, on the host. `world`: all ranks, to send and
    receive (None where nothing is sent from one to another)."""

    forward: Groups = field(default_factory=Groups)
    maxima: Group = field(default_factory=SingleGroup)
    reads: Group = field(default_factory=SingleGroup)
    world: DistributedGroup | None = None

    def close(self) -> None:
        """End the connections; a collective that is under way on this rank ends with an error."""
        for group in (self.forward.tensor, self.forward.expert, self.maxima, self.reads, self.world):
            if isinstance(group, DistributedGroup):
                group.process_group.shutdown()


def join_groups(
    store: Store,
    topology: Topology,
    *,
    device: torch.device,
    timeout_s: float,
    blame: Blame,
    meter_of: Callable[[tuple[int, ...]], Meter] | None = None,
) -> ProcessGroups:
    """Meet the other ranks; returns when all of them are there. To be entered by every rank of the world, at one time.

    `timeout_s`: how long this, and any collective, waits for a rank before it fails. `meter_of` makes, of the ranks of
    a group of the forward's, what is told of its collectives.
    """
    join = _Joining(store, topology, device, timeout_s, blame)
    forward = replace(join, meter_of=meter_of)
    tensor = forward.group("tensor", topology.tensor_ranks)
    same = topology.expert_ranks == topology.tensor_ranks
    expert = tensor if same else forward.group("expert", topology.expert_ranks)
    maxima = join.group("maxima", topology.tensor_ranks)
    reads = replace(join, device=torch.device("cpu")).group("reads", topology.tensor_ranks)
    crosses = topology.pipeline > 1 or topology.replicas > 1
    world = join.group("world", tuple(range(topology.world))) if crosses else None
    assert not isinstance(world, SingleGroup)
    return ProcessGroups(Groups(tensor, expert), maxima, reads, world)


@dataclass(frozen=True)
class _Joining:
    store: Store
    topology: Topology
    device: torch.device
    timeout_s: float
    blame: Blame
    meter_of: Callable[[tuple[int, ...]], Meter] | None = None

    def group(self, name: str, ranks: tuple[int, ...]) -> DistributedGroup | SingleGroup:
        if len(ranks) == 1:
            return SingleGroup()
        own = ranks.index(self.topology.rank)
        store = PrefixStore(f"{name}-{ranks[0]}", self.store.tcp)
        make = self._nccl if self.device.type == "cuda" else self._gloo
        try:
            made = make(store, own, len(ranks))
        except RuntimeError as error:
            raise self.blame(f"joining the {name} group", ranks, error) from error
        return DistributedGroup(made, ranks, own, self.blame, None if self.meter_of is None else self.meter_of(ranks))

    def _gloo(self, store: PrefixStore, rank: int, size: int) -> Any:
        gloo: Any = ProcessGroupGloo  # its type stub leaves out the options
        options, local = gloo._Options(), is_local(self.store.host)
        options._devices = [gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()]
        options._timeout = timedelta(seconds=self.timeout_s)
        return gloo(store, rank, size, options)

    def _nccl(self, store: PrefixStore, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL  # not in every build

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return ProcessGroupNCCL(store, rank, size, options)
