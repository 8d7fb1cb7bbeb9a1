"""`firstlayer verify`: streamed equals resident, to the bit: stored tensors, every layer's output, the logits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from streaming import cli
from streaming.commands.generate import make_progress, progress_hooks
from streaming.commands.prompt_ids import seeded_ids
from streaming.errors import OptionError
from streaming.hooks import Hooks
from streaming.llm import LLM
from streaming.prepare import Prepared, prepare
from streaming.read_strategy import BACK_ENDS

if TYPE_CHECKING:
    import torch

    from layers.decoder import DecoderModel
    from streaming.runner import ModelRunner


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `verify` takes."""
    parser.add_argument("--ids", metavar="1,2,3", help="the prompt (default: 32 ids drawn from a fixed seed)")


@dataclass
class Report:
    """What was compared, and what differs."""

    stored: int = 0
    outputs: int = 0
    logits: int = 0
    differences: list[str] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """Compare; 0 when everything is equal."""
    prepared = prepare(options.model, cli.load_options(options))
    if prepared.checkpoint.address is not None:
        raise OptionError(f"verify reads local files a second time; {prepared.checkpoint.name} has none")
    if prepared.options.sources:
        raise OptionError(f"verify reads one model's own files; --source {prepared.options.sources[0].path} is another")
    ids = cli.parse_ids(options.ids) if options.ids else seeded_ids(32, prepared.config.vocab_size)
    report = compare(prepared, ids, options)
    _check_sums(report, prepared)
    found = {
        "equal": not report.differences, "quantization": prepared.quantization_words,
        "stored_tensors": report.stored, "layer_outputs": report.outputs, "logits": report.logits,
        "differences": report.differences,
    }  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        compared = f"{report.stored} stored tensors, {report.outputs} layer outputs, {report.logits} logits"
        verdict = "equal to the bit" if not report.differences else f"{len(report.differences)} differences"
        lines = [f"{prepared.quantization_words}: {compared}: {verdict}", *report.differences[:20]]
        sys.stdout.write("\n".join(lines) + "\n")
    return 1 if report.differences else 0


def compare(prepared: Prepared, ids: list[int], options: argparse.Namespace) -> Report:
    """Stream the model in while it computes `ids`, then fill a second one eagerly and hold both side by side."""
    outputs: dict[str, torch.Tensor] = {}
    progress = make_progress(options, prepared)
    drawn = progress_hooks(progress)
    hooks = Hooks(warn=drawn.warn, on_stage=drawn.on_stage, layer_outputs=lambda n, h: outputs.update({n: h.clone()}))
    as_in_files = replace(prepared, post_process=False)  # what is compared is what files hold
    with LLM.start(as_in_files, hooks=hooks) as llm:
        try:
            logits = llm.logits(ids)  # while it loads
            llm.wait_loaded()
        finally:
            progress.close()
        first = dict(outputs)
        again = llm.logits(ids)  # and once more, resident, on all threads
        return _compare_all(prepared, ids, llm, (first, logits), (dict(outputs), again))


def _check_sums(report: Report, prepared: Prepared) -> None:
    """What save-shards wrote must still be what it wrote."""
    if (saved := prepared.checkpoint.saved) is not None:
        from streaming.sharded import checksum_faults

        names = [file.name for file in prepared.checkpoint.files]
        report.differences += checksum_faults(prepared.checkpoint.root, saved, names=names)


_Run = tuple[dict[str, "torch.Tensor"], "torch.Tensor"]


def _compare_all(prepared: Prepared, ids: list[int], llm: LLM, while_loading: _Run, resident: _Run) -> Report:
    from quant.kernels import Kernels
    from streaming.commands.resident import run_resident

    device = prepared.options.device
    model = _resident(prepared)
    kernels = Kernels.detect(mode=llm.kernels.mode)
    outputs, logits = run_resident(
        model, ids, kernels, dtype=prepared.dtype, device=device, cache_dtype=prepared.options.kv_cache_dtype,
        scales=prepared.kv_scales, int8_activations=prepared.options.activation_dtype == "int8",
    )  # fmt: skip
    report = Report()
    report.stored = llm.call(lambda runner, stop: _compare_stored(report, runner, stop, model))
    for label, (seen, found) in (("while loading", while_loading), ("once resident", resident)):
        for name, expected in outputs.items():
            report.outputs += 1
            _compare(report, f"{name}'s output {label}", seen[name], expected)
        report.logits += found.numel()
        _compare(report, f"logits {label}", found, logits)
    return report


def _resident(prepared: Prepared) -> DecoderModel:
    checkpoint, config, specs = prepared.checkpoint, prepared.config, prepared.specs
    device, asked = prepared.options.device, prepared.options.load_format
    if checkpoint.saved is not None:
        from streaming.commands.resident_saved import saved_model

        return saved_model(checkpoint.root, config, specs, device=device)
    if checkpoint.format == "dummy":
        from streaming.commands.resident_dummy import dummy_model

        return dummy_model(checkpoint, config, specs, seed=prepared.options.seed or 0, device=device)
    from streaming.commands.resident import resident_model

    return resident_model(
        checkpoint.root, config, specs, device=device, load_format="auto" if asked in BACK_ENDS else asked,
        unused=prepared.plan.dropped, unwrapped=prepared.plan.unwrapped,
    )  # fmt: skip


def _compare_stored(report: Report, runner: ModelRunner, stop: Callable[[], None], resident: DecoderModel) -> int:
    """How many there are."""
    from streaming.commands.streamed_stored import look_at_streamed, passing_names

    names: list[str] = []

    def look(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        names.append(name)
        _compare(report, name, found, expected)

    found, passing = dict(runner.model.named_parameters()), passing_names(runner, resident)
    for name, expected in resident.named_parameters():
        if name not in passing:
            look(name, found[name], expected)
    look_at_streamed(runner, stop, resident, look)
    return len(names)


def _compare(report: Report, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    if found.shape != expected.shape or found.dtype != expected.dtype:
        report.differences.append(f"{what}: {list(found.shape)} {found.dtype}, not {list(expected.shape)}")
        return
    same = _bits(found) == _bits(expected)
    if not bool(torch.all(same)):
        report.differences.append(f"{what}: {int((~same).sum())} of {same.numel()} bytes differ")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)
