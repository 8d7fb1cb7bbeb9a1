"""Which weights stay in memory when not all of them fit, and which are read again for every pass. Pure. [no-torch]

A walk over the layers that begins anew with each token hits nothing in a cache that forgets what was used longest ago:
what is needed next has always just been dropped. A fixed set of K of L layers hits K / L. Which ones does not matter
for the bytes; spread evenly, every streamed layer has neighbours whose computing hides its arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Group = tuple[str, int]  # a layer, and the bytes of its weights that may be streamed


def choose_residents(layers: Sequence[Group], *, room_nbytes: int) -> tuple[str, ...]:
    """The layers that stay, in order: as many as fit into `room_nbytes`, spread evenly; then any other that still fits,
    the largest first."""
    sizes = dict(layers)
    for count in range(len(layers), -1, -1):
        chosen = {layers[index][0] for index in spread(count, of=len(layers))}
        left = room_nbytes - sum(sizes[name] for name in chosen)
        if left >= 0:
            break
    else:
        return ()
    for name, nbytes in sorted(layers, key=lambda group: -group[1]):
        if name not in chosen and nbytes <= left:
            chosen.add(name)
            left -= nbytes
    return tuple(name for name, _ in layers if name in chosen)


def spread(count: int, *, of: int) -> list[int]:
    """`count` of the numbers 0 to `of` - 1, as far apart as they go."""
    return [(2 * index + 1) * of // (2 * count) for index in range(count)]


def fill_up(units: Mapping[str, int], *, room_nbytes: int) -> tuple[str, ...]:
    """Single weights of streamed layers that fit into what is left: the largest first, in the order given."""
    chosen, left = set(), room_nbytes
    for name, nbytes in sorted(units.items(), key=lambda unit: -unit[1]):
        if nbytes <= left:
            chosen.add(name)
            left -= nbytes
    return tuple(name for name in units if name in chosen)
