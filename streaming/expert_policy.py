"""Which experts to let go when there is room for some only: least recently used, least often used, or by expected use.

A model walks its sparse layers in order, step after step; a visit of a layer uses a few of its units (streaming.
expert_plan). All that a policy is told is what each visit used and what is present. Pure: no bytes, no clock.

`ExpectedUse` is what the runtime takes. It estimates for each unit the chance p that the next visit of its layer uses
it, and lets go the one whose next use is farthest away: the way to that visit, and 1 / p - 1 rounds behind it. p is the
share of recent visits that used it (older ones count less and less), plus what recency adds: how much more often than
that share units are used again whose last use was 1, 2, ... visits ago. That excess is counted as the model runs, so
routers that repeat themselves and routers that do not are both met. Measured in BENCHMARKS.md. [no-torch]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Protocol

Unit = tuple[int, int]  # the number of the sparse layer in the order of the walk, and the unit's number there


class EvictionPolicy(Protocol):
    """Told of every visit, arrival and departure; asked who goes."""

    def visit(self, layer: int, units: Sequence[int]) -> None:
        """The layer is computed, and uses these of its units, present or not."""
        ...

    def add(self, unit: Unit) -> None:
        """The unit is present now."""
        ...

    def remove(self, unit: Unit) -> None:
        """The unit is present no more."""
        ...

    def victim(self, spared: Collection[Unit]) -> Unit | None:
        """The unit to let go next, none of those spared; None where no other is present."""
        ...


class LeastRecent:
    """Lets go what was used, or came, longest ago."""

    def __init__(self, layers: int) -> None:
        self._present: dict[Unit, None] = {}  # the longest unused first

    def visit(self, layer: int, units: Sequence[int]) -> None:
        for unit in units:
            if (layer, unit) in self._present:
                self.remove((layer, unit))
                self.add((layer, unit))

    def add(self, unit: Unit) -> None:
        self._present[unit] = None

    def remove(self, unit: Unit) -> None:
        del self._present[unit]

    def victim(self, spared: Collection[Unit]) -> Unit | None:
        return next((unit for unit in self._present if unit not in spared), None)


class LeastFrequent:
    """Lets go what the fewest visits have used, and of those what came first."""

    def __init__(self, layers: int) -> None:
        self._uses: dict[Unit, int] = {}
        self._present: dict[Unit, None] = {}

    def visit(self, layer: int, units: Sequence[int]) -> None:
        for unit in units:
            self._uses[layer, unit] = self._uses.get((layer, unit), 0) + 1

    def add(self, unit: Unit) -> None:
        self._present[unit] = None

    def remove(self, unit: Unit) -> None:
        del self._present[unit]

    def victim(self, spared: Collection[Unit]) -> Unit | None:
        others = (unit for unit in self._present if unit not in spared)
        return min(others, key=lambda unit: self._uses.get(unit, 0), default=None)


MEMORY_VISITS = 256.0  # for so many visits the weight of a use falls to 1 / e
RECENT_VISITS = 6  # up to this age of the last use its age is looked at
_LEAST_CHANCE = 1e-4  # of a unit that no visit used yet


@dataclass
class _Uses:
    """A unit's weighed count of uses at its last one, the visit `last`."""

    weight: float
    last: int


@dataclass
class _Layer:
    """`recent`: what the last visits used, the newest first. `ranked`: chances and numbers of units that are present,
    the greatest first; None where they have to be ranked anew."""

    visits: int = 0
    uses: dict[int, _Uses] = field(default_factory=dict)
    recent: deque[frozenset[int]] = field(default_factory=lambda: deque(maxlen=RECENT_VISITS))
    present: set[int] = field(default_factory=set)
    ranked: list[tuple[float, int]] | None = None


class ExpectedUse:
    """Lets go the unit whose next use is expected to be the farthest away (see the head of this file)."""

    def __init__(self, layers: int) -> None:
        self._layers = [_Layer() for _ in range(layers)]
        self._at = 0  # the layer that is computed, or was last
        self._excess = [0.0] * RECENT_VISITS  # by age: uses beyond what the share of visits says, weighed
        self._seen = [1.0] * RECENT_VISITS  # and of how many units

    def visit(self, layer: int, units: Sequence[int]) -> None:
        at, used = self._layers[layer], frozenset(units)
        self._at = layer
        self._learn(at, used)
        at.visits += 1
        for unit in used:
            known = at.uses.get(unit)
            weight = 0.0 if known is None else known.weight * _faded(at.visits - known.last)
            at.uses[unit] = _Uses(weight + 1.0, at.visits)
        at.recent.appendleft(used)
        at.ranked = None

    def add(self, unit: Unit) -> None:
        layer = self._layers[unit[0]]
        layer.present.add(unit[1])
        layer.ranked = None

    def remove(self, unit: Unit) -> None:
        layer = self._layers[unit[0]]
        layer.present.discard(unit[1])
        if layer.ranked and layer.ranked[-1][1] == unit[1]:
            layer.ranked.pop()
        else:
            layer.ranked = None

    def victim(self, spared: Collection[Unit]) -> Unit | None:
        best, farthest = None, -inf
        for number, layer in enumerate(self._layers):
            for chance, unit in self._worst_first(layer):
                if (number, unit) not in spared:
                    away = self._way(number) + len(self._layers) * (1.0 / chance - 1.0)
                    if away > farthest:
                        best, farthest = (number, unit), away
                    break
        return best

    def chance(self, unit: Unit) -> float:
        """How likely the next visit of its layer is thought to use a unit."""
        layer = self._layers[unit[0]]
        return self._chance(layer, unit[1])

    def _way(self, layer: int) -> int:
        """How many layers on the next visit of a layer is."""
        return (layer - self._at - 1) % len(self._layers) + 1

    def _worst_first(self, layer: _Layer) -> Iterator[tuple[float, int]]:
        if layer.ranked is None:
            layer.ranked = sorted(((self._chance(layer, unit), unit) for unit in layer.present), reverse=True)
        return reversed(layer.ranked)

    def _chance(self, layer: _Layer, unit: int) -> float:
        known = layer.uses.get(unit)
        if known is None:
            return _LEAST_CHANCE
        age = layer.visits - known.last
        more = max(0.0, self._excess[age] / self._seen[age]) if age < RECENT_VISITS else 0.0
        return min(1.0, max(_LEAST_CHANCE, _share(layer, known) + more))

    def _learn(self, layer: _Layer, used: frozenset[int]) -> None:
        """Count how often units that were used of late are used again, beside the share of visits that use them."""
        done: set[int] = set()
        for age, before in enumerate(layer.recent):
            for unit in before - done:
                share = _share(layer, layer.uses[unit])
                self._excess[age] += (unit in used) - min(1.0, share)
                self._seen[age] += 1.0
            done |= before
            if self._seen[age] > _LEARNT_FROM:
                self._excess[age] /= 2.0
                self._seen[age] /= 2.0


_LEARNT_FROM = 4096.0  # units: older ones count half


def _faded(visits: int) -> float:
    """What the weight of a use has become so many visits later."""
    fade: float = (1.0 - 1.0 / MEMORY_VISITS) ** visits
    return fade


def _share(layer: _Layer, uses: _Uses) -> float:
    """The share of a layer's visits that used a unit, each visit weighed as a use of its time is. The last use is one
    of few where there were few visits, hence the one visit more."""
    total = (1.0 - _faded(layer.visits)) * MEMORY_VISITS + 1.0
    return uses.weight * _faded(layer.visits - uses.last) / total


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"lru": LeastRecent, "lfu": LeastFrequent, "expected-use": ExpectedUse}
)
"""By name; each is made for a number of sparse layers."""
