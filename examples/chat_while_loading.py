"""Ask a model while it loads: the asynchronous face, with a bar that shows which layers are ready.

usage: python examples/chat_while_loading.py [MODEL] [--question TEXT | --ids 1,2,3] [--max-tokens N]

The bar stands on stderr (. not there, + on its way, # ready), the answer on stdout; without --question it is read from
stdin while layers come. What waits for an open model blocks, so it runs in a worker thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from layers.sampling_params import SamplingParams
from streaming import LayerState, Piece, StreamedModel, open_llm
from streaming.chat_template import render_chat
from streaming.cli import parse_ids
from streaming.generate import Request
from streaming.generation_config import read_generation_defaults
from streaming.tokenizer import Tokenizer, open_tokenizer

MARKS = {LayerState.EMPTY: ".", LayerState.LOADING: "+", LayerState.READY: "#"}


@dataclass
class Bar:
    """One line for all layers, written again whenever it looks different."""

    model: StreamedModel
    shown: str = ""

    def draw(self, _layer: str, _state: LayerState) -> None:
        """Called in the event loop's thread at every change."""
        before, self.shown = self.shown, "".join(MARKS[state] for state in self.model.readiness.values())
        if self.shown != before:
            sys.stderr.write(f"[{self.shown}]\n")


def answer(model: StreamedModel, options: argparse.Namespace) -> None:
    """Print the answer piece by piece (blocking): text for a question, token ids for ids."""
    tokenizer = None if options.ids else open_tokenizer(model.prepared.checkpoint)
    ids = options.ids if tokenizer is None else chat_ids(tokenizer, options.question or sys.stdin.readline().strip())
    stop_ids = frozenset(read_generation_defaults(model.prepared.checkpoint).eos_ids)
    request = Request(tuple(ids), SamplingParams(max_tokens=options.max_tokens), stop_ids)
    for event in model.submit([request], tokenizer).results():
        if isinstance(event, Piece):
            print(event.text if tokenizer else event.token_id, end="" if tokenizer else " ", flush=True)
    print()


def chat_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The question in the model's chat template, as token ids."""
    asked, special = [{"role": "user", "content": question}], tokenizer.special_tokens
    text = render_chat(tokenizer.chat_template or "", asked, add_generation_prompt=True, special_tokens=special)
    return tokenizer.encode(text, add_special_tokens=False)


async def chat(options: argparse.Namespace) -> None:
    """Open the model and ask at once."""
    async with open_llm(options.model) as llm:
        model.on_change(Bar(model).draw)
        await anyio.to_thread.run_sync(answer, model, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask a model while it loads.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--question", metavar="TEXT")
    parser.add_argument("--ids", type=parse_ids, metavar="1,2,3", help="a prompt as token ids; needs no tokenizer")
    parser.add_argument("--max-tokens", type=int, default=48)
    anyio.run(chat, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
