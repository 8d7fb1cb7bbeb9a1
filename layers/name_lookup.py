"""Many names through one weight map: those that differ by the layer's number alone are decided once. Imports no torch.

A large model asks for thousands of names, of which a dozen differ otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from layers.weights import Dropped, Target, WeightMap

_NAME = re.compile(r"(.*?\.)([0-9]{1,9})(\..*)", re.DOTALL)
_LAYERS = "model.layers."
_EXPERTS = "experts."
_PROBE = "424242424"  # stands for any number
_TELLS_NUMBERS = re.compile(r"(?:^|[^A-Za-z_])[0-9]|\\d(?![+*])")  # what a rule holds that tells one from another

_Decision = Dropped | tuple[str, str, Target] | None  # the parameter's name before and after the number; None: unknown


class NameLookup:
    """`WeightMap.locate`, which remembers what it decided for a name with another number in its first place."""

    def __init__(self, weight_map: WeightMap) -> None:
        self._map = weight_map
        self._unbounded = replace(weight_map, num_layers=None)
        self._remembers = not any(map(_TELLS_NUMBERS.search, _sources(weight_map)))
        self._known: dict[tuple[str, str], _Decision] = {}

    def locate(self, name: str) -> Target | Dropped:
        """Where the checkpoint tensor `name` goes: the same as the weight map says."""
        parts = _NAME.fullmatch(name) if self._remembers else None
        if parts is None:
            return self._map.locate(name)
        start, number, end = parts.groups()
        if start.endswith(_EXPERTS):  # an expert's number says which part of a parameter it is
            return self._map.locate(name)
        if (start, end) not in self._known:
            self._known[start, end] = self._decide(start, end)
        found = self._known[start, end]
        if found is None:
            return self._map.locate(name)
        if isinstance(found, Dropped):
            return found
        before, after, target = found
        if before == _LAYERS and self._map.num_layers is not None and int(number) >= self._map.num_layers:
            return self._map.locate(name)
        return Target(f"{before}{number}{after}", target.first, target.stop, target.transposed)

    def _decide(self, start: str, end: str) -> _Decision:
        found = self._unbounded.locate(f"{start}{_PROBE}{end}")
        if isinstance(found, Dropped):
            return found
        before, number, after = found.param.partition(_PROBE)
        whole = before.endswith(".") and after.startswith(".")  # else the number has become part of a word
        # Where a layer is named by another number than the first, that one decides whether it is there.
        if not number or not whole or _PROBE in after or (before != _LAYERS and before.startswith(_LAYERS)):
            return None
        return before, after, found


def _sources(weight_map: WeightMap) -> Iterator[str]:
    """What the rules look for, all of them."""
    yield from (pattern.pattern for pattern, _, _ in weight_map.renames)
    yield from (pattern.pattern for pattern in weight_map.transposed)
    yield from (prefix for prefix, _ in weight_map.unused)
    for rules in (weight_map.structure, weight_map.substrings, weight_map.prefixes, weight_map.suffixes):
        yield from (rule.source for rule in rules)
    yield from (rule.source for rule in weight_map.stacked)
