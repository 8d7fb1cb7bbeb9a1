"""Ranks as threads of one process, for tests: groups that exchange tensors over a barrier, and a whole model's stored
numbers cut into those of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from layers.cuts import cut_specs
from layers.decoder import DecoderModel, build_shell
from layers.eager import allocate, fill_section
from layers.model_config import ModelConfig
from layers.parallel import Group, Groups, SingleGroup
from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec
from quant.cuts import cut_stored

PATIENCE_S = 30.0
Result = TypeVar("Result")


@dataclass
class Meeting:
    """Where the ranks of a group meet: each leaves something and gets what all have left, in the order of ranks."""

    size: int
    left: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.left = [None] * self.size
        self._barrier = threading.Barrier(self.size, timeout=PATIENCE_S)
        self._some: dict[tuple[int, ...], Meeting] = {}
        self._lock, self._ended = threading.Lock(), False

    def among(self, ranks: tuple[int, ...]) -> Meeting:
        """Where these of the ranks meet."""
        if len(ranks) == self.size:
            return self
        with self._lock:
            found = self._some.setdefault(ranks, Meeting(len(ranks)))
            if self._ended:
                found.end()
        return found

    def exchange(self, rank: int, given: object) -> list[object]:
        """Raises threading.BrokenBarrierError when a rank does not come, or has ended."""
        self.left[rank] = given
        self._barrier.wait()
        found = list(self.left)
        self._barrier.wait()
        return found

    def end(self) -> None:
        """Nobody comes any more."""
        self._barrier.abort()
        with self._lock:
            self._ended = True
            for meeting in self._some.values():
                meeting.end()


@dataclass(frozen=True)
class ThreadGroup:
    """A layers.parallel.Group of threads."""

    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.float() for part in self.all_gather(x)]).sum(0).to(x.dtype)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(x)).amax(0)

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = tuple(part for part in self.meeting.exchange(self.rank, x.clone()) if isinstance(part, torch.Tensor))
        assert {(part.shape, part.dtype) for part in parts} == {(x.shape, x.dtype)}, "ranks do not agree"
        return parts

    def all_to_all(self, x: torch.Tensor, send: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        assert len(send) == self.size
        assert x.shape[0] == sum(send)
        parts: list[tuple[torch.Tensor, ...]] = []
        for given in self.meeting.exchange(self.rank, x.split(list(send))):
            assert isinstance(given, tuple)
            parts.append(given)
        mine = [given[self.rank] for given in parts]
        return torch.cat(mine), tuple(part.shape[0] for part in mine)

    def give_back(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        back, counts = self.all_to_all(x, received)
        assert counts == tuple(sent)
        return back

    def broadcast(self, x: torch.Tensor, *, root: int, ranks: Sequence[int]) -> torch.Tensor:
        own = self.meeting.among(tuple(ranks)).exchange(ranks.index(self.rank), (root, x.clone()))
        given: list[tuple[int, torch.Tensor]] = [one for one in own if isinstance(one, tuple)]
        assert {(at, part.shape, part.dtype) for at, part in given} == {(root, x.shape, x.dtype)}, "ranks do not agree"
        return x.copy_(given[list(ranks).index(root)][1])


def thread_groups(topology: Topology) -> list[Groups]:
    """The groups of every rank of one stage."""
    ranks = range(topology.stage_ranks)
    tensor = [Meeting(topology.tensor) for _ in range(topology.replicas)]
    expert = Meeting(topology.expert)
    found = []
    for at in map(topology.at, ranks):
        own: Group = ThreadGroup(tensor[at.replica], at.tensor_rank) if at.tensor > 1 else SingleGroup()
        others: Group = ThreadGroup(expert, at.expert_rank) if at.expert > 1 else SingleGroup()
        found.append(Groups(own, others))
    return found


def on_ranks(topology: Topology, work: Callable[[Topology, Groups], Result]) -> list[Result]:
    """What `work` gives on each rank of one stage, all of them at the same time. Raises the first rank's error."""
    groups, errors = thread_groups(topology), []
    results: dict[int, Result] = {}

    def rank(index: int) -> None:
        torch.set_num_threads(1)  # waiting threads of each rank would take the cores from the others
        try:
            with torch.inference_mode():
                results[index] = work(topology.at(index), groups[index])
        except Exception as error:
            errors.append(error)
            for group in (group for one in groups for group in (one.tensor, one.expert)):
                if isinstance(group, ThreadGroup):
                    group.meeting.end()

    usual = torch.get_num_threads()
    threads = [threading.Thread(target=rank, args=(index,)) for index in range(topology.stage_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(usual)
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [results[index] for index in range(topology.stage_ranks)]


def whole_stored(specs: Sequence[LayerSpec], weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What is kept of every parameter by its name, quantized from wide weights by parameter name."""
    kept = {}
    for param in (param for spec in specs for param in spec.params):
        kept[param.name] = allocate(param, device="cpu")
        for section, rows in enumerate(weights[param.name].split(list(param.section_rows))):
            fill_section(kept[param.name], param, section, rows)
    return kept


def cut_parameter(param: ParamSpec, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's part of what is kept of the uncut parameter."""
    if param.cut is None:
        return dict(kept)
    whole, own = param.cut.whole, allocate(param, device="cpu")
    if not param.kind.has_scheme:
        ((name, tensor),) = kept.items()
        starts = whole.section_starts
        parts = [
            tensor[starts[part.section] + part.start : starts[part.section] + part.stop] for part in param.cut.parts
        ]
        return {name: torch.cat(parts)}
    for section, part in enumerate(param.cut.parts):
        found = cut_stored(
            whole.scheme,
            whole.scheme.section_views(kept, whole.kept_rows, part.section),
            param.scheme,
            rows=(part.start, part.stop),
            columns=param.cut.columns,
            total_rows=whole.section_rows[part.section],
            in_features=whole.shape[1],
        )
        for name, view in param.scheme.section_views(own, param.kept_rows, section).items():
            view.copy_(found[name])
    return own


def rank_model(
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    kept: Mapping[str, Mapping[str, torch.Tensor]],
    topology: Topology,
) -> DecoderModel:
    """A rank's model, whose stored numbers are its parts of those `kept` of the whole (see `whole_stored`)."""
    own = cut_specs(specs, config, topology)
    model = build_shell(config, own, topology=topology)
    for param in (param for spec in own for param in spec.params):
        module = param.name.rpartition(".")[0]
        for name, tensor in cut_parameter(param, kept[param.name]).items():
            model.assign(f"{module}.{name}", tensor)
    return model
