"""Check on a CUDA GPU what only a GPU can show: one JSON object on stdout, a table on stderr, in a few minutes.

usage (from the repository's root): python -m examples.gpu_check [--device cuda:0] [--folder DIR]

Exit status: 0 every claim holds, 1 one does not, 2 there is no such GPU. DIR needs 2.5 GB for a random checkpoint of
Llama-3.2-1B's shapes (by default a temporary folder, which is removed).
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from examples.gpu_kernels import Timed, kernel_table, time_kernels
from examples.gpu_measure import ONE_BILLION, Gpu, copy_rate, write_random_checkpoint
from examples.gpu_streaming import StreamedRun, run_streamed
from examples.write_tiny_model import ARCHITECTURES, TinyModel, write_tiny_model
from layers.kv_cache import kv_cache_nbytes
from quant.registry import scheme_names
from streaming import LLM, Hooks, LoadOptions, Prepared, SamplingParams, StreamedModel, Summary, open_llm
from streaming.cli import run as run_command
from streaming.commands.prompt_ids import seeded_ids
from streaming.device import cuda_device
from streaming.errors import OptionError
from streaming.floor import read_floor_s, warm
from streaming.prepare import prepare
from streaming.reader import Reader
from streaming.reader_choice import start_reader
from streaming.trace import Span

PACKAGES = {
    "runai_streamer": "runai_model_streamer", "fastsafetensors": "fastsafetensors", "instanttensor": "instanttensor",
}  # load format -> the module of its package  # fmt: skip
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
MEMORY_SLACK = 1.1  # of what the plan knows: kept weights, KV cache and the window (for items on their way)
QUANTIZED_SHARE = 0.8  # of the wide weights: what a quantized load may take at its peak
STREAM_LIMIT = 1.3  # times the bytes of a token over the copy rate
SPEED_LIMIT = 4.0  # times the slower of reading and copying: a guard against a broken pipeline, not an aim


@dataclass(frozen=True)
class Claim:
    """One thing that should be so, whether it is, and the figures."""

    name: str
    holds: bool
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One load with a short answer. `device_peak` is the device's memory; the other sizes are the plan's."""

    summary: Summary
    spans: tuple[Span, ...]
    kept: int
    wide: int
    window: int
    cache: int
    device_peak: int


# --- streamed equals resident


def check_equal(folders: Sequence[Path], device: str, scheme: str) -> Claim:
    """`firstlayer verify` for each folder: stored tensors, every layer's output and logits are equal to the bit."""
    wrong: list[str] = []
    compared = 0
    for folder in folders:
        status, out, err = _command("verify", str(folder), "--quantization", scheme, "--device", device, "--json")
        found: dict[str, Any] = json.loads(out or "{}")
        compared += found.get("stored_tensors", 0)
        if status:
            wrong += [f"{folder.name}: {line}" for line in found.get("differences", [err.strip()])[:3]]
    models = ", ".join(folder.name for folder in folders)
    return Claim(f"equal {scheme}: {models}", not wrong, {"stored_tensors": compared, "differences": wrong})


def check_load_format(folder: Path, gpu: Gpu, load_format: str) -> Claim:
    """The logits of a load by way of the format's own package are those of a plain load, to the bit."""
    name = f"equal logits, load format {load_format}"
    if find_spec(PACKAGES[load_format]) is None:
        return Claim(f"{name}: NOT RUN", True, {"package": f"{PACKAGES[load_format]} is not installed"})
    expected = _logits(folder, gpu, "auto")
    found = _logits(folder, gpu, load_format)
    return Claim(name, torch.equal(found, expected), {"largest_difference": float((found - expected).abs().max())})


def _logits(folder: Path, gpu: Gpu, load_format: str) -> torch.Tensor:
    gc.collect()
    prepared = prepare(str(folder), LoadOptions(device=gpu.name, load_format=load_format))
    with LLM.start(prepared) as llm:
        found: torch.Tensor = llm.logits(seeded_ids(PROMPT_TOKENS, prepared.config.vocab_size))
        llm.wait_loaded()
        return found.cpu()


def _command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run_command(arguments)
    gc.collect()  # two models have been in memory; the next check counts from none
    return status, out.getvalue(), err.getvalue()


# --- one load, judged


def load_and_answer(folder: Path, gpu: Gpu, scheme: str) -> Run:
    """Stream the model in while it answers a prompt."""
    gc.collect()
    prepared = prepare(str(folder), LoadOptions(device=gpu.name, quantization=scheme))
    config, params = prepared.config, SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    gpu.reset_peak()
    with LLM.start(prepared) as llm:
        llm.complete([seeded_ids(PROMPT_TOKENS, config.vocab_size)], params)
        llm.wait_loaded()
        summary, spans = llm.stats(), llm.tracer.spans()
    return Run(
        summary, spans,
        kept=prepared.plan.kept_nbytes,
        wide=sum(param.wide_nbytes for spec in prepared.specs for param in spec.params),
        window=prepared.read_plan.window_nbytes,
        cache=kv_cache_nbytes(config, max_tokens=PROMPT_TOKENS + ANSWER_TOKENS, dtype=prepared.dtype),
        device_peak=gpu.peak_nbytes(),
    )  # fmt: skip


def check_overlap(folder: Path, gpu: Gpu) -> Claim:
    """The forward pass begins before the last byte is read."""
    return judge_overlap(load_and_answer(folder, gpu, "none"))


def judge_overlap(run: Run) -> Claim:
    """The forward pass begins before the last byte is read."""
    first_forward = min(span.start_s for span in run.spans if span.lane == "forward")
    last_read = max(span.end_s for span in run.spans if span.lane == "read" and span.name != "embedding rows")
    begun, done = run.summary.first_forward_s, run.summary.load_done_s
    earlier = begun is not None and done is not None and begun < done
    facts = {"forward_begins_before_last_read_s": round(last_read - first_forward, 4)}
    return Claim("forward begins while reading", earlier and first_forward < last_read, facts)


def check_memory(folder: Path, gpu: Gpu, scheme: str) -> Claim:
    """The device holds what the plan says, and a quantized load never the wide model."""
    return judge_memory(load_and_answer(folder, gpu, scheme), scheme)


def judge_memory(run: Run, scheme: str) -> Claim:
    """The device holds what the plan says, and a quantized load never the wide model."""
    limit = int(MEMORY_SLACK * (run.kept + run.cache + run.window))
    if scheme != "none":
        limit = min(limit, int(QUANTIZED_SHARE * run.wide))
    facts = {"peak_bytes": run.device_peak, "limit_bytes": limit, "kept_bytes": run.kept, "wide_bytes": run.wide}
    return Claim(f"device memory {scheme}", run.device_peak <= limit, facts)


def check_speed(folder: Path, gpu: Gpu, *, rounds: int = 3) -> Claim:
    """Time to first token, files in the page cache, against the slower of reading and copying."""
    prepared = prepare(str(folder), LoadOptions(device=gpu.name))
    files = [file for file in prepared.checkpoint.files if isinstance(file, Path)]
    warm(files)
    nbytes = prepared.plan.read_nbytes
    copy_s = nbytes / copy_rate(gpu, [item.nbytes for item in prepared.plan.items])
    measured = [(read_floor_s(files), load_and_answer(folder, gpu, "none").summary.from_load_s) for _ in range(rounds)]
    read_s = sorted(read for read, _ in measured)[rounds // 2]
    first_token_s = sorted(seconds or 0.0 for _, seconds in measured)[rounds // 2]
    return judge_speed(nbytes=nbytes, read_s=read_s, copy_s=copy_s, first_token_s=first_token_s)


def judge_speed(*, nbytes: int, read_s: float, copy_s: float, first_token_s: float) -> Claim:
    """The verdict on measured seconds."""
    ratio = first_token_s / max(read_s, copy_s)
    facts = {
        "bytes": nbytes, "read_bytes_per_s": round(nbytes / read_s), "copy_bytes_per_s": round(nbytes / copy_s),
        "read_s": round(read_s, 4), "copy_s": round(copy_s, 4), "from_load_s": round(first_token_s, 4),
        "ratio": round(ratio, 2),
    }  # fmt: skip
    return Claim("time to first token", 0.0 < ratio <= SPEED_LIMIT, facts)


# --- the host does not wait


class NoWaits:
    """A hook for layer outputs: once armed, a wait for the device between the first layer and the last is an error."""

    def __init__(self, gpu: Gpu, last: str) -> None:
        self.gpu, self.last, self.armed, self.watched = gpu, last, False, 0

    def __call__(self, layer: str, _hidden: torch.Tensor) -> None:
        """Called in the forward thread behind each layer."""
        if self.armed and layer in ("layers.0", self.last):
            self.gpu.forbid_waits(layer != self.last)
        self.watched += self.armed and layer != "layers.0"


def check_no_waits(folder: Path, gpu: Gpu, scheme: str) -> Claim:
    """Neither a prefill nor a decode step of the loaded model waits for the device within its layers."""
    prepared = prepare(str(folder), LoadOptions(device=gpu.name, quantization=scheme))
    hook = NoWaits(gpu, f"layers.{prepared.config.num_layers - 1}")
    prompt, wrong = seeded_ids(PROMPT_TOKENS, prepared.config.vocab_size), ""
    with LLM.start(prepared, hooks=Hooks(layer_outputs=hook)) as llm:
        llm.wait_loaded()
        llm.logits(prompt)
        hook.armed = True
        try:
            llm.complete([prompt], SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True))
        except RuntimeError as error:  # what torch raises for a forbidden wait
            wrong = str(error)
        finally:
            gpu.forbid_waits(False)
    holds = not wrong and hook.watched == ANSWER_TOKENS * (prepared.config.num_layers - 1)
    return Claim(f"no wait within layers {scheme}", holds, {"layers_watched": hook.watched, "error": wrong})


# --- what is page-locked, and what is left


def check_close(folder: Path, gpu: Gpu) -> Claim:
    """The window alone is page-locked; whether it is closed loaded or halfway, nothing stays behind."""
    anyio.run(partial(_open_and_close, folder, gpu, halfway=False))  # what is set up once is set up now
    gc.collect()
    before = _held(gpu)
    wrong: list[str] = []
    for halfway in (False, True):
        found = anyio.run(partial(_open_and_close, folder, gpu, halfway=halfway))
        gc.collect()
        wrong += [f"halfway={halfway}: {line}" for line in (*found, *_differences(before, _held(gpu)))]
    return Claim("page-locked: the window; closed: nothing", not wrong, {"wrong": wrong})


async def _open_and_close(folder: Path, gpu: Gpu, *, halfway: bool) -> list[str]:
    readers: list[Reader] = []

    def reader_of(prepared: Prepared) -> Reader:
        readers.append(start_reader(prepared))
        return readers[0]

    dtype = "auto" if gpu.is_cuda else "float32"  # on the CPU only what is converted passes through a window
    async with open_llm(folder, device=gpu.name, dtype=dtype, reader_of=reader_of) as llm:
        for layer in ["layers.0"] if halfway else llm.readiness:
            await llm.wait_ready(layer)
        window = _window_of(llm.model)
        faults = window_faults(window, llm.model.prepared.read_plan.window_nbytes, locked=gpu.is_cuda)
    faults += window_faults(window, window.numel(), locked=False)
    return [*faults, *(f"the reader's process {r.pid} is still there" for r in readers if _runs(r.pid))]


def window_faults(window: torch.Tensor, planned: int, *, locked: bool) -> list[str]:
    """What is wrong with the window's size, and with its page lock at either end."""
    faults = [] if window.numel() == planned else [f"the window has {window.numel()} bytes, planned were {planned}"]
    ends = [window[:1].is_pinned(), window[-1:].is_pinned()]
    return faults if ends == [locked, locked] else [*faults, f"page-locked at its ends: {ends}, should be {locked}"]


def _runs(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def _window_of(model: StreamedModel) -> torch.Tensor:
    """All of the window's bytes, by way of the first item that passes through it."""
    staged = next(item for item in model.prepared.plan.items if not item.direct)
    slot = model.runner.device.staged(staged)
    return torch.empty(0, dtype=torch.uint8).set_(slot.untyped_storage())


def _held(gpu: Gpu) -> dict[str, object]:
    return {
        "device bytes": gpu.allocated_nbytes(),
        "torch's page-locked bytes": gpu.torch_pinned_nbytes(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("firstlayer")),
    }


def _differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [f"{name}: {before[name]} before, {after[name]} after" for name in before if before[name] != after[name]]


# --- a model that does not fit


def check_streamed(folder: Path, gpu: Gpu, scheme: str) -> Claim:
    """Within a limit that the weights do not fit into: the bits of a load without, and the limit is kept."""
    return judge_streamed(run_streamed(folder, gpu, scheme), scheme)


def judge_streamed(run: StreamedRun, scheme: str) -> Claim:
    """Bits, memory, and that what the host keeps was read once; the time of a token is told, see `judge_token`."""
    facts = {
        "limit_bytes": run.limit, "peak_bytes": run.device_peak, "host_bytes": run.host_nbytes,
        "largest_difference": run.largest_difference, "read_again": run.read_again, **_token_facts(run),
    }  # fmt: skip
    holds = run.same_bits and run.device_peak <= run.limit and run.read_again == 0
    return Claim(f"streamed within a limit {scheme}", holds, facts)


def check_token(folder: Path, gpu: Gpu) -> Claim:
    """A token takes as long as its bytes take from the host's memory."""
    return judge_token(run_streamed(folder, gpu, "none"))


def judge_token(run: StreamedRun) -> Claim:
    """The verdict on measured seconds."""
    return Claim("time of a streamed token", run.token_s <= STREAM_LIMIT * run.copy_s, _token_facts(run))


def _token_facts(run: StreamedRun) -> dict[str, object]:
    return {
        "pass_bytes": run.pass_nbytes, "token_s": round(run.token_s, 5), "copy_s": round(run.copy_s, 5),
        "token_over_copy": round(run.token_s / max(run.copy_s, 1e-9), 2),
    }  # fmt: skip


# --- products of stored weights


def check_kernels(gpu: Gpu) -> Claim:
    """Every product is as near to the float32 one as its numbers allow, twice the same; a table of its times."""
    return judge_kernels(time_kernels(gpu))


def judge_kernels(timed: Sequence[Timed]) -> Claim:
    """The table goes to stderr as Markdown; the claim names what is off."""
    sys.stderr.write(f"\n{kernel_table(timed)}\n")
    wrong = [
        f"{row.scheme} {row.mode.value} {row.tokens}: error {row.error:.1e}, same twice: {row.repeats}"
        for row in timed
        if not row.holds
    ]
    return Claim("products of stored weights", bool(timed) and not wrong, {"products": len(timed), "wrong": wrong})


# --- all of it


def checks(folder: Path, gpu: Gpu, *, large: TinyModel) -> Iterator[tuple[str, Callable[[], Claim]]]:
    """Every check with what it is called, in the order in which they run."""
    tiny = TinyModel(layers=3)
    families = [write_tiny_model(folder / name, model=replace(tiny, family=name)) for name in ARCHITECTURES]
    for scheme in scheme_names():
        yield f"equal {scheme}, tiny", partial(check_equal, families, gpu.name, scheme)
    random = write_random_checkpoint(folder / "random", model=large, gpu=gpu)
    for scheme in scheme_names():
        yield f"equal {scheme}", partial(check_equal, [random], gpu.name, scheme)
    for load_format in PACKAGES:
        yield f"load format {load_format}", partial(check_load_format, random, gpu, load_format)
    yield "overlap", partial(check_overlap, random, gpu)
    for scheme in scheme_names():
        yield f"memory {scheme}", partial(check_memory, random, gpu, scheme)
        yield f"no waits {scheme}", partial(check_no_waits, random, gpu, scheme)
        yield f"streamed {scheme}", partial(check_streamed, random, gpu, scheme)
    yield "streamed token", partial(check_token, random, gpu)
    yield "close", partial(check_close, random, gpu)
    yield "speed", partial(check_speed, random, gpu)
    yield "products", partial(check_kernels, gpu)


def run_checks(folder: Path, gpu: Gpu, *, large: TinyModel) -> list[Claim]:
    """Carry all out; one that raises is a claim that does not hold."""
    claims = []
    for name, check in checks(folder, gpu, large=large):
        begin = time.perf_counter()
        try:
            claim = check()
        except Exception as error:
            claim = Claim(name, False, {"error": f"{type(error).__name__}: {error}"})
        seconds = round(time.perf_counter() - begin, 2)
        claims.append(replace(claim, facts={**claim.facts, "seconds": seconds}))
        sys.stderr.write(f"{table_line(claims[-1])}\n")
    return claims


def table_line(claim: Claim) -> str:
    """One row for people."""
    facts = ", ".join(f"{name} {value}" for name, value in claim.facts.items() if value not in ("", []))
    return f"{'yes' if claim.holds else 'NO':<4} {claim.name:<50} {facts}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description="Check on a CUDA GPU what only a GPU can show.")
    parser.add_argument("--device", default="cuda:0", help="cuda[:index]")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    options = parser.parse_args(arguments)
    try:
        gpu = Gpu(str(cuda_device(options.device)))
    except OptionError as error:
        print(f"gpu_check: nothing was checked: {error}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        claims = run_checks(options.folder or Path(temporary), gpu, large=ONE_BILLION)
    holds = all(claim.holds for claim in claims)
    print(json.dumps({
        **gpu.describe(), "torch": torch.__version__, "seconds": round(time.perf_counter() - begin, 1), "holds": holds,
        "claims": [{"name": claim.name, "holds": claim.holds, **claim.facts} for claim in claims],
    }))  # fmt: skip
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
