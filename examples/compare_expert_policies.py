"""Which experts to keep when there is room for some: hit rates of streaming.expert_policy's policies, beside the best.

usage: python examples/compare_expert_policies.py [--trace routing.json] [--tokens 300] [--seed 1] ...

Made-up routing: the experts of each layer are chosen with probabilities as 1 / rank^s (Zipf), each layer's in an order
of its own, and with probability p a token takes the expert of the token before it. `--trace`: the routing of a trained
model, as examples/train_tiny_moe.py writes it, and what looking ahead to the next layer gives there. The best is
Belady's: what is needed again last goes first, as nobody can know. A hit is a unit that is there when its layer asks.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from streaming.expert_policy import POLICIES, EvictionPolicy, Unit

SHARES = (0.125, 0.25, 0.5)  # of all experts, that there is room for
COMPUTE_S = (0.1, 0.3, 0.5, 1.0, 3.0)  # of a layer, where a unit takes a second to load
SKEWS, LOCALITIES = (0.8, 1.2), (0.0, 0.3, 0.6)


@dataclass(frozen=True)
class Visit:
    """A layer of a step: the units that it uses, and what the layer before it has foreseen of them."""

    layer: int
    units: tuple[int, ...]
    foreseen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Found:
    """Units that were asked for, those that were there, all that were loaded; of those loaded ahead, used ones."""

    asked: int
    hits: int
    loads: int
    ahead: int = 0
    ahead_used: int = 0

    @property
    def hit_rate(self) -> float:
        """The share that was there."""
        return self.hits / self.asked


def zipf_routing(
    *, layers: int, experts: int, chosen: int, tokens: int, skew: float, locality: float, seed: int
) -> list[Visit]:
    """Made-up routing (see the head of this file)."""
    draw = random.Random(seed)
    sums = list(accumulate(1 / (rank + 1) ** skew for rank in range(experts)))
    orders = [draw.sample(range(experts), experts) for _ in range(layers)]
    last: list[list[int]] = [[] for _ in range(layers)]
    visits = []
    for _ in range(tokens):
        for layer in range(layers):
            units: list[int] = []
            for place in range(chosen):
                again = last[layer][place] if last[layer] and draw.random() < locality else None
                while again is None or again in units:
                    again = orders[layer][bisect(sums, draw.random() * sums[-1])]
                units.append(again)
            last[layer] = units
            visits.append(Visit(layer, tuple(units)))
    return visits


def read_routing(path: Path) -> tuple[list[Visit], int]:
    """A trained model's routing, and how many experts a layer has."""
    found = json.loads(path.read_text(encoding="utf-8"))
    visits = []
    for chosen, foreseen in zip(found["chosen"], found["foreseen"], strict=True):
        ahead = [(), *map(tuple, foreseen)]
        visits += [Visit(layer, tuple(units), ahead[layer]) for layer, units in enumerate(chosen)]
    return visits, found["experts"]


def simulated(visits: Sequence[Visit], policy: EvictionPolicy, *, room: int, ahead: bool = False) -> Found:
    """What happens to the visits with room for so many units. `ahead`: what is foreseen is loaded before its layer."""
    present: set[Unit] = set()
    early: set[Unit] = set()
    asked = hits = loads = sent = used = 0

    def load(unit: Unit, spared: set[Unit]) -> bool:
        if len(present) >= room:
            victim = policy.victim(spared)
            if victim is None:
                return False
            present.discard(victim)
            early.discard(victim)
            policy.remove(victim)
        present.add(unit)
        policy.add(unit)
        return True

    for number, visit in enumerate(visits):
        units = {(visit.layer, unit) for unit in visit.units}
        policy.visit(visit.layer, visit.units)
        asked += len(units)
        hits += len(units & present)
        used += len(units & early)
        early -= {unit for unit in early if unit[0] == visit.layer}
        for unit in sorted(units - present):
            loads += load(unit, units)
        after = visits[number + 1] if number + 1 < len(visits) else None
        if ahead and after is not None and after.foreseen:
            foreseen = {(after.layer, unit) for unit in after.foreseen}
            for unit in sorted(foreseen - present):
                if load(unit, units | foreseen):
                    early.add(unit)
                    loads, sent = loads + 1, sent + 1
    return Found(asked, hits, loads, sent, used)


def seconds(visits: Sequence[Visit], *, layers: int, room: int, compute_s: float, ahead: bool) -> float:
    """How long the visits take where loading a unit takes a second, one after the other, and computing a layer
    `compute_s`. `ahead`: while a layer computes and nothing else is loaded, what is foreseen is, the likeliest first;
    what was begun is ended."""
    policy = POLICIES["expected-use"](layers)
    there_s: dict[Unit, float] = {}  # of what is present or on its way: when it is there
    now_s = free_s = 0.0

    def load(unit: Unit, spared: set[Unit]) -> None:
        nonlocal free_s
        victim = policy.victim(spared) if len(there_s) >= room else None
        if victim is not None:
            del there_s[victim]
            policy.remove(victim)
        free_s = max(free_s, now_s) + 1.0
        there_s[unit] = free_s
        policy.add(unit)

    for visit, after in zip(visits, [*visits[1:], Visit(0, ())], strict=True):
        units = {(visit.layer, unit) for unit in visit.units}
        policy.visit(visit.layer, visit.units)
        for unit in sorted(units - there_s.keys()):
            load(unit, units)
        end_s = max(now_s, *(there_s[unit] for unit in units)) + compute_s
        for foreseen in after.foreseen if ahead else ():
            if (after.layer, foreseen) not in there_s and max(free_s, now_s) < end_s:
                load((after.layer, foreseen), {*units, *((after.layer, unit) for unit in after.foreseen)})
        now_s = end_s
    return now_s


def best_hit_rate(visits: Sequence[Visit], *, room: int) -> float:
    """Belady's (IBM Systems Journal 5, 1966)."""
    asked = [(visit.layer, unit) for visit in visits for unit in visit.units]
    again = [len(asked)] * len(asked)
    last: dict[Unit, int] = {}
    for place in range(len(asked) - 1, -1, -1):
        again[place] = last.get(asked[place], len(asked))
        last[asked[place]] = place
    present: dict[Unit, int] = {}
    farthest: list[tuple[int, Unit]] = []
    hits = 0
    for unit, following in zip(asked, again, strict=True):
        hits += unit in present
        while unit not in present and len(present) >= room:
            place, victim = heapq.heappop(farthest)
            if present.get(victim) == -place:
                del present[victim]
        present[unit] = following
        heapq.heappush(farthest, (-following, unit))
    return hits / len(asked)


def rates(visits: Sequence[Visit], *, layers: int, room: int) -> list[float]:
    """The hit rate of each policy, then the best one."""
    found = [simulated(visits, make(layers), room=room).hit_rate for make in POLICIES.values()]
    return [*found, best_hit_rate(visits, room=room)]


def table(*, layers: int, experts: int, chosen: int, tokens: int, seed: int) -> Iterator[str]:
    """Lines of the comparison on made-up routing."""
    yield f"| skew | repeats | room | {' | '.join(POLICIES)} | best |"
    yield "| --- " * (len(POLICIES) + 4) + "|"
    for skew in SKEWS:
        for locality in LOCALITIES:
            visits = zipf_routing(
                layers=layers, experts=experts, chosen=chosen, tokens=tokens, skew=skew, locality=locality, seed=seed
            )
            for share in SHARES:
                found = rates(visits, layers=layers, room=int(layers * experts * share))
                yield f"| {skew} | {locality} | {share} | {' | '.join(f'{rate:.3f}' for rate in found)} |"


def trained_table(path: Path) -> Iterator[str]:
    """Lines of the comparison on a trained model's routing."""
    visits, experts = read_routing(path)
    layers = 1 + max(visit.layer for visit in visits)
    yield f"| room | {' | '.join(POLICIES)} | best | looking ahead: hits | loads | loads without | used |"
    yield "| --- " * (len(POLICIES) + 6) + "|"
    for share in SHARES:
        room = int(layers * experts * share)
        found = rates(visits, layers=layers, room=room)
        without, ahead = (
            simulated(visits, POLICIES["expected-use"](layers), room=room, ahead=one) for one in (False, True)
        )
        yield (
            f"| {share} | {' | '.join(f'{rate:.3f}' for rate in found)} | {ahead.hit_rate:.3f} | {ahead.loads} "
            f"| {without.loads} | {ahead.ahead_used / max(1, ahead.ahead):.2f} |"
        )
    yield ""
    yield f"| a layer's time over a load's | {' | '.join(f'room {share}' for share in SHARES)} |"
    yield "| --- " * (len(SHARES) + 1) + "|"
    for compute_s in COMPUTE_S:
        times = [
            [
                seconds(visits, layers=layers, room=int(layers * experts * share), compute_s=compute_s, ahead=one)
                for one in (True, False)
            ]
            for share in SHARES
        ]
        yield f"| {compute_s} | {' | '.join(f'{ahead / without:.3f}' for ahead, without in times)} |"
    yield ""
    pairs = [(set(visit.units), set(visit.foreseen)) for visit in visits if visit.foreseen]
    right = sum(len(units & foreseen) for units, foreseen in pairs) / sum(len(foreseen) for _, foreseen in pairs)
    yield f"of what a layer's input chooses in the next layer's router, {right:.2f} is chosen there"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare policies for experts that come and go.")
    parser.add_argument("--trace", type=Path)
    for name, value in (("layers", 24), ("experts", 64), ("chosen", 4), ("tokens", 300), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args(arguments))
    trace = options.pop("trace")
    print("\n".join(table(**options) if trace is None else trained_table(trace)))


if __name__ == "__main__":
    main()
