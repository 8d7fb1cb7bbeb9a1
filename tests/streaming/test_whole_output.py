"""What a command writes is there whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streaming import cli
from streaming.commands import logits
from streaming.commands.whole_output import Sink, whole_output


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """As on a disk that fills up: the system writes so many bytes of a file and refuses the rest."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_could_not_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "logits.npy"
    path.write_bytes(b"before")
    with (
        pytest.raises(OSError, match="File too large") as caught,
        no_file_larger_than(1000),
        whole_output(path) as file,
    ):
        file.write(bytes(1_000_000))
    assert caught.value.filename == str(path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("logits.npy", b"before")]


def test_logits_that_do_not_fit_on_the_disk_are_one_line_and_no_file(
    four_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def on_a_full_disk(path: Path) -> Iterator[Sink]:
        with no_file_larger_than(1000), whole_output(path) as sink:
            yield sink

    monkeypatch.setattr(logits, "whole_output", on_a_full_disk)
    status = cli.run(["logits", str(four_layers), "--ids", "5,9,2,7", "--out", str(tmp_path / "x.npy"), "--quiet"])
    said = capsys.readouterr().err
    assert (status, said) == (1, f"firstlayer logits: error: {tmp_path / 'x.npy'}: File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    (tmp_path / "plain").write_bytes(b"")
    with whole_output(link) as file:
        file.write(b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_device_is_written_to_as_it_is() -> None:
    with whole_output(Path(os.devnull)) as file:
        file.write(b"x")
    assert not Path(os.devnull).is_file()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole_output(tmp_path / "x") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
