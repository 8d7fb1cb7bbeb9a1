"""`--model-loader-extra-config`: a JSON object of loader options, read strictly. [no-torch]"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from streaming.errors import OptionError
from streaming.read_strategy import READ_THREADS

OPTION = "--model-loader-extra-config"
MOST_THREADS = 256
_KEYS = ("enable_multithread_load", "num_threads", "enable_weights_track")


@dataclass(frozen=True)
class LoaderOptions:
    """What the object says. `multithreaded`: it asks for a number of reading threads, `threads`."""

    multithreaded: bool = False
    threads: int = READ_THREADS
    weights_track: bool = True  # False: tensors left over are a warning; a parameter that nothing fills stays an error


def parse_loader_options(given: object) -> LoaderOptions:
    """Options from JSON text, a mapping, or None. Raises OptionError naming the key and the value."""
    raw = _object(given)
    if unknown := [key for key in raw if key not in _KEYS]:
        raise OptionError(f"{OPTION}: {unknown[0]!r} is not known; known are {', '.join(_KEYS)}")
    for key in ("enable_multithread_load", "enable_weights_track"):
        if not isinstance(raw.get(key, True), bool):
            raise OptionError(f"{OPTION}: {key} is {raw[key]!r}; true or false is needed")
    threads = raw.get("num_threads", 8)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise OptionError(f"{OPTION}: num_threads is {threads!r}; a whole number from 1 to {MOST_THREADS} is needed")
    enabled = raw.get("enable_multithread_load", "num_threads" in raw)
    if "num_threads" in raw and not enabled:
        raise OptionError(f"{OPTION}: num_threads {threads} does not go with enable_multithread_load false")
    return LoaderOptions(
        bool(enabled), threads if enabled else READ_THREADS, bool(raw.get("enable_weights_track", True))
    )


def _object(given: object) -> Mapping[str, object]:
    if given is None:
        return {}
    found: object = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{OPTION} {given[:80]!r}: is not JSON ({str(error)[:80]})") from None
    if not isinstance(found, Mapping):
        kind = type(found).__name__
        raise OptionError(f'{OPTION}: is a {kind}; a JSON object is needed, such as {{"num_threads": 8}}')
    return found
