"""`firstlayer inspect`: every parameter with what is stored for it and what feeds it; every tensor that is not used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping

from layers.architecture import EMBED_WEIGHT
from streaming import cli
from streaming.errors import OptionError
from streaming.item_words import Feed, feeds, part_words, place_words, slice_words, source_words
from streaming.plan import LayerPlan
from streaming.prepare import Prepared, prepare
from streaming.sizes import format_size

PARTS = ("language", "encoder")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `inspect` takes."""
    parser.add_argument("--layer", metavar="NAME", help="one layer only: a number, embed or head")
    parser.add_argument("--files", action="store_true", help="what each file holds, whatever the architecture")
    parser.add_argument("--part", choices=PARTS, default="language", metavar="PART",
        help="of a multimodal model: language (the default) or encoder, which is listed and not run here")  # fmt: skip
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="of several ranks, the one to show (0)")


def run(options: argparse.Namespace) -> int:
    """Print the listing."""
    if options.part == "encoder":
        from streaming.commands.encoder_listing import list_encoder

        return list_encoder(options)
    if options.files:
        from streaming.commands.file_listing import list_files

        if options.layer is not None:
            raise OptionError(f"--layer {options.layer} goes with the listing by layer, not with --files")
        return list_files(options)
    load = cli.load_options(options)
    _check_rank(options.rank, load.topology().world)
    prepared = prepare(options.model, load, rank=options.rank)
    layers, passing = chosen_layers(prepared, options.layer), passing_params(prepared)
    if options.json:
        found = {
            "rank": prepared.topology.rank, "ranks": prepared.topology.world,
            "layers": [_layer_dict(layer, passing) for layer in layers], "dropped": dict(prepared.plan.dropped),
            "bytes_unused": dict(prepared.plan.unused),
        }  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        if not prepared.topology.is_single:
            cli.write_lines([f"rank {prepared.topology.rank} of {prepared.topology.world} ({prepared.topology})"])
        cli.write_lines(line for layer in layers for line in _layer_lines(layer, passing))
        dropped = prepared.plan.dropped if options.layer is None else {}
        cli.write_lines(f"not used: {name} ({reason})" for name, reason in dropped.items())
    for warning in prepared.warnings:
        cli.warn(warning)
    return 0


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        last = "is the only rank" if world == 1 else f"to {world - 1} are the ranks that the options ask for"
        raise OptionError(f"--rank {rank}: 0 {last}")


def chosen_layers(prepared: Prepared, name: str | None) -> list[LayerPlan]:
    """All layers, or the one that is called so, whole, whatever of them is streamed. Raises OptionError naming those
    there are."""
    plan = prepared.whole or prepared.plan
    if name is None:
        return list(plan.all_layers)
    wanted = f"layers.{name}" if name.isdecimal() else name
    found = [layer for layer in plan.all_layers if layer.name == wanted]
    if not found:
        known = ", ".join(layer.name for layer in plan.all_layers)
        raise OptionError(f"--layer {name!r} is not one of {known}")
    return found


def passing_params(prepared: Prepared) -> dict[str, str]:
    """Parameters that are not in memory from the load on, under the limit that was given, and how they come."""
    plan = prepared.plan
    if plan.stream is None:
        return {}
    here = {param.name for layer in plan.layers for param in layer.spec.params}
    experts = {param.name for one in plan.experts for param in one.plan.spec.params}
    every = (param.name for layer in (prepared.whole or plan).all_layers for param in layer.spec.params)
    words = {name: "experts come when they are routed to" if name in experts else "streamed" for name in every}
    words |= {EMBED_WEIGHT: "rows are fetched"} if EMBED_WEIGHT not in plan.stream.params else {}
    return {name: how for name, how in words.items() if name not in here}


def _layer_lines(layer: LayerPlan, passing: Mapping[str, str]) -> Iterator[str]:
    yield f"{layer.name}: {format_size(layer.read_nbytes)} read, {format_size(layer.kept_nbytes)} kept"
    for param in layer.spec.params:
        stored = ", ".join(f"{name} {spec.dtype.value} {list(spec.shape)}" for name, spec in param.storage().items())
        how = f" ({passing[param.name]})" if param.name in passing else ""
        yield f"  {param.name} [{param.scheme.name}] {stored}{how}"
        for feed in feeds(layer, param.name):
            yield f"    <- {_feed(feed)}"


def _feed(feed: Feed) -> str:
    return f"{source_words(feed.item)}{_part(feed)} ({place_words(feed.item)})"


def _part(feed: Feed) -> str:
    """What of the tensor is taken, where that is not all for the whole parameter."""
    item = feed.item
    if item.stored is not None:
        return f" as stored {item.stored}"
    part = part_words(item)
    if not (part or item.param.cut):
        return ""
    return f" {slice_words(item, feed.rows)}{f' as part {part}' if part else ''}"


def _layer_dict(layer: LayerPlan, passing: Mapping[str, str]) -> dict[str, object]:
    return {
        "name": layer.name,
        "params": [
            {
                "name": param.name, "scheme": param.scheme.name, "passing": passing.get(param.name, ""),
                "stored": {n: {"shape": list(s.shape), "dtype": s.dtype.value} for n, s in param.storage().items()},
                "shape": list(param.shape), "parts": {s.name: s.rows for s in param.sections if s.name},
                "from": [_feed(feed) for feed in feeds(layer, param.name)],
            }
            for param in layer.spec.params
        ],
    }  # fmt: skip
