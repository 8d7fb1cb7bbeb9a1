"""`AsyncLLM`: a streamed model in the caller's own event loop. Made by `open_llm`; importing this needs no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from layers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streaming.answers import Completion, Piece
    from streaming.forward_thread import Job
    from streaming.model import StreamedModel
    from streaming.model_text import ModelText
    from streaming.prompt import Prompt
    from streaming.residency import LayerState
    from streaming.stats import Summary

T = TypeVar("T")


@dataclass(frozen=True)
class AsyncLLM:
    """The same as `LLM`, awaited. `model` is what both stand on; `text` its tokenizer."""

    model: StreamedModel
    text: ModelText

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[str]:
        """The answer to one prompt (text or token ids), piece by piece, the first as early as it can be.

        Raises StreamingError for a model without a tokenizer, whose answers have no text: see `pieces`, `complete`.
        """
        async with aclosing(self.pieces([prompt], params)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text
                else:
                    self.text.check()

    async def pieces(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The answers to several prompts, which share each layer's arrival. Leaving the loop early cancels the rest."""
        from streaming.answers import Piece

        async with aclosing(self._events(prompts, params)) as events:
            async for event in events:
                if isinstance(event, Piece):
                    yield event

    async def complete(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Finished answers, in the order of the prompts; `params` and what takes turns as for LLM."""
        from streaming.answers import Completion

        async with aclosing(self._events(prompts, params)) as events:
            found = [event async for event in events if isinstance(event, Completion)]
        return sorted(found, key=lambda completion: completion.index)

    async def _events(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> AsyncGenerator[Piece | Completion, None]:
        job = await _in_thread(partial(self._submit, prompts, params or SamplingParams()))
        try:
            while (event := await _in_thread(job.next_result)) is not None:
                yield event
        finally:
            job.cancel()

    def _submit(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> Job:
        return self.model.submit(self.text.requests(prompts, params), self.text.decoder_for(prompts))

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation under the model's chat template."""
        return await _in_thread(partial(self.text.chat_prompt, messages))

    @property
    def readiness(self) -> Mapping[str, LayerState]:
        """The state of every layer now ("embed", "layers.0" ... "head"), in the order of use."""
        return self.model.readiness

    async def wait_ready(self, layer: int | str) -> None:
        """Return when a layer is ready (an int counts decoder layers). Raises what ended the load."""
        await _in_thread(partial(self.model.wait_ready, layer))

    async def wait_loaded(self) -> None:
        """Return when every layer is ready; raises what ended the load."""
        await _in_thread(self.model.wait_loaded)

    def on_change(self, callback: Callable[[str, LayerState], None]) -> None:
        """Call `callback(layer, state)` at every change from now on, in the event loop (on several ranks, also in the
        thread that hears of the others): it must be short."""
        self.model.on_change(callback)

    async def set_memory(self, memory: str | int) -> None:
        """Keep the model within another memory limit, as `LLM.set_memory` does."""
        from streaming.set_memory import set_memory

        await _in_thread(partial(set_memory, self.model, memory))

    def stats(self) -> Summary:
        """What is known of the run now."""
        return self.model.stats()


async def _in_thread(call: Callable[[], T]) -> T:
    """Wait for a call that blocks. Cancelling abandons it: closing the model, or the job's cancellation, ends it."""
    import anyio.to_thread

    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
