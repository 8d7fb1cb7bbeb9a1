"""`firstlayer inspect`: every parameter with what is stored for it and what feeds it; every tensor that is not used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from streaming import cli
from streaming.plan import LayerPlan, LoadItem
from streaming.prepare import Prepared, prepare
from streaming.sizes import format_size


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `inspect` takes."""
    parser.add_argument("--layer", metavar="NAME", help="one layer only: a number, embed or head")


def run(options: argparse.Namespace) -> int:
    """Print the listing."""
    prepared = prepare(options.model, cli.load_options(options))
    layers = chosen_layers(prepared, options.layer)
    if options.json:
        found = {"layers": [_layer_dict(layer) for layer in layers], "dropped": dict(prepared.plan.dropped)}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("\n".join(line for layer in layers for line in _layer_lines(layer)) + "\n")
        for name, reason in prepared.plan.dropped.items() if options.layer is None else ():
            sys.stdout.write(f"not used: {name} ({reason})\n")
    for warning in prepared.warnings:
        cli.warn(warning)
    return 0


def chosen_layers(prepared: Prepared, name: str | None) -> list[LayerPlan]:
    """All layers, or the one that is called so. Raises OptionError naming those there are."""
    from streaming.errors import OptionError

    if name is None:
        return list(prepared.plan.layers)
    wanted = f"layers.{name}" if name.isdecimal() else name
    found = [layer for layer in prepared.plan.layers if layer.name == wanted]
    if not found:
        known = ", ".join(layer.name for layer in prepared.plan.layers)
        raise OptionError(f"--layer {name!r} is not one of {known}")
    return found


def _layer_lines(layer: LayerPlan) -> Iterator[str]:
    yield f"{layer.name}: {format_size(layer.read_nbytes)} read, {format_size(layer.kept_nbytes)} kept"
    for param in layer.spec.params:
        stored = ", ".join(f"{name} {spec.dtype.value} {list(spec.shape)}" for name, spec in param.storage().items())
        yield f"  {param.name} [{param.scheme.name}] {stored}"
        for item in layer.items:
            if item.param is param and item.section_rows[0] == 0:
                yield f"    <- {_feed(item)}"


def _feed(item: LoadItem) -> str:
    tensor, section = item.tensor, item.param.sections[item.section]
    form = tensor.encoding.name if tensor.encoding else tensor.dtype.value
    part = f" rows {item.rows[0]} to {item.rows[0] + section.rows} as part {section.name!r}" if section.name else ""
    return f"{tensor.name} {form} {list(tensor.shape)}{part} ({tensor.file.name} at byte {tensor.offset:,})"


def _layer_dict(layer: LayerPlan) -> dict[str, object]:
    return {
        "name": layer.name,
        "params": [
            {
                "name": param.name, "scheme": param.scheme.name,
                "stored": {n: {"shape": list(s.shape), "dtype": s.dtype.value} for n, s in param.storage().items()},
                "from": [_feed(item) for item in layer.items if item.param is param and item.section_rows[0] == 0],
            }
            for param in layer.spec.params
        ],
    }  # fmt: skip
