"""Fetching a model into the hub's cache with the hub's own client, which is imported here alone. [no-torch]

What is asked for is decided by us, from the repository's list of files; how it is fetched (addresses, tokens, locks,
a connection that is cut and taken up again where it ended) is the client's work. HF_ENDPOINT and HF_TOKEN are its.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming.checkpoint import hub_folder, hub_partial
from streaming.checkpoint.hub import HubId, Tell, Transfer, hub_cache, read_repo_index, repo_folder, with_file
from streaming.checkpoint.parts import Part, check_has_part
from streaming.checkpoint.wanted_files import small_files, weight_files
from streaming.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from types import ModuleType

_PUBLIC_HUB = "https://huggingface.co"
_INTERRUPTED_S = 2.0  # how long an interrupted fetch may take to remove its half files


def fetch_snapshot(
    model: HubId, *, load_format: str = "auto", tell: Tell | None = None, part: Part = Part.LANGUAGE
) -> tuple[Path, HubId]:
    """Fetch what a load format needs of this part of a model; its folder in the cache, and the model with its one
    file, where it was asked for by a quantization. Files that are there are not fetched again.

    The small files come first, so that the index decides which weights are asked for. Raises CheckpointError with the
    reason in words; an interrupt ends it soon, and whole files stay.
    """
    client = _client(model)
    with _in_words(client, model):
        commit, sizes = _list_files(client, model)
        model = with_file(model, sizes)
        fetch = _Fetch(client, model, commit, sizes, tell)
        return _fetch_chosen(fetch, model, commit, sizes, load_format, part), model


def fetch_folder(
    model: HubId, folder: Path, *, load_format: str = "auto", tell: Tell | None = None
) -> tuple[Path, HubId]:
    """The same into a plain folder, which is made where it is not there. Raises likewise."""
    client = _client(model)
    with _in_words(client, model, into=folder):
        commit, sizes = _list_files(client, model)
        model = with_file(model, sizes)
        fetch = _Fetch(client, model, commit, sizes, tell, into=folder)
        return _fetch_chosen(fetch, model, commit, sizes, load_format, Part.LANGUAGE), model


def _fetch_chosen(
    fetch: _Fetch, model: HubId, commit: str, sizes: dict[str, int], load_format: str, part: Part
) -> Path:
    chosen = weight_files(sizes, load_format=load_format, file=model.file)  # no weights: said before any is fetched
    folder = fetch.run(small_files(sizes), revision=model.revision)  # by its name: the cache notes what it means
    check_has_part(folder, part)
    if model.file is None and (index := read_repo_index(folder, chosen, sizes, part=part)) is not None:
        chosen = weight_files(sizes, load_format=load_format, index=index)
    return fetch.run([name for name in chosen if name in sizes], revision=commit)


def _client(model: HubId) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.file_download  # the package itself loads its modules when a name of theirs is asked for
        import huggingface_hub.utils
    except ImportError as error:
        raise CheckpointError(
            f"{model.repo} is not in the hub's cache {hub_cache()}, and fetching it needs: pip install huggingface_hub"
        ) from error
    return huggingface_hub


def _endpoint() -> str | None:
    """HF_ENDPOINT as it is now; the client would go by what it was when it was imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _list_files(client: Any, model: HubId) -> tuple[str, dict[str, int]]:
    """The commit that the revision stands for, and name -> size in bytes of every file in it."""
    api = client.HfApi(endpoint=_endpoint())
    info = api.model_info(model.repo, revision=model.revision, files_metadata=True)
    return info.sha or model.revision, {file.rfilename: file.size or 0 for file in info.siblings or ()}


class _Fetch:
    """Some files of one repository, in several rounds that are counted as one."""

    def __init__(
        self,
        client: Any,
        model: HubId,
        commit: str,
        sizes: dict[str, int],
        tell: Tell | None,
        *,
        into: Path | None = None,
    ) -> None:
        """`into`: a plain folder in place of the cache."""
        self._client, self._model, self._sizes, self._into = client, model, sizes, into
        self._commit, self._there = commit, repo_folder(model) / "snapshots" / commit
        self._meter = _Meter(tell)

    def run(self, names: Collection[str], *, revision: str) -> Path:
        """Fetch these files; the folder that has them. An interrupt waits for the threads to notice it."""
        absent = [name for name in names if self._into is not None or not (self._there / name).exists()]
        missing = {name: self._sizes[name] for name in absent}
        self._meter.expect(missing)
        large = [name for name, nbytes in missing.items() if nbytes >= hub_partial.LARGE_NBYTES]
        outcome: list[Path | BaseException] = []
        work = partial(self._download, names, large, revision, outcome)
        thread = threading.Thread(target=work, daemon=True, name="fetch")
        thread.start()
        try:
            thread.join()
        except BaseException:
            self._meter.cancel()
            thread.join(_INTERRUPTED_S)
            raise
        (found,) = outcome
        if isinstance(found, BaseException):
            raise found
        return found

    def _download(
        self, names: Collection[str], large: list[str], revision: str, outcome: list[Path | BaseException]
    ) -> None:
        bar_class = _bar_class(self._meter)
        try:
            if self._into is not None:
                hub_folder.fetch_files(
                    self._client, self._model, names, self._into, commit=self._commit, endpoint=_endpoint(),
                    make_bar=lambda: bar_class(unit="B", large=True), done=lambda: self._meter.add_files(1),
                )  # fmt: skip
                outcome.append(self._into)
                return
            if large:
                hub_partial.fetch_large(
                    self._client, self._model, large, revision=revision, endpoint=_endpoint(),
                    make_bar=lambda: bar_class(unit="B", large=True),
                )  # fmt: skip
            folder = self._client.snapshot_download(
                self._model.repo,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=[glob.escape(name) for name in names],
                endpoint=_endpoint(),
                tqdm_class=bar_class,
            )
            outcome.append(Path(folder))
        except BaseException as error:  # carried to whoever waits
            outcome.append(error)


class _CancelledError(Exception):
    """Raised in the client's threads when nobody waits for them any more."""


class _Meter:
    """Adds up what the client's bars are told, and passes it on."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._files = self._files_done = self._nbytes = self._earlier = 0
        self._bars: dict[int, int] = {}  # bytes by each bar of this round: one counts what came, one what was written
        self._large_nbytes = 0  # of files that come by way of `hub_partial`
        self._cancelled = False

    def expect(self, files: dict[str, int]) -> None:
        """Another round: so many files and bytes more."""
        with self._lock:
            self._earlier += max(self._bars.values(), default=0)
            self._bars.clear()
            self._files += len(files)
            self._nbytes += sum(files.values())

    def had(self, nbytes: int) -> None:
        """So many of the bytes expected are there from an earlier run."""
        with self._lock:
            self._nbytes -= nbytes

    def cancel(self) -> None:
        """Whoever tells anything from now on is stopped."""
        self._cancelled = True

    def add_files(self, count: int) -> None:
        """So many files are done."""
        with self._lock:
            self._files_done = min(self._files_done + count, self._files)
        self._pass_on()

    def add_bytes(self, count: int, *, bar: int | None) -> None:
        """A bar of the client has moved, or (None) bytes of a large file have come. _CancelledError after `cancel`."""
        if self._cancelled:
            raise _CancelledError
        with self._lock:
            if bar is None:
                self._large_nbytes += count
            else:
                self._bars[bar] = self._bars.get(bar, 0) + count
        self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            done = self._earlier + self._large_nbytes + max(self._bars.values(), default=0)
            state = Transfer(self._files_done, self._files, max(0, min(done, self._nbytes)), self._nbytes)
        if self._tell is not None:
            self._tell(state)


def _bar_class(meter: _Meter) -> type:
    """What the client takes for its progress bars: it draws nothing, and tells the meter."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._of_bytes, self._large = options.get("unit") == "B", options.pop("large", False)
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._of_bytes:
                meter.add_bytes(int(n or 0), bar=None if self._large else id(self))
            else:
                meter.add_files(int(n or 0))

        def had(self, nbytes: int) -> None:
            meter.had(nbytes)

    return Bar


# --- what went wrong, in words ---------------------------------------------------------------------------------------


@contextmanager
def _in_words(client: Any, model: HubId, *, into: Path | None = None) -> Iterator[None]:
    """The client's errors as one line, and its warnings (which would draw into the progress line) held back."""
    logger = logging.getLogger(client.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except OptionError:
        raise  # what was asked for cannot be; nothing went wrong with the fetch
    except Exception as error:  # the client's own, its http library's, the system's: all mean "not fetched"
        if into is not None:
            raise CheckpointError(
                f"{model.repo}: revision {model.revision!r} could not be fetched into {into}: {_reason(error, model)}"
            ) from error
        raise CheckpointError(
            f"{model.repo}: no such file or folder here ({Path.cwd()}), not whole in the hub's cache "
            f"({repo_folder(model)}), and revision {model.revision!r} could not be fetched: {_reason(error, model)}"
        ) from error
    finally:
        logger.setLevel(level)


def _reason(error: BaseException, model: HubId) -> str:
    hub = _endpoint() or _PUBLIC_HUB
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds:
        return f"it is gated: ask for access at {hub}/{model.repo} and give your token in HF_TOKEN (status {status})"
    if "RevisionNotFoundError" in kinds:
        return f"it has no such branch, tag or commit (status {status})"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{hub} has no such repository, or it is private and HF_TOKEN does not hold a token that may read it "
            f"(status {status})"
        )
    if status in (401, 403):
        return f"{hub} refuses it (status {status}): HF_TOKEN should hold a token that may read it"
    if status is not None:
        return f"{hub} answered with status {status}: {_first_line(error)}"
    if "LocalEntryNotFoundError" in kinds and error.__cause__ is not None:
        return _reason(error.__cause__, model)  # what the client met before it looked for the file in the cache
    if kinds & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout"}:
        return f"{hub} cannot be reached: {_first_line(error)}; with HF_HUB_OFFLINE=1 it is not asked"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
