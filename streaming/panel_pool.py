"""Threads that compute the panels of a product beside the thread that asked for it (see quant.panels for why)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from quant.panels import Panel, Workspace, one_thread


class PanelPool:
    """Runs panels on the calling thread and on up to `threads - 1` helpers. One caller at a time.

    `threads` may change between products (fewer while loading): the bits do not depend on it.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._workspace = Workspace()
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def __call__(self, panels: Sequence[Panel]) -> None:
        """Run all panels; raises what the first of them to fail raised, after all have ended."""
        with one_thread():
            helpers = min(self.threads, len(panels)) - 1
            if helpers < 1:
                for panel in panels:
                    panel(self._workspace)
                return
            share = _Share(panels)
            self._call(share, helpers)
            share.take_all(self._workspace)
            share.finish(helpers)

    def _call(self, share: _Share, helpers: int) -> None:
        while len(self._helpers) < helpers:
            thread = threading.Thread(target=self._help, name="firstlayer-panels", daemon=True)
            self._helpers.append(thread)
            thread.start()
        for _ in range(helpers):
            self._shares.put(share)

    def _help(self) -> None:
        torch.set_num_threads(1)
        workspace = Workspace()
        with torch.inference_mode():
            while (share := self._shares.get()) is not None:
                share.take_all(workspace)
                share.ended.put(None)

    def close(self) -> None:
        """End the helpers."""
        for _ in self._helpers:
            self._shares.put(None)
        for thread in self._helpers:
            thread.join()
        self._helpers.clear()


class _Share:
    """One product's panels, taken by whoever is free."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        self._left = iter(panels)  # next() on a list's iterator is atomic under the interpreter lock
        self._error: BaseException | None = None
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take_all(self, workspace: Workspace) -> None:
        for panel in self._left:
            try:
                panel(workspace)
            except BaseException as error:
                self._error = self._error or error

    def finish(self, helpers: int) -> None:
        for _ in range(helpers):
            self.ended.get()
        if self._error is not None:
            raise self._error
