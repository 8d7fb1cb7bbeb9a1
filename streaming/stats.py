"""The summary of a run: where the time went, what was read and kept, and how much memory it took."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from streaming.sizes import format_size

if TYPE_CHECKING:
    from streaming.weight_stream import WeightStream


def process_start_s() -> float:
    """When this process began, on time.monotonic's clock (to 10 ms: the kernel keeps it in clock ticks)."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return time.monotonic() - time.process_time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


@dataclass(frozen=True)
class Summary:
    """Seconds count from the start of the process unless said otherwise; None where it did not come to that.

    `from_load_s`: to the first token, from the moment imports were done (or from the call, where they were before).
    `bytes_read`: of weights, once the load is over just what the plan says; `bytes_received`: of those that another
    rank has read for this one; `bytes_rows`: of embedding rows, fetched ahead of their table.
    `bytes_before_first_token`: of both, up to the first token of the run. `peak_rss_bytes`: the peak over all
    processes, shared memory once. `stalls`: seconds the forward pass waited, by the stage in which the missing layer
    was. `stages`: seconds of work by name: import, shell (the modules), read, slice, quantize, post-process (for a
    device, and packed copies), publish, forward; work at the same time counts for each. `quantize_s`: of the quantizing
    alone. `load_format`: what the files are; "dummy" where there are none. `read_strategy`: how they were read, and why
    so. Of the last generation: `passes`, steps of the model; `tokens_per_pass`, new tokens of all its answers for each;
    `proposed_tokens` that speculation had checked, `accepted_tokens` of them that were right. `draft_bytes`: the share
    of the draft model, counted in `peak_budget_bytes` and `limit_bytes`. `stream`: of weights that do not all fit into
    memory, {} where they do (see stream_facts). `experts`: of those that come and go, {} where they stay (see
    ExpertCache.facts).
    """

    ttft_s: float | None = None
    import_s: float | None = None
    from_load_s: float | None = None
    first_layer_ready_s: float | None = None
    first_forward_s: float | None = None
    load_done_s: float | None = None
    load_s: float | None = None
    forward_s: float | None = None
    decode_tok_s: float | None = None
    tokens_per_s: float | None = None
    passes: int = 0
    tokens_per_pass: float | None = None
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_rows: int = 0
    bytes_before_first_token: int | None = None
    bytes_kept: int = 0
    peak_rss_bytes: int = 0
    peak_rss_mb: float = 0.0
    peak_budget_bytes: int = 0
    limit_bytes: int | None = None
    draft_bytes: int = 0
    window_bytes: int = 0
    stalls: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    layers_by_scheme: Mapping[str, int] = field(default_factory=dict)
    quantize_s: float = 0.0
    load_format: str = ""
    read_strategy: str = ""
    read_strategy_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_token_id: int | None = None
    text: str | None = None
    finish_reason: str | None = None
    warnings: tuple[str, ...] = ()
    stream: Mapping[str, int | float] = field(default_factory=dict)
    experts: Mapping[str, int | float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """For JSON: seconds to the millisecond's tenth, everything else as it is."""
        return {
            key: round(value, 4) if isinstance(value, float) else _rounded(value) for key, value in asdict(self).items()
        }


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: round(item, 4) if isinstance(item, float) else item for key, item in value.items()}
    return value


def summary_lines(summary: Summary) -> list[str]:
    """The summary for people, a fact per line."""
    schemes = ", ".join(
        f"{count} {'wide' if name == 'none' else f'in {name}'}" for name, count in summary.layers_by_scheme.items()
    )
    passes = " (in all passes)" if summary.stream or summary.experts else ""
    made_up = summary.load_format == "dummy"
    dummy, files = (" (dummy: the weights are made up)", "") if made_up else ("", f"; {summary.load_format} files")
    lines = [
        _fact("first token", _s(summary.ttft_s), f"from process start; {_s(summary.from_load_s)} from load"),
        _fact("first layer", _s(summary.first_layer_ready_s), f"ready; forward from {_s(summary.first_forward_s)} on"),
        _fact("load done", _s(summary.load_done_s), f"{format_size(summary.bytes_read)} read{passes}{dummy}, "
              f"{format_size(summary.bytes_kept)} kept"),
        _fact("read with", "", f"{summary.read_strategy}: {summary.read_strategy_reason}{files}"),
        _fact("layers", "", f"{schemes}; quantized in {_s(summary.quantize_s)}"),
        _fact("time", "", ", ".join(f"{name} {_s(value)}" for name, value in summary.stages.items())),
        _fact("stalls", "", ", ".join(f"{k} {_s(v)}" for k, v in summary.stalls.items()) or "none"),
        _fact("memory", format_size(summary.peak_rss_bytes), f"peak of all processes; the plan's own share "
              f"{format_size(summary.peak_budget_bytes)}, limit "
              f"{format_size(summary.limit_bytes) if summary.limit_bytes else 'none'}"),
    ]  # fmt: skip
    if summary.stream.get("pass_bytes"):
        lines.append(_fact("streamed", format_size(summary.stream["pass_bytes"]), _stream_words(summary.stream)))
    if summary.experts:
        lines.append(_fact("experts", f"{summary.experts['hit_rate']:.1%}", _expert_words(summary.experts)))
    if summary.tokens_per_s is not None:
        rate = f"{summary.decode_tok_s:.1f} tok/s" if summary.decode_tok_s else "-"
        lines.append(_fact("decode", rate, f"{len(summary.token_ids)} tokens, ended by {summary.finish_reason}"))
    if summary.proposed_tokens:
        lines.append(_fact("speculation", f"{summary.tokens_per_pass:.2f}", f"tokens a pass; {summary.accepted_tokens} "
                     f"of {summary.proposed_tokens} proposed tokens were right{_draft_words(summary)}"))  # fmt: skip
    return lines


def _stream_words(stream: Mapping[str, int | float]) -> str:
    return (
        f"a pass: {stream['streamed_layers']} layers, through {format_size(stream['ring_bytes'])}; "
        f"{stream['resident_layers']} stay ({stream['hit_rate']:.0%} of the bytes)"
        f"{f'; {format_size(held)} on the host' if (held := stream['host_bytes']) else ''}"
    )


def _expert_words(experts: Mapping[str, int | float]) -> str:
    ahead = int(experts["foreseen_used"] + experts["foreseen_wasted"])
    used = f"; {experts['foreseen_used']} of {ahead} fetched ahead were used" if ahead else ""
    read, held, capacity = (format_size(int(experts[f"{name}_bytes"])) for name in ("read", "peak", "capacity"))
    asked = experts["hits"] + experts["misses"]
    return f"of {asked} asked for were there; {read} read, {held} held at the most of {capacity}{used}"


def stream_facts(stream: WeightStream) -> dict[str, int | float]:
    """What of a model stays in memory and what is streamed, as it is now: layers that are there whole, others; bytes
    that come anew in each pass, the share of all bytes that does not (`hit_rate`), bytes of the ring, and of streamed
    weights that the host has beside a GPU; and since the load began: bytes that came through the ring, those of them
    that no pass used, and those that were copied from the host to a GPU."""
    plan, counts = stream.plan, stream.counts
    return {
        "resident_layers": len(plan.layers(kept=True)), "streamed_layers": len(plan.layers(kept=False)),
        "ring_bytes": plan.ring_nbytes, "pass_bytes": plan.pass_nbytes, "hit_rate": plan.hit_rate,
        "streamed_bytes": counts.streamed_nbytes, "unused_bytes": counts.unused_nbytes,
        "host_bytes": stream.memory.held_nbytes, "copied_bytes": stream.memory.copied_nbytes,
    }  # fmt: skip


def _draft_words(summary: Summary) -> str:
    return f"; {format_size(summary.draft_bytes)} for the draft model" if summary.draft_bytes else ""


def _fact(name: str, value: str, more: str) -> str:
    return f"{name:<12} {value:>10}  {more}" if value else f"{name:<12} {more}"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
