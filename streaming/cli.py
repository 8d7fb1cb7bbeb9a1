"""The command line: options, one line for a mistake, exit statuses. What a command does is in `streaming.commands`.

Exit status: 0 done; 2 a wrong option; 1 anything else, with one clear line on stderr and no traceback (--debug for it).
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from layers.errors import LogitsError, ModelConfigError, WeightError
from layers.kv_forms import CACHE_DTYPES
from layers.topology import PLACEMENTS
from quant.errors import QuantError
from quant.registry import scheme_names
from streaming.errors import OptionError, StreamingError
from streaming.options import ACTIVATION_DTYPES, DTYPES, KERNELS, READERS, LoadOptions
from streaming.read_strategy import STRATEGIES
from streaming.sources import parse_source

COMMANDS = {
    "generate": "stream a model in and print its answer as it comes",
    "chat": "the same, as a conversation; you can type while it loads",
    "plan": "the dry run: bytes read and kept per layer, every problem of the checkpoint, an estimate of the time",
    "inspect": "tensors, shapes, dtypes, and which parameter each one feeds",
    "logits": "float32 logits of every position, into a .npy file",
    "verify": "streamed equals resident: every stored tensor, every layer's output, the logits",
    "save-shards": "load once and write what is stored; --load-format sharded_state reads it straight into place",
    "quantize": "write a quantized checkpoint that others read: Hugging Face's layout, compressed-tensors",
    "bench": "cold and warm time to first token against the measured floor",
    "quality": "what each scheme does to weights, logits and perplexity, on a text",
    "download": "fetch a model into the hub's cache, so that a load finds it there",
}
OWN_OPTIONS = ("download",)  # commands that load nothing
_LONGEST_MESSAGE = 8000  # characters
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\n(?!  )")


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, in place of the usage text and the line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What is not known is the mistake of the command that it stands behind, not of the whole program."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._meant(rest)}")
        return found, rest

    def _meant(self, words: Sequence[str]) -> str:
        from difflib import get_close_matches  # for mistakes alone

        option = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        near = get_close_matches(option, self._option_string_actions, n=1, cutoff=0.8)
        return f"; is {near[0]} meant?" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.HelpFormatter):
    """As wide as the terminal. argparse makes one for every option, and would import shutil to know the width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    """COLUMNS, else the terminal's, else 80."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def run(arguments: Sequence[str]) -> int:
    """Parse and carry out; the exit status."""
    options = argparse.Namespace(command="", debug=False)
    try:
        command = next((word for word in arguments if not word.startswith("-")), None)
        options = make_parser(command if command in COMMANDS else None).parse_args(arguments)
        set_up_logging()
        if options.command not in OWN_OPTIONS:
            if (followed := _follow(options)) is not None:
                return followed
            _fetch_first(options)
        status: int = _module_of(options.command).run(options)
        return status
    except KeyboardInterrupt:
        return _fail("interrupted", options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    except OptionError as error:
        return _fail(str(error), options, status=2)
    except (StreamingError, ModelConfigError, WeightError, LogitsError, QuantError, MemoryError, OSError) as error:
        return _fail(_one_cause(error), options)


def _one_cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        from streaming.file_faults import descriptor_limit

        return descriptor_limit()  # which file came last says nothing
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input or output'}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(message: str, options: argparse.Namespace, *, status: int = 1) -> int:
    if options.debug:
        import traceback

        traceback.print_exc()
    sys.stderr.write(printable(f"{f'firstlayer {options.command}'.rstrip()}: error: {message}") + "\n")
    return status


def leaver(options: argparse.Namespace) -> Callable[[], None]:
    """What an interrupt does while torch is imported, when nothing is open yet that could be lost: the process ends."""

    def leave() -> None:
        sys.stdout.flush()
        _fail("interrupted", options)
        sys.stderr.flush()
        os._exit(1)  # the reader's process notices that its pipe has ended

    return leave


def set_up_logging() -> None:
    """FIRSTLAYER_LOG=debug logs each tensor; the default shows warnings only."""
    level = os.environ.get("FIRSTLAYER_LOG", "warning").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.WARNING), format="%(levelname)s %(name)s: %(message)s")
    if level not in known:
        warn(f"FIRSTLAYER_LOG={level.lower()} is no level; known: {', '.join(sorted(known)).lower()}")
    warnings.simplefilter("ignore")  # those of libraries, about their own future


def warn(text: str) -> None:
    """A warning for the user."""
    sys.stderr.write(printable(f"warning: {text}") + "\n")


def printable(text: str, *, longest: int | None = _LONGEST_MESSAGE) -> str:
    """The text as a terminal may show it: a stranger's file chose some of its words, so control characters, lone
    surrogates and line ends (but for those before indented lines) are spelled out, and what is very long is cut."""
    shown = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text[:longest])
    return f"{shown}... ({len(text) - longest:,} more characters)" if longest and len(text) > longest else shown


def write_lines(lines: Iterable[str]) -> None:
    """Lines for people on stdout."""
    sys.stdout.write("".join(f"{printable(line, longest=None)}\n" for line in lines))


# --- options --------------------------------------------------------------------------------------------------------


def make_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Every command; the options of the `chosen` one only (None: of all), since each brings modules to import."""
    parser = _Parser(
        prog="firstlayer", description="Streams a language model in and answers meanwhile.", formatter_class=_Formatter
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(
            name, help=text, description=description, allow_abbrev=False, formatter_class=_Formatter
        )
        if chosen not in (None, name):
            continue
        if name not in OWN_OPTIONS:
            add_load_options(command)
        _module_of(name).add_options(command)
        add_output_options(command)
    return parser


def _module_of(command: str) -> Any:
    return import_module(f"streaming.commands.{command.replace('-', '_')}")


def _fetch_first(options: argparse.Namespace) -> None:
    """A hub id that is not here yet, with its progress shown; nothing where the model is a path."""
    if not os.path.lexists(options.model) and "/" in options.model:
        from streaming.commands.transfer_line import fetch_first

        fetch_first(options)


def _follow(options: argparse.Namespace) -> int | None:
    """The exit status of a rank that follows another one; None for the process that does what the command says."""
    if "RANK" not in os.environ and not _several_ranks(options):
        return None
    from streaming.ranks.command_line import follower_status

    return follower_status(options)


def _several_ranks(options: argparse.Namespace) -> bool:
    return bool(
        options.tensor_parallel_size != 1
        or options.expert_parallel_size is not None
        or options.pipeline_parallel_size != 1
        or options.expert_map is not None
    )


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: the look-up imports an e-mail parser."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help=rest.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("firstlayer")
        except PackageNotFoundError:
            found = "(not installed)"
        sys.stdout.write(f"firstlayer {found}\n")
        parser.exit(0)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """The options of LoadOptions, shared by all commands."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a weights file, a hub id owner/name[@revision], an address, or 'demo'"
    )
    add = parser.add_argument_group("loading").add_argument
    add("--quantization", default="none", metavar="SCHEME",
        help=f"quantize while loading: {', '.join(scheme_names())}; int4_per_group[:32|64|128][:asym]")  # fmt: skip
    add("--quantize-head", action="store_true", help="the output projection too")
    add("--quantization-config", metavar="JSON", help="a scheme per pattern of module names: JSON, or a file of it")
    add("--scale-percentile", type=float, metavar="P", help="scales from this percentile of magnitudes, e.g. 99.9")
    add("--dtype", default="auto", metavar="DTYPE", help=f"of wide weights and activations: {', '.join(DTYPES)}")
    add("--device", default="cpu", help="cpu or cuda[:index]")
    add("--memory", metavar="SIZE", help="limit for weights, window and caches, e.g. 6GiB; refused when too small")
    add("--gpu-memory", metavar="SIZE", help="limit of the GPU's memory, or auto (--memory where it is not given)")
    add("--host-memory", metavar="SIZE", help="limit of the host's beside it, or auto; on the CPU as --memory")
    add("--window", metavar="SIZE", help="bytes read ahead of the quantizer, e.g. 128MiB")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    add("--kernels", default="default", metavar="MODE", help=f"{', '.join(KERNELS)}; fast has other bits")
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help=f"of keys and values: {', '.join(CACHE_DTYPES)}")
    add("--activation-dtype", default="auto", metavar="DTYPE", help="of what linear layers multiply: "
        f"{', '.join(ACTIVATION_DTYPES)} (a scale a token)")  # fmt: skip
    add("--threads", type=int, metavar="N", help="compute threads once loaded (default: all cores)")
    add("--load-format", default="auto", metavar="FORMAT", help="auto, hf, safetensors, pt, npcache, gguf, mistral, "
        "sharded_state, dummy, remote, tensorizer, runai_streamer, fastsafetensors or instanttensor")  # fmt: skip
    add("--safetensors-load-strategy", metavar="NAME", help=f"how files are read: {', '.join(STRATEGIES)}")
    add("--safetensors-prefetch-num-threads", type=int, metavar="N", help="of prefetch (8)")
    add("--safetensors-prefetch-block-size", metavar="SIZE", help="of prefetch (16MiB)")
    add("--model-loader-extra-config", metavar="JSON", help="enable_multithread_load, num_threads and others")
    add("--reader", default="process", metavar="KIND", help=f"who reads: {', '.join(READERS)}")
    add("--moe-load", default="layers", metavar="ORDER", help="of experts: layers, or routed_first: those that tokens "
        "are routed to, when they are; the others once the first token is out")  # fmt: skip
    add("--unwrap-names", action="store_true", help="take away what a training wrapper put before tensor names")
    add("--check-weights", action="store_true", help="non-finite or all-zero weights are an error, not a warning")
    add("--revision", metavar="REV", help="of a hub id")
    add(
        "--source", action="append", default=[], dest="sources", metavar="SOURCE",
        help="more weights: PATH[@REV][=PREFIX[,PATTERN...]], PREFIX put before its names; may be given several times",
    )  # fmt: skip
    add("--remote-cache", metavar="DIR", help="keep the files of a remote model there, for the next load")
    add("--cache-dir", metavar="DIR", help="where quantized weights of models larger than --memory are kept")
    add("--cache-size", metavar="SIZE", help="of all models there; 0 keeps none (half of what is free, at most 64GiB)")
    add("--seed", type=int, metavar="N", help="of sampling (a run can be repeated), and of made-up weights")
    add_rank_options(parser)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options of LoadOptions that say how many ranks share the work."""
    add = parser.add_argument_group("ranks").add_argument
    add("--tensor-parallel-size", type=int, default=1, metavar="T", help="ranks that share each dense layer (1)")
    add("--expert-parallel-size", type=int, metavar="E", help="ranks that share the experts; a multiple of T")
    add("--enable-expert-parallel", action="store_true", help="E = T when no E is given: experts whole, not cut")
    add("--pipeline-parallel-size", type=int, default=1, metavar="P", help="stages that share the layers (1)")
    add("--expert-placement", default="linear", metavar="NAME", help=f"of experts on ranks: {', '.join(PLACEMENTS)}")
    add("--expert-map", metavar="JSON", help="the experts of each rank, [[0,1],[2,3,0]]: JSON, or a file of it")
    add(
        "--read-sharing",
        default="none",
        metavar="WAY",
        help="shared: one rank reads what several want and sends it to them; none: each reads it (none)",
    )
    add("--rank-timeout", type=float, default=60.0, metavar="SECONDS",
        help="a rank that keeps the others waiting longer ends the run (60); must exceed a step")  # fmt: skip


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """What every command has."""
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--quiet", action="store_true", help="no progress, no summary")
    add("--debug", action="store_true", help="tracebacks")


def load_options(options: argparse.Namespace) -> LoadOptions:
    """What the command line says of loading. Raises OptionError."""
    given = {name: getattr(options, name) for name in LoadOptions.__dataclass_fields__}
    return LoadOptions(**given | {"sources": tuple(parse_source(text) for text in options.sources)})


def parse_ids(text: str) -> list[int]:
    """Token ids from "1,2,3"."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--ids {text!r}: token ids separated by commas are needed, such as 1,2,3") from None
    return ids
