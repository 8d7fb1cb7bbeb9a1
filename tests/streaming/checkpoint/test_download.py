"""`firstlayer download`, and the line that is drawn while a model is fetched."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save

from streaming import cli
from streaming.checkpoint import hub_partial
from streaming.checkpoint.hub import Transfer
from streaming.commands.transfer_line import TransferLine, transfer_line
from tests.streaming.checkpoint.build import array, write_gguf
from tests.streaming.checkpoint.conftest import SMALL
from tests.streaming.checkpoint.hub_server import COMMIT, OLDER, Hub

ROOT = Path(__file__).parents[3]
WEIGHTS = save({"x": array(8, 8)})
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def firstlayer(hub: Hub, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: exit status, stdout, stderr. The server has acme/tiny."""
    hub.add("acme/tiny", {**SMALL, "model.safetensors": WEIGHTS, "model.gguf": b"GGUF", "README.md": b"#"})

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.run(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return (status, *capsys.readouterr())

    return run


def test_it_fetches_into_the_cache_and_prints_the_folder(firstlayer: Run, hub: Hub, cache: Path) -> None:
    folder = cache / "models--acme--tiny" / "snapshots" / COMMIT
    assert firstlayer("download", "acme/tiny") == (0, f"{folder}\n", "")
    assert hub.fetched() == ["config.json", "model.safetensors", "tokenizer.json"]
    hub.requests.clear()
    status, out, _ = firstlayer("inspect", "--files", "--json", "acme/tiny")
    assert (status, json.loads(out)["tensors"]) == (0, 1)
    assert hub.requests == []


def test_the_json_holds_what_is_there_and_what_came(firstlayer: Run) -> None:
    total = len(WEIGHTS) + sum(map(len, SMALL.values()))
    for fetched_nbytes in (total, 0):
        status, out, said = firstlayer("download", "acme/tiny", "--json", "--revision", "v1")
        found = json.loads(out)
        assert (status, said) == (0, "")
        assert found["model"] == "acme/tiny"
        assert found["revision"] == "v1"
        assert Path(found["path"]).name == OLDER
        assert found["bytes"] == total
        assert found["bytes_fetched"] == fetched_nbytes
        assert found["files"] == {
            name: len(data) for name, data in sorted({**SMALL, "model.safetensors": WEIGHTS}.items())
        }


def test_the_load_format_says_which_weights(firstlayer: Run, hub: Hub) -> None:
    assert firstlayer("download", "acme/tiny", "--load-format", "gguf")[0] == 0
    assert hub.fetched() == ["config.json", "model.gguf", "tokenizer.json"]
    assert firstlayer("download", "acme/tiny", "--load-format", "npcache")[0] == 1


def test_a_branch_that_moved_on_is_fetched_anew(firstlayer: Run, hub: Hub) -> None:
    first = firstlayer("download", "acme/tiny")[1]
    hub.repos["acme/tiny"].names = {**hub.repos["acme/tiny"].names, "main": OLDER}
    second = firstlayer("download", "acme/tiny")[1]
    assert (Path(first.strip()).name, Path(second.strip()).name) == (COMMIT, OLDER)


def test_offline_it_prints_what_is_there_or_says_what_is_not(
    firstlayer: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = firstlayer("download", "acme/tiny")[1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert firstlayer("download", "acme/tiny") == (0, folder, "")
    status, out, said = firstlayer("download", "acme/tiny@v1")
    assert (status, out) == (1, "")
    assert "HF_HUB_OFFLINE forbids" in said
    assert hub.requests == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["demo"], 2, "nothing to fetch for the demo package's model"),
        (["."], 2, "nothing to fetch for .: a path that exists"),
        (["acme/tiny", "--load-format", "nope"], 2, "unknown --load-format 'nope'"),
        (["acme/tiny", "--quantization", "int8_per_channel"], 2, "unrecognized arguments: --quantization"),
        (["acme/tiny@a", "--revision", "b"], 2, "two revisions are asked for"),
        (["acme/none"], 1, "has no such repository"),
        (["https://host/x/"], 2, "nothing to fetch for https://host/x/: an address"),
        (["acme/tiny", "--load-format", "remote"], 2, "nothing to fetch for format remote"),
        (["tiny"], 1, "not the name of a model on the hub"),
    ],
)
def test_mistakes_are_one_line(firstlayer: Run, hub: Hub, arguments: list[str], status: int, words: str) -> None:
    found = firstlayer("download", *arguments)
    assert found[:2] == (status, "")
    assert words in found[2]
    assert found[2].count("\n") == 1
    assert hub.fetched() == []


def test_a_wrong_option_of_a_load_is_said_before_anything_is_fetched(firstlayer: Run, hub: Hub) -> None:
    for option in (["--quantization", "nope"], ["--load-format", "nope"], ["--memory", "much"]):
        assert firstlayer("plan", "acme/tiny", *option)[0] == 2
    assert hub.requests == []


def test_other_commands_fetch_what_is_not_there(firstlayer: Run, hub: Hub, tmp_path: Path) -> None:
    hub.add("acme/quants", {"a.gguf": write_gguf(tmp_path / "a.gguf").read_bytes(), "b.gguf": b"GGUF"})
    status, out, _ = firstlayer("inspect", "acme/quants/a.gguf", "--json")
    assert status == 0
    assert json.loads(out)["layers"]
    assert hub.fetched() == ["a.gguf"]


def test_an_interrupt_ends_it_though_the_network_says_nothing(hub: Hub, cache: Path) -> None:
    hub.add("acme/tiny", {**SMALL, "model.safetensors": WEIGHTS})
    hub.stalls["model.safetensors"] = 10
    process = subprocess.Popen(
        [sys.executable, "-m", "streaming", "download", "acme/tiny"],
        cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (1, "", "firstlayer download: error: interrupted\n")
    assert not hub.ended.is_set()
    assert not (cache / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors").exists()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_tells_files_bytes_rate_and_what_is_left() -> None:
    state = Transfer(files_done=2, files=3, nbytes_done=1 << 30, nbytes=4 << 30)
    line = transfer_line("acme/tiny", state, seconds=16.0)
    assert line == "acme/tiny  2 of 3 files  1.0 GiB of 4.0 GiB  64.0 MiB/s  48 s left"
    done = Transfer(files_done=3, files=3, nbytes_done=4 << 30, nbytes=4 << 30)
    assert transfer_line("acme/tiny", done, seconds=64.0).endswith("4.0 GiB of 4.0 GiB  64.0 MiB/s")


def test_the_line_is_redrawn_in_place_and_stays_at_the_end() -> None:
    terminal, seconds = Terminal(), iter([0.0, 1.0, 1.0, 1.01, 2.0, 2.0])
    line = TransferLine(terminal, name="m", enabled=True, columns=40, clock=lambda: next(seconds))
    line.tell(Transfer(0, 1, 512, 1024))
    line.tell(Transfer(0, 1, 600, 1024))  # too soon after the first
    line.tell(Transfer(1, 1, 1024, 1024))
    drawn = terminal.getvalue()
    assert drawn.count("\r") == 2
    assert "\n" not in drawn
    assert "600 B" not in drawn
    assert all(len(part) <= 39 + len("\x1b[K") for part in drawn.split("\r"))


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_drawn_where_nobody_looks(stream: io.StringIO, enabled: bool) -> None:
    line = TransferLine(stream, name="m", enabled=enabled)
    line.tell(Transfer(1, 1, 1024, 1024))
    line.close()
    assert stream.getvalue() == ""
    assert line.nbytes_done == 1024


def test_a_file_that_another_process_finished_meanwhile_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our opening it and our lock it became whole, under its own name: there is nothing left to fetch."""
    etag = "e" * 40
    blob, partial = tmp_path / etag, tmp_path / f"{etag}.partial"
    partial.write_bytes(b"whole")
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.replace(partial, blob))
    hub_partial.fetch_one(None, hub_partial.RemoteBlob("http://hub/file", {}, etag, 5), tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == [etag]
    assert blob.read_bytes() == b"whole"
