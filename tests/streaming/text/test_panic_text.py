"""A package's panic is one line of ours, and what others say meanwhile is not lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from streaming.errors import CheckpointFormatError
from streaming.fast_tokenizer import load_tokenizer
from streaming.panic_text import without_panic_text
from streaming.tokenizer_config import TokenizerSettings
from tests.streaming.test_strangers_files import MODEL, NAMELESS, TOKENIZER

CHARSMAP = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
NO_SUCH_TOKEN = {"post_processor": NAMELESS, "model": {**MODEL, "unk_token": "b"}}


class PanicException(BaseException):
    """Has the name that PyO3's has."""


@pytest.mark.parametrize("changes", [CHARSMAP, NO_SUCH_TOKEN])
def test_a_tokenizer_that_makes_the_package_panic_writes_nothing_to_the_screen(
    changes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**TOKENIZER, **changes}))
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json: "):
        load_tokenizer(path, settings=TokenizerSettings()).encode("a", add_special_tokens=True)
    os.write(2, b"after\n")
    assert capfd.readouterr() == ("", "after\n")


def test_what_is_written_meanwhile_comes_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    def say(text: bytes, then: BaseException | None = None) -> None:
        with without_panic_text():
            os.write(2, text)
            if then is not None:
                raise then

    say(b"a warning\n")
    with pytest.raises(ValueError, match="no panic"):
        say(b"another\n", ValueError("no panic"))
    with pytest.raises(PanicException):
        say(b"thread panicked\n", PanicException())
    assert capfd.readouterr().err == "a warning\nanother\n"


def test_descriptors_are_given_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with without_panic_text(), without_panic_text():
            pass
    assert set(os.listdir("/proc/self/fd")) <= before  # those of others may go meanwhile
