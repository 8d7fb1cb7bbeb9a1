"""What a token costs under a memory limit, before anything is loaded: bytes of a pass over the bandwidth, by limit.

    python examples/streaming_floors.py demo --memory 100MiB,150MiB,200MiB --bandwidth 500MB

From headers alone. Beside what stays by the plan (a fixed set) stands what a cache of the same bytes would hit that
forgets what was used longest ago: nothing, as long as not everything fits, since each pass begins with what it has just
forgotten.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence

from streaming import LoadOptions, StreamingError
from streaming.prepare import prepare
from streaming.sizes import format_size, parse_size
from streaming.stream_plan import StreamPlan

PASSES = 4  # the first fills the cache, the others are counted


def least_recently_used_hits(sizes: Sequence[int], *, room_nbytes: int, passes: int = PASSES) -> float:
    """The share of bytes that such a cache of `room_nbytes` has when they are used in order, again and again."""
    held: OrderedDict[int, int] = OrderedDict()
    hits = total = 0
    for number in range(passes):
        for unit, size in enumerate(sizes):
            hit = unit in held
            if number:
                hits, total = hits + size * hit, total + size
            held[unit] = size
            held.move_to_end(unit)
            while sum(held.values()) > room_nbytes:
                held.popitem(last=False)
    return hits / total if total else 1.0


def line(limit: str, stream: StreamPlan | None, *, rate: int) -> str:
    """One limit's row."""
    if stream is None:
        return f"{limit:>10} {'-':>12} {'100%':>7} {'100%':>7} {'-':>12}"
    sizes = [unit.nbytes for unit in stream.units]
    room = stream.ring_nbytes + sum(sizes) - stream.pass_nbytes
    lru = least_recently_used_hits(sizes, room_nbytes=room)
    seconds = f"{stream.pass_read_nbytes / rate:.3f} s"
    return f"{limit:>10} {format_size(stream.pass_nbytes):>12} {stream.hit_rate:>7.0%} {lru:>7.0%} {seconds:>12}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--memory", default="100MiB,150MiB,200MiB", help="limits, separated by commas")
    parser.add_argument("--bandwidth", default="500MB", help="of the disk, a second")
    parser.add_argument("--quantization", default="none")
    options = parser.parse_args(arguments)
    rate = parse_size(options.bandwidth, option="--bandwidth")
    print(f"{'limit':>10} {'a pass':>12} {'hits':>7} {'LRU':>7} {'a token':>12}")
    for limit in options.memory.split(","):
        try:
            asked = LoadOptions(memory=limit, quantization=options.quantization)
            print(line(limit, prepare(options.model, asked).plan.stream, rate=rate))
        except (StreamingError, ValueError) as error:
            print(f"{limit:>10} {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
