"""`firstlayer quality`: what each scheme does to the weights, the logits and the perplexity of a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TextIO, cast

from quant.registry import scheme_names
from streaming import cli
from streaming.commands.run_files import check_file_option
from streaming.errors import OptionError
from streaming.llm import LoadKeywords
from streaming.progress import terminal_columns
from streaming.prompt import Prompt
from streaming.quality import DEFAULT_MAX_TOKENS, measure_quality
from streaming.quality_plot import check_plot_path, write_plot
from streaming.quality_report import LayerQuality, Quality, SchemeQuality
from streaming.sizes import format_size
from streaming.sources import parse_source

ALL = "all"
_LONGEST_TEXT = 16 << 20  # bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `quality` takes."""
    parser.set_defaults(quantization=ALL)
    several = parser._option_string_actions["--quantization"]
    several.metavar, several.help = "A,B,...", f"the schemes (default: all of them): {', '.join(scheme_names())}"
    add = parser.add_argument_group("measurement").add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to measure on (default: a passage of about 600 tokens)")
    add("--ids", metavar="1,2,3", help="token ids in place of a text")
    add("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N",
        help=f"of the text, at most (default {DEFAULT_MAX_TOKENS})")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg", help="write a picture: SQNR by layer, a line for each scheme")


def run(options: argparse.Namespace) -> int:
    """Measure and print. `--quantization` takes several schemes, separated by commas; by default all but "none"."""
    schemes = _schemes(options.quantization)
    if options.plot is not None:
        check_file_option("--plot", options.plot)
        check_plot_path(options.plot)
    text, name = _text(options)
    progress = Progress(sys.stderr, enabled=not options.quiet)
    try:
        found = measure_quality(
            options.model, schemes, text=text, text_name=name, max_tokens=options.max_tokens, progress=progress,
            **_keywords(options),
        )  # fmt: skip
    finally:
        progress.close()
    if options.plot is not None:
        write_plot(options.plot, found)
    if options.json:
        sys.stdout.write(json.dumps(found.as_dict()) + "\n")
    else:
        cli.write_lines(quality_lines(found))
    for warning in found.warnings:
        cli.warn(warning)
    return 0


def _schemes(asked: str) -> Sequence[str]:
    if asked == ALL:
        return [name for name in scheme_names() if name != "none"]
    return [name.strip() for name in asked.split(",")]


def _keywords(options: argparse.Namespace) -> LoadKeywords:
    """The options of loading, without the schemes; they are checked with each."""
    names = LoadKeywords.__annotations__.keys() - {"quantization", "sources"}
    given = {name: getattr(options, name) for name in names}
    sources = tuple(parse_source(source) for source in options.sources)
    return cast("LoadKeywords", given | {"sources": sources})


def _text(options: argparse.Namespace) -> tuple[Prompt | None, str | None]:
    """The text and what it is called; None for the built-in one."""
    path = options.text
    if options.ids is not None:
        if path is not None:
            raise OptionError("--text and --ids: one of them is needed, not both")
        return cli.parse_ids(options.ids), "the given ids"
    if path is None:
        return None, None
    if not path.is_file():
        raise OptionError(f"--text {path}: is {'a folder' if path.is_dir() else 'no file'}; a file of text is needed")
    if path.stat().st_size > _LONGEST_TEXT:
        raise OptionError(
            f"--text {path}: has {format_size(path.stat().st_size)}; at most {format_size(_LONGEST_TEXT)} are read"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"--text {path}: is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise OptionError(f"--text {path}: is empty; at least two tokens are needed")
    return text, str(path)


class Progress:
    """One line on a terminal, written over and over and gone in the end; nothing on anything else."""

    def __init__(self, stream: TextIO, *, enabled: bool) -> None:
        self._stream = stream
        self._drawing = enabled and stream.isatty()

    def __call__(self, layer: str, done: int, total: int) -> None:
        """`layer` begins, after `done` of `total`."""
        self._write(f"{done} of {total} layers measured  {layer}")

    def close(self) -> None:
        """Clear the line."""
        self._write("")
        self._drawing = False

    def _write(self, line: str) -> None:
        if not self._drawing:
            return
        try:
            self._stream.write(f"\r\x1b[K{line[: terminal_columns(self._stream) - 1]}")
            self._stream.flush()
        except (OSError, ValueError):  # whoever watched has gone
            self._drawing = False


# --- for people -----------------------------------------------------------------------------------------------------


def quality_lines(found: Quality) -> Iterator[str]:
    """The result as tables: the totals, the weights by layer, the outputs by layer."""
    left_out = f" (the first of {found.tokens + found.tokens_left_out:,})" if found.tokens_left_out else ""
    runs = f" in {found.runs} runs" if found.runs > 1 else ""
    yield (
        f"{found.model}: {found.model_type}, {found.dtype}; {found.tokens:,} tokens{left_out} of {found.text}{runs}, "
        f"{found.positions:,} predicted"
    )
    width = max(len("scheme"), *(len(scheme.quantization) for scheme in found.schemes))
    heads = f"{'kept':>10} {'weights dB':>10} {'KL nats':>10} {'top-1':>8} {'perplexity':>11} {'/ wide':>7}"
    yield f"{'scheme':<{width}} {heads}"
    yield f"{'wide':<{width}} {format_size(found.kept_nbytes):>10} {'':>10} {'':>10} {'':>8} {found.perplexity:>11.3f}"
    for scheme in found.schemes:
        yield _total_line(scheme, found, width)
    yield from _by_layer("weights", found, attrgetter("weights_db"))
    yield from _by_layer("outputs", found, attrgetter("outputs_db"))


def _total_line(scheme: SchemeQuality, found: Quality, width: int) -> str:
    kept, against = format_size(scheme.kept_nbytes), scheme.perplexity / found.perplexity
    return (
        f"{scheme.quantization:<{width}} {kept:>10} {_decibels(scheme.sqnr_db):>10} {scheme.kl_divergence:>10.6f} "
        f"{scheme.top1_agreement:>8.2%} {scheme.perplexity:>11.3f} {against:>7.4f}"
    )


def _by_layer(what: str, found: Quality, measure: Callable[[LayerQuality], float | None]) -> Iterator[str]:
    """A line for each layer and a column for each scheme."""
    columns = [{layer.name: measure(layer) for layer in scheme.layers} for scheme in found.schemes]
    names = list(dict.fromkeys(name for column in columns for name, value in column.items() if value is not None))
    if not names:
        return
    yield ""
    widths = [max(7, len(scheme.quantization)) for scheme in found.schemes]
    heads = (f"{scheme.quantization:>{width}}" for scheme, width in zip(found.schemes, widths, strict=True))
    yield " ".join((f"{f'{what}, dB':<12}", *heads))
    for name in names:
        cells = (f"{_decibels(column.get(name)):>{width}}" for column, width in zip(columns, widths, strict=True))
        yield " ".join((f"{name:<12}", *cells))


def _decibels(value: float | None) -> str:
    """Two decimals; "inf" where nothing differs, "-" where nothing is quantized."""
    return "-" if value is None else f"{value:.2f}"
