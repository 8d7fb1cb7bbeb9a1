"""Stop ids and stop strings: never printed, held back while undecided, the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streaming.errors import OptionError
from streaming.stopping import StopChecker


def test_a_stop_id_ends_the_answer_and_what_was_held_back_belongs_to_it() -> None:
    checker = StopChecker([2, 7], ["###"])
    assert not checker.check_id(5)
    assert checker.push("one #") == "one "
    assert checker.check_id(7)
    assert (checker.stopped, checker.matched) == (True, 7)
    assert checker.push("#") == ""  # the detokenizer's rest; it might still complete "###"
    assert checker.finish() == "##"


def test_a_stop_string_across_pieces_is_cut_off_with_all_that_follows() -> None:
    checker = StopChecker(stop_strings=["\nUser:"])
    assert [checker.push(text) for text in ("Hi", "\n", "Us", "er", ": more")] == ["Hi", "", "", "", ""]
    assert checker.matched == "\nUser:"
    assert checker.push("later") == ""
    assert checker.finish() == ""


def test_a_beginning_that_is_none_is_let_through() -> None:
    checker = StopChecker(stop_strings=["aab"])
    assert [checker.push(text) for text in ("xa", "a", "a", "c")] == ["x", "", "a", "aac"]
    assert checker.push("aa") + checker.finish() == "aa"
    assert not checker.stopped


def test_what_ends_first_counts_and_of_those_the_longest() -> None:
    assert _answer("xabcd", ["abcd", "bc"], [5]) == ("xa", "bc")
    assert _answer("xabcd", ["c", "abc"], [5]) == ("x", "abc")


def test_one_text_is_taken_as_one_stop_string() -> None:
    assert StopChecker(stop_strings="END").stop_strings == ("END",)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(OptionError, match="a stop string is empty, which would stop before the first word"):
        StopChecker(stop_strings=["", "x"])


def test_without_stop_strings_everything_comes_at_once() -> None:
    checker = StopChecker([2])
    assert (checker.push("abc"), checker.finish()) == ("abc", "")


_TEXT = st.text("ab\n#", max_size=12)


@settings(deadline=None)
@given(
    text=_TEXT, stops=st.lists(st.text("ab\n#", min_size=1, max_size=4), max_size=3), cuts=st.lists(st.integers(1, 4))
)
@example(text="aab", stops=["ab", "aaa"], cuts=[1, 1, 1])
def test_the_answer_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, negative_length, matched = min(ends) if ends else (len(text), 0, None)
    assert _answer(text, stops, cuts) == (text[: end + negative_length], matched)


def _answer(text: str, stops: list[str], cuts: list[int]) -> tuple[str, int | str | None]:
    """What is let through of `text`, given in pieces of the lengths `cuts`, then the rest; and what was met."""
    checker, printed = StopChecker(stop_strings=stops), ""
    for cut in [*cuts, len(text)]:
        printed += checker.push(text[:cut])
        text = text[cut:]
    return printed + checker.finish(), checker.matched
