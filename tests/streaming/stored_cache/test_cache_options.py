"""--cache-dir and --cache-size."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming.cli import load_options, make_parser
from streaming.errors import OptionError
from streaming.options import LoadOptions
from streaming.stored_cache import default_limit_nbytes


def test_the_command_line_says_where_and_how_much() -> None:
    given = make_parser("plan").parse_args(["plan", "m", "--cache-dir", "there", "--cache-size", "2GiB"])
    options = load_options(given)
    assert (options.cache_dir, options.cache_limit_nbytes) == ("there", 2 << 30)


def test_nothing_said_is_none_and_0_is_nothing() -> None:
    assert LoadOptions().cache_limit_nbytes is None
    assert LoadOptions(cache_size=0).cache_limit_nbytes == LoadOptions(cache_size="0").cache_limit_nbytes == 0
    assert LoadOptions(cache_size=1000).cache_limit_nbytes == 1000


@pytest.mark.parametrize("size", ["much", "-1", -1, "0GiB", True, 1.5, ""])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(OptionError, match="--cache-size"):
        LoadOptions(cache_size=size)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for folder in ("", str(tmp_path / "file")):
        with pytest.raises(OptionError, match=f"--cache-dir '{folder}': a folder is needed"):
            LoadOptions(cache_dir=folder)


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "deeper/" * 700])
def test_a_name_that_the_system_refuses_has_a_default_size_too(name: str, tmp_path: Path) -> None:
    assert default_limit_nbytes(tmp_path / name) == default_limit_nbytes(tmp_path)


def test_a_folder_in_which_nothing_may_be_is_refused() -> None:
    with pytest.raises(OptionError, match="--cache-dir there and --cache-size 0"):
        LoadOptions(cache_dir="there", cache_size=0)
