"""Text for a model that computes token ids: its tokenizer, opened beside the import of torch, and what it knows."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from layers.sampling_params import SamplingParams
from streaming.chat_template import choose_template, render_chat
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import OptionError, StreamingError
from streaming.generation_config import read_generation_defaults
from streaming.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from streaming.answers import Request
    from streaming.prompt import Prompt


class ModelText:
    """The tokenizer of one checkpoint, and requests made with it. A missing tokenizer is an error only where it is
    needed: prompts that are token ids go without."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: Future[Tokenizer] = Future()
        # A daemon, not an executor's thread: when the main thread is interrupted inside an import, the import lock can
        # stay taken, and a thread that waits for it would keep the process from ending.
        self._thread = threading.Thread(target=self._open, name="firstlayer-tokenizer", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            self._opened.set_result(open_tokenizer(self._checkpoint))
        except BaseException as error:
            self._opened.set_exception(error)

    def close(self) -> None:
        """Wait for the tokenizer's thread, for a moment."""
        self._thread.join(timeout=0.5)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises CheckpointError when there is none."""
        return self._opened.result()

    @property
    def available(self) -> bool:
        """Whether there is one."""
        return self._opened.exception() is None

    def check(self) -> None:
        """Raise StreamingError where answers have no text."""
        if not self.available:
            raise StreamingError(
                "generate gives text, which takes a tokenizer; pieces and complete give token ids: "
                f"{self._opened.exception()}"
            )

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end an answer: those of config.json and generation_config.json, else the tokenizer's own."""
        named = read_generation_defaults(self._checkpoint).eos_ids
        if named or not self.available or self.tokenizer.eos_id is None:
            return named
        return (self.tokenizer.eos_id,)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation under the model's chat template. Raises StreamingError when it has none."""
        tokenizer = self.tokenizer
        template = choose_template(tokenizer.chat_templates)
        special = tokenizer.special_tokens
        text = render_chat(template, list(messages), add_generation_prompt=True, special_tokens=special)
        return tokenizer.encode(text, add_special_tokens=False)

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """A request for each prompt. Of one params each draws its own numbers: seed, seed + 1, ...; several are each
        prompt's. Raises OptionError for another number of them."""
        from streaming.answers import Request

        every = [params] if isinstance(params, SamplingParams) else params
        if not isinstance(params, SamplingParams) and len(params) != len(prompts):
            raise OptionError(
                f"{len(prompts)} prompts and {len(params)} params were given: one for each, or one for all"
            )
        stop_ids: frozenset[int] = frozenset() if all(one.ignore_eos for one in every) else frozenset(self.stop_ids)
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise OptionError("a list of prompts is needed, each text or a list of ids: [[1, 2, 3]] is one prompt")
        found = []
        for index, prompt in enumerate(prompts):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
            own = _own_params(params, index)
            found.append(Request(tuple(ids), own, frozenset() if own.ignore_eos else stop_ids))
        return found

    def decoder_for(self, prompts: Sequence[Prompt]) -> Tokenizer | None:
        """The tokenizer that turns answers into text; None where prompts are ids and the model has none."""
        if any(isinstance(prompt, str) for prompt in prompts):
            return self.tokenizer
        return self.tokenizer if self.available else None


def _own_params(params: SamplingParams | Sequence[SamplingParams], index: int) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        return params[index]
    return params if params.seed is None else replace(params, seed=params.seed + index)
