"""One rank's share of DeepSeek-V3, streamed in and computed through all layers alone: bytes and seconds of each layer.

    python -m examples.write_deepseek_index FOLDER --numbers
    python -m examples.deepseek_share FOLDER --tensor-parallel-size 8 --expert-parallel-size 64
    python -m examples.deepseek_share --smoke

The other ranks are silent (streaming.ranks.lone_rank): sums hold this rank's part, and of the tokens that would come to
its experts only its own come. The logits mean nothing; what is read, kept and computed is the rank's. Holes of sparse
files are read from no disk, so that `read` is what moving the bytes takes, not what a disk would.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from examples.write_deepseek_index import DeepSeek, Numbers, write_index
from streaming.clock import RunClock
from streaming.hooks import Hooks
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.reader_choice import start_reader
from streaming.sizes import format_size
from streaming.trace import Tracer

if TYPE_CHECKING:
    import torch

    from streaming.model import StreamedModel

SMOKE = DeepSeek(
    layers=4, dense_layers=1, experts=8, groups=2, top_groups=1, experts_per_token=2, hidden=256, intermediate=384,
    expert_intermediate=128, heads=4, q_rank=64, kv_rank=64, nope_dim=16, rope_dim=8, value_dim=16, vocab=320, files=5,
)  # fmt: skip
SMOKE_MESH = (2, 4)


@dataclass(frozen=True)
class LayerShare:
    """One layer of the rank: bytes read and kept, seconds of its reads (summed; several run at once) and of its forward
    pass. Of a sparse one `rows` are this rank's tokens for its own experts, and `experts` how many of all experts the
    whole prompt uses."""

    name: str
    read_nbytes: int
    kept_nbytes: int
    read_s: float
    forward_s: float
    rows: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Share:
    """The whole run. Seconds count from the start of reading, torch's import included; `finite`: every layer's output
    and the logits are."""

    ranks: int
    own_experts: tuple[int, ...]
    layers: tuple[LayerShare, ...]
    read_nbytes: int
    kept_nbytes: int
    load_s: float
    logits_s: float
    peak_nbytes: int
    finite: bool
    logits_shape: tuple[int, ...]


def measure(folder: Path, *, tensor: int, expert: int, tokens: int = 16, memory: str | None = None) -> Share:
    """Rank 0's share of a mesh, for a prompt of so many tokens. Raises what `prepare` does."""
    options = LoadOptions(tensor_parallel_size=tensor, expert_parallel_size=expert, memory=memory)
    prepared = prepare(str(folder), options)
    return anyio.run(_measure, prepared, tuple(range(tokens)))


async def _measure(prepared: Prepared, prompt: Sequence[int]) -> Share:
    notes = _Notes({}, {}, [])
    begin, clock, tracer = time.monotonic(), RunClock(start_s=time.monotonic()), Tracer()
    with closing(start_reader(prepared)) as reader:
        from streaming.model_run import run_model
        from streaming.ranks.lone_rank import LoneRank

        hooks = Hooks(on_stage=notes.stage, layer_outputs=notes.output)
        ranks = LoneRank(prepared.topology)
        async with run_model(prepared, reader, tracer=tracer, clock=clock, hooks=hooks, ranks=ranks) as model:
            notes.watch(model)
            logits = await anyio.to_thread.run_sync(_logits, model, prompt)
            logits_s = time.monotonic() - begin
            await anyio.to_thread.run_sync(model.wait_loaded)
            load_s = time.monotonic() - begin
    return _share(prepared, notes, tracer, model, logits, load_s=load_s, logits_s=logits_s)


def _logits(model: StreamedModel, prompt: Sequence[int]) -> torch.Tensor:
    from streaming.evaluate import prompt_logits

    job = model.submit_call(lambda runner, stop: prompt_logits(model, prompt, stop))
    found: torch.Tensor = next(job.results())
    return found


@dataclass
class _Notes:
    """What the run tells while it lasts."""

    read_s: dict[str, float]
    chosen: dict[str, torch.Tensor]  # layer -> the experts [T, k] of each token
    finite: list[bool]

    def stage(self, layer: str, stage: str, nbytes: int, seconds: float) -> None:
        """A layer has been read."""
        if stage == "read":
            self.read_s[layer] = seconds

    def output(self, layer: str, hidden: torch.Tensor) -> None:
        """A layer has been computed."""
        self.finite.append(bool(hidden.isfinite().all()))

    def watch(self, model: StreamedModel) -> None:
        """Note what each router chooses."""
        for index, layer in enumerate(model.runner.model.layers):
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                gate.register_forward_hook(self._noting(f"layers.{index}"))

    def _noting(self, layer: str) -> Any:
        def note(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            self.chosen[layer] = output[1]

        return note


def _share(
    prepared: Prepared,
    notes: _Notes,
    tracer: Tracer,
    model: StreamedModel,
    logits: torch.Tensor,
    *,
    load_s: float,
    logits_s: float,
) -> Share:
    from layers.expert_dispatch import share_of
    from layers.parallel import StandInGroup
    from streaming.rank_share import expert_numbers

    topology, plan = prepared.topology, prepared.plan
    experts = expert_numbers(prepared.config, topology)
    mine = share_of(logits.shape[0], StandInGroup(topology.tensor, topology.tensor_rank))
    forward_s = {span.layer: span.seconds for span in tracer.spans() if span.lane == "forward"}
    layers = []
    for layer in plan.all_layers:
        chosen = notes.chosen.get(layer.name)
        rows = 0 if chosen is None else sum(number in experts for number in chosen[mine].flatten().tolist())
        used = 0 if chosen is None else len(chosen.unique())
        read_s, computed_s = notes.read_s.get(layer.name, 0.0), forward_s.get(layer.name, 0.0)
        layers.append(
            LayerShare(layer.name, layer.read_nbytes, layer.kept_nbytes, read_s, computed_s, rows, used)
        )  # fmt: skip
    finite = bool(notes.finite) and all(notes.finite) and bool(logits.isfinite().all())
    return Share(
        topology.world, experts, tuple(layers), plan.read_nbytes, plan.kept_nbytes, load_s, logits_s,
        model.watch.peak_nbytes, finite, tuple(logits.shape),
    )  # fmt: skip


def lines(share: Share) -> list[str]:
    """The share for people."""
    head = f"{'layer':<12} {'read':>12} {'kept':>12} {'read':>9} {'forward':>9} {'rows':>5} {'experts':>8}"
    rows = [
        f"{one.name:<12} {format_size(one.read_nbytes):>12} {format_size(one.kept_nbytes):>12} {one.read_s:>7.3f} s "
        f"{one.forward_s:>7.3f} s {one.rows:>5} {one.experts:>8}"
        for one in share.layers
    ]
    sums = sum(one.read_s for one in share.layers), sum(one.forward_s for one in share.layers)
    total = (
        f"{'total':<12} {format_size(share.read_nbytes):>12} {format_size(share.kept_nbytes):>12} {sums[0]:>7.3f} s "
        f"{sums[1]:>7.3f} s {sum(one.rows for one in share.layers):>5}"
    )
    words = (
        f"rank 0 of {share.ranks}, experts {share.own_experts[0]} to {share.own_experts[-1]}: loaded after "
        f"{share.load_s:.2f} s, logits {list(share.logits_shape)} after {share.logits_s:.2f} s, "
        f"{'all finite' if share.finite else 'NOT ALL FINITE'}; peak {format_size(share.peak_nbytes)}"
    )
    return [head, *rows, total, words]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="as examples.write_deepseek_index writes it")
    parser.add_argument("--tensor-parallel-size", type=int, default=8, metavar="T")
    parser.add_argument("--expert-parallel-size", type=int, default=64, metavar="E")
    parser.add_argument("--tokens", type=int, default=16, help="of the prompt: the first ones of the vocabulary (16)")
    parser.add_argument("--memory", default="20GiB", metavar="SIZE", help="refuse a larger share (20GiB)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model of the same kind, on a mesh of 2 and 4")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if (options.folder is None) != options.smoke:
        parser.error("give a folder, or --smoke and no folder")
    if options.smoke:
        with TemporaryDirectory() as folder:
            write_index(Path(folder), SMOKE, numbers=Numbers(experts=SMOKE.experts))
            share = measure(Path(folder), tensor=SMOKE_MESH[0], expert=SMOKE_MESH[1], tokens=options.tokens)
    else:
        tensor, expert = options.tensor_parallel_size, options.expert_parallel_size
        share = measure(options.folder, tensor=tensor, expert=expert, tokens=options.tokens, memory=options.memory)
    print(json.dumps(asdict(share)) if options.json else "\n".join(lines(share)))
    return 0 if share.finite else 1


if __name__ == "__main__":
    sys.exit(main())
