"""Ask a model while it loads: the asynchronous face, with a bar that shows which layers are ready.

usage: python examples/chat_while_loading.py [MODEL] [--question TEXT | --ids 1,2,3] [--max-tokens N]

The bar stands on stderr (. not there, + on its way, # ready), the answer on stdout; without --question it is read from
stdin while layers come.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from layers.sampling_params import SamplingParams
from streaming import AsyncLLM, LayerState, open_llm
from streaming.cli import parse_ids

MARKS = {LayerState.EMPTY: ".", LayerState.LOADING: "+", LayerState.READY: "#"}


@dataclass
class Bar:
    """One line for all layers, written again whenever it looks different."""

    llm: AsyncLLM
    shown: str = ""

    def draw(self, _layer: str, _state: LayerState) -> None:
        """Called in the event loop at every change."""
        before, self.shown = self.shown, "".join(MARKS[state] for state in self.llm.readiness.values())
        if self.shown != before:
            sys.stderr.write(f"[{self.shown}]\n")


async def chat(options: argparse.Namespace) -> None:
    """Open the model and ask at once."""
    async with open_llm(options.model) as llm:
        llm.on_change(Bar(llm).draw)
        prompt = options.ids
        if prompt is None:
            question = options.question or (await anyio.to_thread.run_sync(sys.stdin.readline)).strip()
            prompt = await llm.chat_prompt([{"role": "user", "content": question}])
        async for piece in llm.pieces([prompt], SamplingParams(max_tokens=options.max_tokens)):
            print(piece.text if llm.text.available else f"{piece.token_id} ", end="", flush=True)
        print()


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
