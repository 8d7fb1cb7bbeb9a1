"""`LLM`: the synchronous face of a streamed model, and `open_llm`, the asynchronous one. Importing this needs no torch.

Both do the same in the same order: plan from headers, start the reader, and only then import torch, so that bytes
arrive while the interpreter is busy.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from layers.sampling_params import SamplingParams
from streaming.clock import RunClock
from streaming.draft_plan import DraftPlan, draft_beside, prepare_with_draft
from streaming.errors import OptionError, StreamClosedError
from streaming.free_memory import within_free_memory
from streaming.hooks import Hooks
from streaming.interrupts import interrupt_kept
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.prompt import Prompt
from streaming.reader import Reader
from streaming.reader_choice import start_reader as start_reader
from streaming.sources import Source
from streaming.torch_import import import_torch
from streaming.trace import Tracer

if TYPE_CHECKING:
    from layers.decoder import DecoderModel
    from quant.kernels import Kernels
    from streaming.answers import Completion, Piece
    from streaming.async_llm import AsyncLLM
    from streaming.model import StreamedModel
    from streaming.ranks.hub import Hub
    from streaming.ranks.lead import Lead
    from streaming.residency import LayerState
    from streaming.runner import ModelRunner
    from streaming.stats import Summary
    from streaming.tokenizer import Tokenizer

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
logger = logging.getLogger(__name__)

_NO_HOOKS = Hooks()


class LoadKeywords(TypedDict, total=False):
    """The keywords of `LLM` and `open_llm`: LoadOptions by name."""

    load_format: str
    safetensors_load_strategy: str | None
    safetensors_prefetch_num_threads: int | None
    safetensors_prefetch_block_size: str | int | None
    model_loader_extra_config: Mapping[str, object] | str | None
    quantization: str
    quantize_head: bool
    quantization_config: Mapping[str, object] | str | None
    scale_percentile: float | None
    dtype: str
    device: str
    memory: str | int | None
    gpu_memory: str | int | None
    host_memory: str | int | None
    window: str | int | None
    max_model_len: int | None
    kernels: str
    kv_cache_dtype: str
    activation_dtype: str
    threads: int | None
    reader: str
    check_weights: bool
    moe_load: str
    unwrap_names: bool
    revision: str | None
    sources: Sequence[Source]
    remote_cache: str | None
    cache_dir: str | None
    cache_size: str | int | None
    seed: int | None
    tensor_parallel_size: int
    expert_parallel_size: int | None
    enable_expert_parallel: bool
    pipeline_parallel_size: int
    expert_placement: str
    expert_map: str | Sequence[Sequence[int]] | None
    read_sharing: str
    rank_timeout: float


def bring_torch(tracer: Tracer, clock: RunClock, *, leave: Callable[[], None] | None = None) -> None:
    """Import torch and what stands on it, noting how long it took; `leave` as in `LLM.start`."""
    with tracer.span("import", "torch"), interrupt_kept(leave):
        import_torch(whole=leave is None)
        import streaming.model_run  # noqa: F401  (its modules are part of the fixed time)
    clock.once("imports_done_s")


@asynccontextmanager
async def open_llm(
    model: str | Path,
    *,
    hooks: Hooks = _NO_HOOKS,
    reader_of: Callable[[Prepared], Reader] = start_reader,
    draft_model: str | Path | None = None,
    **options: Unpack[LoadKeywords],
) -> AsyncIterator[AsyncLLM]:
    """Open a model in the running event loop; gives it when its shell exists, long before its weights are there.

    `reader_of` makes the reader: tests pass one that holds pieces back. `draft_model` as for `LLM`. Raises
    what `prepare` raises; an error of the load is raised once, by whoever waits for the layer or at the block's end.
    """
    import anyio.to_thread

    tracer, clock = Tracer(), RunClock(start_s=time.monotonic())
    plan = partial(prepare_with_draft, str(model), LoadOptions(**options), draft_model=draft_model)
    prepared, draft = await anyio.to_thread.run_sync(plan)
    prepared = await anyio.to_thread.run_sync(within_free_memory, prepared)
    async with _stack_closed_in_a_thread() as stack:
        hub = _open_ranks(prepared, stack)
        prepared = _own_options(prepared)
        reader = stack.enter_context(closing(reader_of(prepared)))
        clock.once("load_begin_s")
        from streaming.async_llm import AsyncLLM
        from streaming.model_text import ModelText

        text = stack.enter_context(closing(ModelText(prepared.checkpoint)))
        await anyio.to_thread.run_sync(bring_torch, tracer, clock)
        from streaming.model_run import run_model

        ranks = None if hub is None else _lead(hub, prepared)
        beside = draft_beside(draft, stack, warn=hooks.warn)
        async with run_model(prepared, reader, tracer=tracer, clock=clock, hooks=hooks, ranks=ranks) as streamed:
            streamed.draft = beside
            yield AsyncLLM(streamed, text)


@asynccontextmanager
async def _stack_closed_in_a_thread() -> AsyncIterator[ExitStack]:
    """Closing may wait for processes, of other ranks or the reader's, and the event loop must not."""
    import anyio.to_thread

    stack = ExitStack()
    try:
        yield stack
    except BaseException as error:
        with anyio.CancelScope(shield=True):  # the other ranks are told why
            await anyio.to_thread.run_sync(stack.__exit__, type(error), error, error.__traceback__)
        raise
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(stack.close)


class LLM:
    """A language model that answers while it loads.

        with LLM("folder-or-file-or-hub-id", quantization="fp8_per_channel") as llm:
            for text in llm.generate("The sea is"):
                print(text, end="", flush=True)

    The constructor returns when the shell exists. Keywords are LoadOptions' fields. `draft_model`: a small model with
    the same tokenizer, a path or hub id, that proposes tokens where SamplingParams.speculate says how many.
    Raises CheckpointError, ModelConfigError, OptionError, BudgetError before a weight is read; LayerLoadError when a
    layer cannot be loaded, from whichever call waits for it, or at the end of the `with` block.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        hooks: Hooks = _NO_HOOKS,
        draft_model: str | Path | None = None,
        **options: Unpack[LoadKeywords],
    ) -> None:
        clock = RunClock(start_s=time.monotonic())
        prepared, draft = prepare_with_draft(str(model), LoadOptions(**options), draft_model=draft_model)
        self._open(prepared, clock, hooks, draft=draft)

    @classmethod
    def start(
        cls,
        prepared: Prepared,
        *,
        clock: RunClock | None = None,
        hooks: Hooks = _NO_HOOKS,
        leave: Callable[[], None] | None = None,
        draft: DraftPlan | None = None,
    ) -> LLM:
        """Open a model that has been planned already; `clock` says where its times count from. `draft`: planned with it
        (see streaming.draft_plan).

        `leave` is for a process that runs nothing but this: the import of torch is shortened there (see torch_import),
        and an interrupt in the middle of it calls `leave`, which ends the process.
        """
        llm = cls.__new__(cls)
        llm._open(prepared, clock or RunClock(start_s=time.monotonic()), hooks, leave=leave, draft=draft)
        return llm

    @staticmethod
    def load_layer(model: str | Path, layer: int | str, **options: Unpack[LoadKeywords]) -> dict[str, Any]:
        """One layer alone, to reproduce a fault without the rest: its stored tensors by name, such as
        "model.layers.3.mlp.down_proj.weight" and "...weight_scale".

        `layer`: a decoder layer's number, or "layers.3", "head", "embed". Keywords as for `LLM`. No byte of another
        layer is read and nothing stays open. Raises as `LLM` does, and LayerLoadError (layer, stage, tensor).
        """
        prepared = prepare(str(model), LoadOptions(**options | {"moe_load": "layers"}).within_memory(None))  # all of it
        if not prepared.topology.is_single:
            raise OptionError(f"load_layer runs on one rank, not on the {prepared.topology.world} that are asked for")
        import_torch(whole=True)
        from streaming.one_layer import load_one_layer

        return load_one_layer(prepared, layer)

    def _open(
        self,
        prepared: Prepared,
        clock: RunClock,
        hooks: Hooks,
        *,
        leave: Callable[[], None] | None = None,
        draft: DraftPlan | None = None,
    ) -> None:
        self.tracer, self.clock = Tracer(), clock
        stack, prepared = ExitStack(), within_free_memory(prepared)
        try:
            hub = _open_ranks(prepared, stack)
            self.prepared = _own_options(prepared)
            reader = stack.enter_context(closing(start_reader(self.prepared)))
            self.clock.once("load_begin_s")
            from streaming.model_text import ModelText  # its modules are not needed before bytes are on their way

            self._text = stack.enter_context(closing(ModelText(prepared.checkpoint)))
            bring_torch(self.tracer, self.clock, leave=None if leave is None else partial(_leave, stack, leave))
            beside = draft_beside(draft, stack, warn=hooks.warn)
            self._model = self._start(stack, reader, hooks, hub)
            self._model.draft = beside
        except BaseException as error:
            stack.__exit__(type(error), error, error.__traceback__)  # the other ranks are told why
            raise
        self._closer = weakref.finalize(self, _close, self._model, stack)  # also for who forgets to close

    def _start(self, stack: ExitStack, reader: Reader, hooks: Hooks, hub: Hub | None) -> StreamedModel:
        from streaming.model_run import run_model
        from streaming.portal import LoopThread

        loop = stack.enter_context(closing(LoopThread()))
        ranks = None if hub is None else _lead(hub, self.prepared)
        return loop.enter(
            run_model(self.prepared, reader, tracer=self.tracer, clock=self.clock, hooks=hooks, ranks=ranks)
        )

    # --- text in, text out

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises CheckpointError when it has none (token ids work without)."""
        return self._text.tokenizer

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt (text or token ids), piece by piece, the first as early as it can be.

        Raises StreamingError for a model without a tokenizer, whose answers have no text: see `pieces`, `complete`.
        """
        for piece in self.pieces([prompt], params):
            if piece.text:
                yield piece.text
            else:
                self._text.check()

    def pieces(self, prompts: Sequence[Prompt], params: Params = None) -> Iterator[Piece]:
        """The answers to several prompts, which share each layer's arrival: pieces in the order in which they come.

        `params` of all, or as many as there are prompts. What does not fit into memory at once takes turns. Raises
        BudgetError for a prompt that does not fit by itself.
        """
        from streaming.answers import Piece

        for event in self._events(prompts, params):
            if isinstance(event, Piece):
                yield event

    def answers(self, prompts: Sequence[Prompt], params: Params = None) -> Iterator[Completion]:
        """Finished answers, in the order in which they end; else as `pieces`."""
        from streaming.answers import Completion

        for event in self._events(prompts, params):
            if isinstance(event, Completion):
                yield event

    def complete(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Finished answers, in the order of the prompts; else as `pieces`."""
        return sorted(self.answers(prompts, params), key=lambda completion: completion.index)

    def _events(self, prompts: Sequence[Prompt], params: Params) -> Iterator[Piece | Completion]:
        requests = self._text.requests(prompts, params or SamplingParams())
        yield from self._open_model().submit(requests, self._text.decoder_for(prompts)).results()

    def logits(self, token_ids: Sequence[int]) -> Any:
        """float32 logits [len(token_ids), vocab] of every position, as a torch tensor."""
        from streaming.evaluate import prompt_logits

        job = self._open_model().submit_call(lambda runner, stop: prompt_logits(self._model, token_ids, stop))
        return next(job.results())

    def call(self, work: Callable[[ModelRunner, Callable[[], None]], T]) -> T:
        """What `work(runner, stop)` returns, run in the forward thread, which waits for layers by leasing them."""
        job = self._open_model().submit_call(work)
        found: T = next(job.results())
        return found

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation under the model's chat template. Raises StreamingError when it has none."""
        return self._text.chat_prompt(messages)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model brings a tokenizer; without one it takes and gives token ids."""
        return self._text.available

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end an answer."""
        return self._text.stop_ids

    @property
    def shell(self) -> DecoderModel:
        """The model's modules. A layer's parameters hold its weights once it is ready."""
        return self._model.runner.model

    @property
    def kernels(self) -> Kernels:
        """Which matmuls run."""
        return self._model.runner.kernels

    @property
    def completions(self) -> Sequence[Completion]:
        """Every answer finished so far, in the order in which they ended."""
        return self._model.completions

    # --- readiness and accounts

    @property
    def readiness(self) -> Mapping[str, LayerState]:
        """The state of every layer now ("embed", "layers.0" ... "head"), in the order of use."""
        return self._model.readiness

    def wait_ready(self, layer: int | str, timeout: float | None = None) -> bool:
        """Block until a layer is ready (an int counts decoder layers); False after `timeout` seconds."""
        return self._model.wait_ready(layer, timeout)

    def rank_progress(self) -> Mapping[int, tuple[str, str]]:
        """Layer and stage that each of the other ranks was in when it last said so; empty in a run of one rank."""
        return self._model.rank_progress()

    def on_change(self, callback: Callable[[str, LayerState], None]) -> None:
        """Call `callback(layer, state)` at every change from now on, in the loader's thread: it must be short."""
        self._model.on_change(callback)

    def wait_loaded(self) -> None:
        """Block until every layer is ready; raises what ended the load."""
        self._model.wait_loaded()

    def set_memory(self, memory: str | int) -> None:
        """Keep the model within another memory limit, while it runs: weights that do not fit any more are streamed,
        others come to stay in the passes that follow. No bit of the answers changes.

        Waits for the end of the load. Raises BudgetError where the limit is too small, with what is needed.
        """
        from streaming.set_memory import set_memory

        set_memory(self._open_model(), memory)

    def stats(self) -> Summary:
        """What is known of the run now."""
        return self._model.stats()

    @property
    def model(self) -> StreamedModel:
        """What this stands on."""
        return self._model

    def _open_model(self) -> StreamedModel:
        if not self._closer.alive:
            raise StreamClosedError("the model is closed")
        return self._model

    def close(self) -> None:
        """End everything: soon when something is running. Raises the load's error if nobody has seen it."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            logger.debug("closing after an error", exc_info=True)


def _open_ranks(prepared: Prepared, stack: ExitStack) -> Hub | None:
    """The other ranks on their way, which `stack` ends; None in a run of one. They plan and read meanwhile."""
    if prepared.topology.is_single and "RANK" not in os.environ:
        return None
    from streaming.ranks.launch import open_ranks

    hub = open_ranks(prepared.options)
    if hub is not None:
        from streaming.ranks.open_message import open_message

        stack.enter_context(hub)
        hub.broadcast(open_message(prepared.model, prepared.options))
    return hub


def _own_options(prepared: Prepared) -> Prepared:
    """What rank 0 carries out, of several."""
    if prepared.topology.is_single:
        return prepared
    from streaming.ranks.launch import rank_options

    return replace(prepared, options=rank_options(prepared.options, rank=0))


def _lead(hub: Hub, prepared: Prepared) -> Lead:
    from streaming.ranks.lead import Lead
    from streaming.ranks.torchrun import launched_by

    launched = launched_by(os.environ)
    return Lead(hub, prepared.topology, host="127.0.0.1" if launched is None else launched.host)


def _leave(stack: ExitStack, leave: Callable[[], None]) -> None:
    stack.close()
    leave()


def _close(model: StreamedModel, stack: ExitStack) -> None:
    """End what belongs to a model, then wait for the event loop's worker threads.

    They end with the loop but are daemons: one that is still taking leave of torch when the interpreter ends would
    abort the process.
    """
    model.close()
    try:
        stack.close()
    finally:
        for thread in model.workers:
            thread.join(timeout=5.0)
