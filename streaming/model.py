"""A model that is open: what it answers, how far it has loaded, what it has cost. `streaming.model_run` opens it."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from layers.kv_cache import KVCache, cache_room_nbytes, kv_cache_nbytes
from layers.kv_codec import Room
from layers.model_config import ModelConfig
from layers.rank_config import local_config
from quant.device_features import DeviceFeatures
from streaming.answers import Completion, Piece, Request
from streaming.clock import RunClock
from streaming.errors import BudgetError, OptionError, StreamClosedError, StreamingError
from streaming.forward_thread import ForwardThread, Job, RequestCancelled
from streaming.generate import Timing, generate
from streaming.hooks import Hooks
from streaming.kv_scales import KVScales, scales_on_device
from streaming.memory_watch import MemoryWatch
from streaming.prepare import Prepared
from streaming.ranks.report import RankReport
from streaming.residency import LayerState, Residency
from streaming.runner import ModelRunner
from streaming.set_memory import caches_fit, fit_caches
from streaming.sizes import format_needed, format_size
from streaming.speculation import PromptLookup, Proposer
from streaming.stages import is_quantized
from streaming.stats import Summary, stream_facts
from streaming.tokenizer import Tokenizer
from streaming.trace import Tracer, lane_seconds, lanes_in_order
from streaming.waves import Caches

if TYPE_CHECKING:
    from streaming.draft_model import DraftModel
    from streaming.ranks.lead import Lead
    from streaming.ranks.lone_rank import LoneRank
    from streaming.ranks.member import Member


@dataclass
class StreamedModel:
    """Made by `run_model` (streaming.model_run); used by `LLM` and `open_llm`'s callers."""

    prepared: Prepared
    residency: Residency
    runner: ModelRunner
    tracer: Tracer
    clock: RunClock
    watch: MemoryWatch
    features: DeviceFeatures = field(default_factory=DeviceFeatures)
    hooks: Hooks = field(default_factory=Hooks)
    load_error: BaseException | None = None
    told: BaseException | None = None  # the load's error, once somebody has been given it
    warnings: list[str] = field(default_factory=list)
    closing: bool = False
    workers: set[threading.Thread] = field(default_factory=set)
    ranks: Lead | Member | LoneRank | None = None  # this rank's part in a run of several
    draft: DraftModel | None = None  # proposes tokens where a request speculates
    _forward: ForwardThread = field(default_factory=ForwardThread)
    _timing: Timing = field(default_factory=Timing)
    _completions: list[Completion] = field(default_factory=list)
    _begun: int = 0  # how many completions there were when the last generation began
    _caches: weakref.WeakSet[KVCache] = field(default_factory=weakref.WeakSet)  # that are in use
    _cache_nbytes: int = 0  # the most that they came to, in the last generation
    _room: Room | None = None  # what all caches decode into, one after the other
    _room_nbytes: int = 0  # the most that it may have come to: it is kept
    _first_token: tuple[float, int] | None = None  # when the first of all was there, and bytes of rows fetched by then

    def __post_init__(self) -> None:
        self.budget = self.prepared.budget  # as the limit is now
        self.changing_memory = threading.Lock()

    # --- readiness

    @property
    def readiness(self) -> Mapping[str, LayerState]:
        """The state of every layer now, in the order of use."""
        return self.residency.states()

    def wait_ready(self, layer: int | str, timeout: float | None = None) -> bool:
        """Block until a layer is ready: True, or False after `timeout` seconds. An int counts decoder layers.

        Raises LayerLoadError when loading fails, StreamClosedError when the model is closed meanwhile.
        """
        return self._telling(lambda: self.residency.wait(self._layer_name(layer), timeout))

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Block until the load is over, its last checks included: True, or False after `timeout` seconds."""
        return self._telling(lambda: self.residency.wait_finished(timeout))

    def _telling(self, wait: Callable[[], bool]) -> bool:
        try:
            return wait()
        except StreamingError as error:
            self.told = error
            raise

    def on_change(self, callback: Callable[[str, LayerState], None]) -> None:
        """Call `callback(layer, state)` at every change from now on, in the loader's thread."""
        self.residency.on_change(callback)

    def _layer_name(self, layer: int | str) -> str:
        name = f"layers.{layer}" if isinstance(layer, int) else layer
        known = self.residency.states()
        if name not in known:
            raise OptionError(f"layer {layer!r} is not one of {', '.join(known)}")
        return name

    def rank_progress(self) -> Mapping[int, tuple[str, str]]:
        """Layer and stage that each of the other ranks was in when it last said so; empty in a run of one rank."""
        lead = self.runner.lead
        if lead is None:
            return {}
        return {rank: (progress.layer, progress.stage) for rank, progress in lead.hub.progress.items()}

    def rank_reports(self) -> Mapping[int, RankReport]:
        """The bytes of each of the other ranks that has loaded; empty in a run of one rank."""
        return {} if self.runner.lead is None else self.runner.lead.reports

    def report(self) -> RankReport:
        """This rank's."""
        return RankReport(self._bytes_read(), self.prepared.plan.kept_nbytes, self.watch.peak_nbytes)

    # --- work

    def submit(self, requests: Sequence[Request], tokenizer: Tokenizer | None) -> Job:
        """Generate in the forward thread; the job yields Piece and Completion as they come."""
        fitting = [self.fitted(request) for request in requests]
        return self._submit(partial(self._generate, fitting, tokenizer))

    def submit_call(self, call: Callable[[ModelRunner, Callable[[], None]], object]) -> Job:
        """Run `call(runner, stop)` in the forward thread; the job yields its one result."""

        def work(job: Job) -> Iterator[object]:
            yield call(self.runner, partial(self._stop, job))

        return self._submit(work)

    def _submit(self, work: Callable[[Job], Iterator[Any]]) -> Job:
        return self._forward.submit(work, wake=self.residency.wake, tell=self._note_told)

    def _note_told(self, error: BaseException) -> None:
        self.told = error

    def _generate(self, requests: list[Request], tokenizer: Tokenizer | None, job: Job) -> Iterator[Piece | Completion]:
        self._cache_nbytes, self._begun = self._room_nbytes, len(self._completions)
        timing = self._timing = Timing()
        stop, marked = partial(self._stop, job), bool(self._completions)
        self._check_cache(max((request.cache_tokens for request in requests), default=0))
        made = generate(
            self.runner, requests, tokenizer=tokenizer, caches=Caches(self.new_cache, self.fits),
            proposer=self._proposer(requests), stop=stop, timing=timing,
        )  # fmt: skip
        for value in made:
            if timing.first_token_s and not marked:
                marked = True
                self.tracer.mark("first token", at_s=timing.first_token_s)
                self._first_token = (timing.first_token_s, self.runner.rows.read_nbytes)
            if isinstance(value, Completion):
                self._completions.append(value)
            yield value

    def _proposer(self, requests: Sequence[Request]) -> Proposer:
        speculates = any(request.params.speculate for request in requests)
        return self.draft.proposer() if self.draft is not None and speculates else PromptLookup()

    def _stop(self, job: Job) -> None:
        if self.closing:
            raise StreamClosedError("the model was closed while a request was running")
        if job.cancelled:
            raise RequestCancelled

    def fitted(self, request: Request) -> Request:
        """The request, checked, with max_tokens cut to what the context holds."""
        if not request.prompt_ids:
            raise OptionError("the prompt is empty: at least one token is needed")
        request = replace(request, prompt_ids=tuple(_whole(token) for token in request.prompt_ids))
        vocab = self.prepared.config.vocab_size
        wrong = next((token for token in request.prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionError(f"token id {wrong} is not in the vocabulary of {vocab} (0 to {vocab - 1})")
        room = self.context_length - len(request.prompt_ids)
        if room < 1:
            raise OptionError(
                f"the prompt has {len(request.prompt_ids)} tokens, and the context holds {self.context_length} with "
                "the answer: shorten it or raise --max-model-len"
            )
        return replace(request, params=replace(request.params, max_tokens=min(request.params.max_tokens, room)))

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.prepared.options.max_model_len or self.prepared.config.max_position_embeddings

    def new_cache(self, max_tokens: int) -> KVCache:
        """A KV cache for so many tokens, admitted before it is allocated. Raises BudgetError beyond the limit."""
        tokens, lead = min(max_tokens, self.context_length), self.runner.lead
        config, scales = self._cache_of()
        self._cache_nbytes = max(self._cache_nbytes, self._check_cache(max_tokens))
        self._room_nbytes = self._room_with(config, tokens)
        device, kept = self.runner.device.torch_device, self.prepared.options.kv_cache_dtype
        self._room = self._room or Room(device)
        cache = KVCache(
            config, max_tokens=tokens, dtype=self.prepared.dtype, device=str(device), cache_dtype=kept,
            scales=scales_on_device(scales, cache_dtype=kept, config=config, fnuz=self.features.fnuz),
            room=self._room, fnuz=self.features.fnuz,
        )  # fmt: skip
        self._caches.add(cache)
        if lead is not None:
            lead.new_cache(cache, max_tokens=tokens)
        return cache

    def fits(self, max_tokens: int) -> bool:
        """Whether a cache for so many tokens has room now."""
        held, limit = self._held_with(max_tokens), self.budget.limit_nbytes
        if limit is None or self._needed_with(held) <= limit:
            return True
        return self.runner.stream is not None and caches_fit(self, held)

    def _cache_of(self) -> tuple[ModelConfig, KVScales | None]:
        """The configuration that a cache made now is sized by, and its scales: of the layers of this rank's stage, or
        of none where another replica computes the sequence and rank 0 only counts its tokens."""
        config, scales, lead = self.prepared.config, self.prepared.kv_scales, self.runner.lead
        if lead is not None and not lead.computes_next_cache():
            return replace(local_config(config, self.runner.topology), num_layers=0), None
        stage = slice(*self.runner.topology.layers_of_stage(config.num_layers))
        return local_config(config, self.runner.topology), None if scales is None else scales[stage]

    def _check_cache(self, max_tokens: int) -> int:
        """Bytes of all caches with another one for so many tokens. Raises BudgetError beyond the limit."""
        held, limit = self._held_with(max_tokens), self.budget.limit_nbytes
        if self.runner.stream is not None:
            with suppress(BudgetError):  # said below, in words about caches
                fit_caches(self, held)
        if limit is not None and (needed := self._needed_with(held)) > limit:
            apart = 0 if self.draft is None else self.draft.nbytes
            raise BudgetError(
                f"--memory {format_size(limit + apart)} is too small for a cache of "
                f"{min(max_tokens, self.context_length)} tokens: {format_needed(needed + apart)} are needed; ask for "
                "fewer tokens or a shorter prompt"
            )
        return held

    def _held_with(self, max_tokens: int) -> int:
        """Bytes of the caches that are there and another one, and of what they decode into."""
        config, tokens = self._cache_of()[0], min(max_tokens, self.context_length)
        kept = self.prepared.options.kv_cache_dtype
        own = kv_cache_nbytes(config, max_tokens=tokens, dtype=self.prepared.dtype, cache_dtype=kept)
        return sum(cache.nbytes for cache in self._caches) + own + self._room_with(config, tokens)

    @property
    def caches_nbytes(self) -> int:
        """Bytes of the KV caches that are in use, and of what they decode into."""
        return sum(cache.nbytes for cache in self._caches) + self._room_nbytes

    def _room_with(self, config: ModelConfig, tokens: int) -> int:
        dtype, kept = self.prepared.dtype, self.prepared.options.kv_cache_dtype
        return max(self._room_nbytes, cache_room_nbytes(config, max_tokens=tokens, dtype=dtype, cache_dtype=kept))

    def _needed_with(self, held_nbytes: int) -> int:
        """Bytes of all that the model holds, with caches of so many."""
        budget = self.budget
        return budget.peak_nbytes - budget.cache_nbytes + held_nbytes

    def note(self, text: str) -> None:
        """Something that the user should know: told, and kept for the summary."""
        self.warnings.append(text)
        self.hooks.warn(text)

    def fail(self, error: BaseException) -> None:
        """Another rank has failed: whoever waits gets its error, or the end of `run_model`'s block."""
        self.load_error = self.load_error or error
        self.residency.close(error)

    # --- accounts

    def stats(self) -> Summary:
        """What is known now: times, bytes, memory, and the last generation's tokens."""
        self._book_waits()
        clock, timing = self.clock, self._timing
        first = timing.first_token_s or None
        seconds = lane_seconds(self.tracer.spans())
        decode_s = timing.last_token_s - timing.first_token_s - timing.packing_s
        rate = timing.decoded / decode_s if timing.decoded and decode_s > 0 else None
        last = self._completions[-1] if self._completions else None
        apart = 0 if self.draft is None else self.draft.nbytes
        limit = self.budget.limit_nbytes
        begun = timing.begun_s
        peak = self.watch.peak_nbytes + sum(report.peak_rss_bytes for report in self.rank_reports().values())
        return Summary(
            ttft_s=clock.since_start(first),
            import_s=clock.since_start(clock.imports_done_s),
            from_load_s=_between(max(clock.load_begin_s or 0, clock.imports_done_s or 0), first),
            first_layer_ready_s=clock.since_start(self.residency.first_ready_s),
            first_forward_s=clock.since_start(self._first_forward()),
            load_done_s=clock.since_start(clock.load_end_s),
            load_s=_between(clock.load_begin_s, clock.load_end_s),
            forward_s=_between(begun, first),
            decode_tok_s=rate,
            tokens_per_s=timing.tokens / (timing.last_token_s - begun) if timing.last_token_s > begun else None,
            passes=timing.passes,
            tokens_per_pass=timing.tokens / timing.passes if timing.passes else None,
            proposed_tokens=timing.proposed,
            accepted_tokens=timing.accepted,
            bytes_read=self._bytes_read(),
            bytes_received=self.prepared.plan.received_nbytes,
            bytes_rows=self.runner.rows.read_nbytes,
            bytes_before_first_token=self._bytes_before_first_token(),
            bytes_kept=self.prepared.plan.kept_nbytes,
            peak_rss_bytes=peak,
            peak_rss_mb=round(peak / (1 << 20), 1),
            peak_budget_bytes=self._needed_with(self._cache_nbytes) + apart,
            limit_bytes=None if limit is None else limit + apart,
            draft_bytes=apart,
            window_bytes=self.prepared.read_plan.window_nbytes,
            stalls=dict(self.residency.stalls),
            stages=stage_seconds(seconds),
            layers_by_scheme=layers_by_scheme(self.prepared),
            quantize_s=self._quantize_s(),
            load_format=self.prepared.checkpoint.format,
            read_strategy=self.prepared.reading.strategy,
            read_strategy_reason=self.prepared.reading.reason,
            token_ids=list(last.token_ids) if last else [],
            first_token_id=last.token_ids[0] if last else None,
            text=last.text if last else None,
            finish_reason=last.finish_reason if last else None,
            warnings=tuple(self.warnings),
            stream={} if self.runner.stream is None else stream_facts(self.runner.stream),
            experts={} if self.runner.experts is None else self.runner.experts.facts(),
        )

    def _book_waits(self) -> None:
        """Waits for other ranks that nobody leased a layer for: to meet them, and in the sums of a step."""
        for name, wait in () if self.runner.lead is None else self.runner.lead.waits():
            self.residency.book(wait.layer, name, begin_s=wait.begin_s, end_s=wait.end_s)

    def _first_forward(self) -> float | None:
        return min((span.start_s for span in self.tracer.spans() if span.lane == "forward"), default=None)

    def _quantize_s(self) -> float:
        """Seconds of quantizing alone: that stage copies wide weights too, where they have passed the window."""
        quantized = {item.tensor.name for item in self.prepared.plan.all_items if is_quantized(item)}
        return sum(s.seconds for s in self.tracer.spans() if s.lane == "quantize" and s.name in quantized)

    def _bytes_read(self) -> int:
        return self.tracer.nbytes("read")  # of a model of 90,000 tensors not every span is kept

    def _bytes_before_first_token(self) -> int | None:
        if self._first_token is None:
            return None
        moment_s, rows_nbytes = self._first_token
        read = (span for span in self.tracer.spans() if span.lane == "read" and span.end_s <= moment_s)
        return rows_nbytes + sum(int(span.args.get("nbytes", 0)) for span in read)

    @property
    def completions(self) -> Sequence[Completion]:
        """Every answer finished so far."""
        return self._completions

    def close(self) -> None:
        """Make whoever waits stop, soon; `run_model` does the rest."""
        self.closing = True
        self.residency.close(StreamClosedError("the model was closed"))
        self.runner.rows.cancel()
        if self.runner.experts is not None:
            self.runner.experts.close()
        if self.runner.stream is not None:
            self.runner.stream.close()

    def join(self) -> None:
        """Wait for the forward thread's end."""
        self._forward.close()


def _whole(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"token id {token!r} is not a whole number") from None


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def stage_seconds(lanes: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, as they run one after the other; post-processing too where no weight needed any."""
    seconds = {"post-process": 0.0, **lanes}
    return {lane: seconds[lane] for lane in lanes_in_order(seconds) if lane != "stall"}


def layers_by_scheme(prepared: Prepared) -> dict[str, int]:
    """How many layers keep their projections in which scheme ("none" for wide ones)."""
    counts: Counter[str] = Counter()
    for spec in prepared.specs:
        schemes = {param.scheme.name for param in spec.params if param.kind.has_scheme}
        counts.update(schemes or ({"none"} if spec.params else set()))
    return dict(counts)
