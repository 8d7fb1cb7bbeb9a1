"""Progress on a terminal, read back from the screen that a terminal would show."""

from __future__ import annotations

import io
import re

import pytest

from streaming.progress import Progress, Reached, Step, layer_line, ranks_line, totals_line

LAYERS = ("embed", "layers.0", "layers.1", "head")


class Terminal(io.StringIO):
    """A terminal that knows what the progress uses: new lines, carriage return, cursor up, erase to the end."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        lines, row = [""], 0
        for token in re.findall(r"\x1b\[\d*[A-Z]|\n|\r|[^\x1b\n\r]+", self.getvalue()):
            if token == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif token == "\x1b[J":
                lines[row:] = [""]
            elif token.endswith("A"):
                row -= int(token[2:-1])
            elif token != "\r":
                assert not token.startswith("\x1b"), f"unknown sequence {token!r}"
                lines[row] += token
        return lines


class Clock:
    """Seconds that only move when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def started(*, columns: int = 100, enabled: bool = True) -> tuple[Terminal, Clock, Progress]:
    terminal, clock = Terminal(), Clock()
    return terminal, clock, Progress(terminal, layers=LAYERS, enabled=enabled, columns=columns, clock=clock)


def test_a_ready_layer_leaves_its_line_above_those_on_their_way() -> None:
    terminal, clock, progress = started()
    progress.update("embed", Reached.READ, nbytes=54 << 20, seconds=0.114)
    clock.now_s += 1
    progress.update("layers.0", Reached.READ, nbytes=7 << 20, seconds=0.02)
    progress.update("embed", Reached.READY)
    clock.now_s += 1
    progress.update("layers.0", Reached.QUANTIZED, nbytes=3 << 20, seconds=0.051)
    assert terminal.screen == [
        "embed     read 54.0 MiB 0.11 s  ready",
        "layers.0  read 7.0 MiB 0.02 s  quantized 3.0 MiB 0.05 s",
        "1 of 4 layers ready  61.0 MiB read  2.0 s",
        "",
    ]


def test_text_finds_a_clean_line_and_progress_is_silent_after_it() -> None:
    terminal, clock, progress = started()
    for layer in LAYERS:
        clock.now_s += 1
        progress.update(layer, Reached.READ, nbytes=1024)
        progress.update(layer, Reached.READY)
    clock.now_s += 1
    progress.text_begins()
    terminal.write("The sea is")
    written = terminal.getvalue()
    progress.update("embed", Reached.READ, nbytes=1024)
    progress.close()
    progress.text_begins()
    assert terminal.getvalue() == written
    assert terminal.screen == [
        "embed     read 1.0 KiB  ready",
        "layers.0  read 1.0 KiB  ready",
        "layers.1  read 1.0 KiB  ready",
        "head      read 1.0 KiB  ready",
        "4 of 4 layers ready  4.0 KiB read  5.0 s",
        "The sea is",
    ]


def test_closing_after_a_failure_leaves_the_totals_only() -> None:
    terminal, clock, progress = started()
    clock.now_s += 1
    progress.update("embed", Reached.READ, nbytes=5)
    assert len(terminal.screen) == 3
    progress.close()
    assert terminal.screen == ["0 of 4 layers ready  5 B read  1.0 s", ""]


def test_a_model_that_never_began_to_load_leaves_nothing() -> None:
    terminal, _, progress = started()
    progress.close()
    assert terminal.getvalue() == ""


def test_a_note_stands_above_what_is_redrawn() -> None:
    terminal, clock, progress = started()
    clock.now_s += 1
    progress.update("embed", Reached.READ, nbytes=1024)
    progress.note("warning: 61 tensors become bfloat16")
    assert terminal.screen == [
        "warning: 61 tensors become bfloat16",
        "embed     read 1.0 KiB",
        "0 of 4 layers ready  1.0 KiB read  1.0 s",
        "",
    ]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_note_is_written_where_nothing_is_drawn_too(stream: io.StringIO) -> None:
    progress = Progress(stream, layers=LAYERS, enabled=False)
    progress.update("embed", Reached.READ)
    progress.note("warning: look")
    progress.close()
    assert stream.getvalue() == "warning: look\n"


def test_updates_that_come_quickly_are_drawn_together() -> None:
    terminal, clock, progress = started()
    progress.update("embed", Reached.READ)
    progress.update("layers.0", Reached.READ)
    assert terminal.getvalue() == ""
    clock.now_s += 0.06
    progress.update("layers.1", Reached.READ)
    assert [line.split()[0] for line in terminal.screen[:3]] == ["embed", "layers.0", "layers.1"]


def test_the_redrawn_block_stays_below_nine_lines() -> None:
    terminal, clock = Terminal(), Clock()
    layers = [f"layers.{n}" for n in range(30)]
    progress = Progress(terminal, layers=layers, enabled=True, columns=100, clock=clock)
    for layer in layers:
        clock.now_s += 1
        progress.update(layer, Reached.READ)
    assert len(terminal.screen) == 9
    assert terminal.screen[-2].startswith("0 of 30 layers ready")


def test_a_layer_that_is_streamed_again_leaves_no_second_line() -> None:
    terminal, clock, progress = started()
    for _ in range(2):
        clock.now_s += 1
        progress.update("embed", Reached.READ, nbytes=10)
        progress.update("embed", Reached.READY)
    progress.close()
    assert sum(line.startswith("embed") for line in terminal.screen) == 1


def test_a_narrow_terminal_gets_finished_lines_that_fit_and_no_cursor_movement() -> None:
    terminal, clock, progress = started(columns=20)
    clock.now_s += 1
    progress.update("layers.0", Reached.READ, nbytes=7 << 20, seconds=0.02)
    progress.update("layers.0", Reached.READY)
    progress.close()
    assert terminal.getvalue() == "layers.0  read 7.0 \n1 of 4 layers ready\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_finished_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal, clock, progress = started()
    clock.now_s += 1
    progress.update("embed", Reached.READ)
    progress.update("embed", Reached.READY)
    assert terminal.getvalue() == "embed     read  ready\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_written_where_nobody_watches_or_quiet_was_asked(stream: io.StringIO) -> None:
    progress = Progress(stream, layers=LAYERS, enabled=not stream.isatty(), columns=100)
    progress.update("embed", Reached.READ)
    progress.update("embed", Reached.READY)
    progress.text_begins()
    progress.close()
    assert stream.getvalue() == ""


def test_a_terminal_that_went_away_does_not_stop_the_load() -> None:
    terminal, clock, progress = started()
    terminal.close()
    clock.now_s += 1
    progress.update("embed", Reached.READY)
    progress.close()
    assert terminal.closed


def test_an_unknown_layer_is_an_error() -> None:
    _, _, progress = started()
    with pytest.raises(KeyError, match=r"layers\.9"):
        progress.update("layers.9", Reached.READ)


def test_a_layers_line_shows_the_steps_it_has_taken() -> None:
    steps = {Reached.READY: Step(), Reached.READ: Step(7 << 20, 0.021)}
    assert layer_line("layers.3", steps, name_width=9, columns=80) == "layers.3   read 7.0 MiB 0.02 s  ready"
    assert layer_line("head", {}, name_width=4, columns=80) == "head"


def test_the_line_of_totals_is_cut_before_it_wraps() -> None:
    layers = {"embed": {Reached.READ: Step(5 << 29), Reached.READY: Step()}, "head": {}}
    assert totals_line(layers, seconds=3.14159, columns=80) == "1 of 2 layers ready  2.5 GiB read  3.1 s"
    assert len(totals_line(layers, seconds=3.14159, columns=30)) == 29


def test_other_ranks_stand_in_a_line_of_their_own() -> None:
    ranks = {1: ("layers.3", "quantize"), 2: ("", "forward")}
    assert ranks_line(ranks, columns=100) == "rank 1 layers.3 quantize  rank 2 loaded"
    terminal = Terminal()
    progress = Progress(terminal, layers=["layers.0", "layers.1"], enabled=True, columns=100)
    progress.show_ranks(lambda: ranks)
    progress.update("layers.0", Reached.READY)
    assert "rank 1 layers.3 quantize  rank 2 loaded" in terminal.getvalue().splitlines()[-2]
