"""Follow a load from outside: states of layers, waiting for one of them, callbacks when something happens.

usage: python examples/readiness.py [MODEL]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from streaming import LLM, Hooks, LayerState


class Log:
    """Lines with the seconds since the start; callbacks come from the loader's thread."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()

    def line(self, text: str) -> None:
        """Write one line."""
        print(f"{time.monotonic() - self.start_s:7.3f} s  {text}", flush=True)

    def stage(self, layer: str, stage: str, nbytes: int, seconds: float) -> None:
        """The whole layer has passed a stage."""
        if stage != "publish":
            self.line(f"{layer:<10} {stage}: {nbytes:,} bytes, {seconds:.4f} s of work")

    def state(self, layer: str, state: LayerState) -> None:
        """A layer's state has changed."""
        if state is LayerState.READY:
            self.line(f"{layer:<10} ready")


def follow(model: str) -> None:
    """Load the model and tell what happens."""
    log = Log()
    with LLM(model, hooks=Hooks(on_stage=log.stage)) as llm:
        llm.on_change(log.state)
        log.line(f"opened: {len(llm.readiness)} layers, none of which need be there yet")
        if not llm.wait_ready("head", timeout=0.01):
            log.line("the head is not ready within 10 ms")
        llm.wait_ready(0)  # an int counts decoder layers; an error of the load would be raised here
        log.line("the first decoder layer can be used")
        llm.wait_loaded()
        log.line(f"all ready: {', '.join(name for name, state in llm.readiness.items() if state is LayerState.READY)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Follow a load from outside.")
    parser.add_argument("model", nargs="?", default="demo")
    follow(parser.parse_args(arguments).model)


if __name__ == "__main__":
    main()
