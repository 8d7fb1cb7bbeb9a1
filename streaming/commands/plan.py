"""`firstlayer plan`: the dry run, from headers alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from streaming import cli
from streaming.budget import Budget
from streaming.options import READ_SHARING
from streaming.plan import LayerPlan
from streaming.prepare import Prepared, prepare
from streaming.rank_share import RankShare, expert_numbers
from streaming.sizes import format_size, parse_size
from streaming.stream_plan import StreamPlan


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes."""
    parser.add_argument("--bandwidth", metavar="SIZE", help="bytes per second of the storage, for the estimate: 2GB")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    rates = [parse_size(options.bandwidth, option="--bandwidth")] if options.bandwidth else [500 * 10**6, 3 * 10**9]
    load = cli.load_options(options)
    prepared = prepare(options.model, load, every_rank=not load.topology().is_single)
    ranks = ranks_of(prepared)
    if options.json:
        sys.stdout.write(json.dumps(plan_dict(prepared, rates, ranks)) + "\n")
    else:
        cli.write_lines(plan_lines(prepared, rates, ranks))
    for warning in prepared.warnings:
        cli.warn(warning)
    return 0


def ranks_of(prepared: Prepared) -> tuple[RankShare, ...]:
    """What every rank reads and keeps, from one plan where it says so, else from each rank's own."""
    if prepared.plan.ranks:
        return prepared.plan.ranks
    others = range(1, prepared.topology.world)
    plans = (prepare(prepared.model, prepared.options, rank=rank) for rank in others)
    return tuple(map(_share_of, (prepared, *plans)))


def _share_of(prepared: Prepared) -> RankShare:
    plan, topology = prepared.plan, prepared.topology
    experts = expert_numbers(prepared.config, topology)
    return RankShare(topology.rank, plan.read_nbytes, plan.kept_nbytes, experts)


def plan_dict(prepared: Prepared, rates: list[int], ranks: Sequence[RankShare]) -> dict[str, object]:
    """The plan as JSON holds it; sizes are bytes."""
    plan, budget = prepared.plan, prepared.budget
    return {
        "model": prepared.checkpoint.name,
        "format": prepared.checkpoint.format,
        "model_type": prepared.config.model_type,
        "dtype": prepared.dtype.torch_name,
        "quantization": prepared.quantization_words,
        "kv_cache_dtype": prepared.options.kv_cache_dtype,
        "layers": [_layer_dict(layer) for layer in plan.all_layers],
        "bytes_read": plan.read_nbytes,
        "bytes_kept": plan.kept_nbytes,
        "peak": {
            "weights": budget.kept_nbytes, "window": budget.window_nbytes, "conversion": budget.convert_nbytes,
            "kv_cache": budget.cache_nbytes, "packed": budget.packed_nbytes, "file": budget.file_nbytes,
            "ring": budget.ring_nbytes, "experts": budget.experts_nbytes, "total": budget.peak_nbytes,
            "host_total": budget.host_nbytes,
        },
        "limit_bytes": budget.limit_nbytes,
        "stream": _stream_dict(plan.stream),
        "ranks": [
            {"rank": one.rank, "bytes_read": one.read_nbytes, "bytes_kept": one.kept_nbytes, "experts": one.experts}
            for one in ranks
        ],
        "bytes_read_by_sharing": {
            way: [one.by_sharing[at] for one in ranks if one.by_sharing] for at, way in enumerate(READ_SHARING)
        },
        "read_strategy": prepared.reading.strategy,
        "read_strategy_reason": prepared.reading.reason,
        "dropped": dict(plan.dropped),
        "bytes_unused": dict(plan.unused),
        "warnings": list(prepared.warnings),
        "estimate_s": {str(rate): round(plan.soonest_nbytes / rate, 3) for rate in rates},
    }  # fmt: skip


def _layer_dict(layer: LayerPlan) -> dict[str, object]:
    return {
        "name": layer.name, "items": len(layer.items), "bytes_read": layer.read_nbytes, "bytes_kept": layer.kept_nbytes,
        "files": sorted({item.tensor.file.name for item in layer.items}),
    }  # fmt: skip


def _stream_dict(stream: StreamPlan | None) -> dict[str, object]:
    """What stays and what is streamed; {} where everything stays."""
    if stream is None:
        return {}
    return {
        "resident_layers": stream.layers(kept=True), "streamed_layers": stream.layers(kept=False),
        "pass_bytes": stream.pass_nbytes, "ring_bytes": stream.ring_nbytes, "hit_rate": round(stream.hit_rate, 4),
        "experts_bytes": stream.experts_nbytes, "host_bytes": stream.tier_nbytes,
        "staging_bytes": stream.staging_nbytes, "disk_bytes": stream.pass_disk_nbytes,
    }  # fmt: skip


def _stream_lines(stream: StreamPlan | None, rates: list[int]) -> Iterator[str]:
    """The same for people."""
    if stream is None:
        return
    streamed, resident = stream.layers(kept=False), stream.layers(kept=True)
    if streamed:
        times = ", ".join(f"{stream.pass_disk_nbytes / rate:.2f} s at {format_size(rate)}/s" for rate in rates)
        yield (
            f"streamed: {len(streamed)} layers, {format_size(stream.pass_nbytes)} in each pass through "
            f"{format_size(stream.ring_nbytes)}; {len(resident)} stay whole, {stream.hit_rate:.0%} of the bytes"
        )
        if stream.staging_nbytes:
            yield (
                f"streamed to the GPU: {format_size(stream.tier_nbytes)} stay on the host, "
                f"{format_size(stream.pass_disk_nbytes)} of each pass come from the disk through "
                f"{format_size(stream.staging_nbytes)}"
            )
        yield f"a pass not below {times}"
    if stream.experts_nbytes:
        yield f"experts: in {format_size(stream.experts_nbytes)}, as tokens are routed to them"


def _cache_words(prepared: Prepared) -> str:
    """How the cache is kept, where that was asked for."""
    name = prepared.options.kv_cache_dtype
    given = " with the checkpoint's scales" if prepared.kv_scales else ""
    return "" if name == "auto" else f" ({name}{given})"


def plan_lines(prepared: Prepared, rates: list[int], ranks: Sequence[RankShare]) -> list[str]:
    """The plan for people."""
    plan, budget = prepared.plan, prepared.budget
    width = max(12, *(len(layer.name) for layer in plan.all_layers))
    head = f"{'layer':<{width}} {'items':>6} {'read':>12} {'kept':>12}  files"
    rows = [_layer_line(layer, width=width) for layer in plan.all_layers]
    total = (
        f"{'total':<{width}} {len(plan.all_items):>6} "
        f"{format_size(plan.read_nbytes):>12} {format_size(plan.kept_nbytes):>12}"
    )
    window = "" if budget.is_on_gpu else f"window {format_size(budget.window_nbytes)}, "
    files = 0 if budget.is_on_gpu else budget.file_nbytes
    peak = (
        f"peak {format_size(budget.peak_nbytes)}: weights {format_size(budget.kept_nbytes)}, {window}"
        f"conversion {format_size(budget.convert_nbytes)}, KV cache "
        f"{format_size(budget.cache_nbytes)}{_cache_words(prepared)}"
        f"{f', packed copies {format_size(budget.packed_nbytes)}' if budget.packed_nbytes else ''}"
        f"{f', held by the reader {format_size(files)}' if files else ''}"
        f"{f', ring {format_size(budget.ring_nbytes)}' if budget.ring_nbytes else ''}"
        f"{f', experts {format_size(budget.experts_nbytes)}' if budget.experts_nbytes else ''}; limit "
        f"{format_size(budget.limit_nbytes) if budget.limit_nbytes else 'none'}"
    )
    times = ", ".join(f"{plan.soonest_nbytes / rate:.2f} s at {format_size(rate)}/s" for rate in rates)
    config = prepared.config
    title = (
        f"{prepared.checkpoint.name}: {config.model_type}, {config.num_layers} layers, {prepared.dtype.torch_name}, "
        f"quantization {prepared.quantization_words}, {len(plan.dropped)} tensors not used"
    )
    reading = f"read with {prepared.reading.strategy}: {prepared.reading.reason}"
    unused = (f"not used, {format_size(nbytes)}: {reason}" for reason, nbytes in plan.unused.items())
    soonest = f"first token not before {times} (bytes read over bandwidth{', without experts' if plan.experts else ''})"
    streamed = _stream_lines(plan.stream, rates)
    return [
        title, *_mesh_lines(prepared), head, *rows, total, *unused, peak, *_host_lines(budget), *streamed, reading,
        soonest, *_rank_lines(ranks),
    ]  # fmt: skip


def _host_lines(budget: Budget) -> Iterator[str]:
    """What the host's memory takes beside a GPU's."""
    if budget.is_on_gpu:
        yield (
            f"on the host {format_size(budget.host_nbytes)}: window {format_size(budget.window_nbytes)}, conversion "
            f"{format_size(budget.host_convert_nbytes)}"
            f"{f', held by the reader {format_size(budget.file_nbytes)}' if budget.file_nbytes else ''}"
            f"{f', staging {format_size(budget.staging_nbytes)}' if budget.staging_nbytes else ''}"
            f"{f', weights {format_size(budget.tier_nbytes)}' if budget.tier_nbytes else ''}"
        )


def _mesh_lines(prepared: Prepared) -> Iterator[str]:
    """Which rank the table is of, where there are several."""
    if not prepared.topology.is_single:
        yield f"{prepared.topology}: {prepared.topology.world} ranks, of which this is rank {prepared.topology.rank}"


def _rank_lines(ranks: Sequence[RankShare]) -> Iterator[str]:
    """A line for each rank, where there are several."""
    if len(ranks) == 1:
        return
    ways = ranks[0].by_sharing is not None
    other = f"{'apart':>12} {'shared':>12} " if ways else ""  # bytes read with --read-sharing none, and shared
    yield f"{'rank':<12} {'':>6} {'read':>12} {other}{'kept':>12}  experts of each sparse layer"
    for one in ranks:
        both = "".join(f"{format_size(nbytes):>12} " for nbytes in one.by_sharing or ())
        sizes = f"{format_size(one.read_nbytes):>12} {both}{format_size(one.kept_nbytes):>12}"
        yield f"{one.rank:<12} {'':>6} {sizes}  {_number_words(one.experts)}".rstrip()


def _number_words(numbers: Sequence[int]) -> str:
    """Numbers, runs of them as first-last: "0-3, 7"."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _layer_line(layer: LayerPlan, *, width: int) -> str:
    names = sorted({item.tensor.file.name for item in layer.items})
    files = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    sizes = f"{format_size(layer.read_nbytes):>12} {format_size(layer.kept_nbytes):>12}"
    return f"{layer.name:<{width}} {len(layer.items):>6} {sizes}  {files}"
