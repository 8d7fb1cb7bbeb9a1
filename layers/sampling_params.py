"""How the next token is chosen: the options, checked when they are made. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request. Every combination that the checks let through is honoured.

    temperature: 0 takes the likeliest token; else logits are divided by it.
    top_k: keep the k likeliest tokens (0: all).
    top_p: keep the likeliest tokens that together reach this probability (1: all).
    min_p: keep tokens at least this fraction as likely as the likeliest (0: all).
    repetition_penalty: above 1 makes tokens that already occurred, in the prompt too, less likely; 1 is off.
    seed: makes a sampled run repeatable; None takes a fresh one.
    max_tokens: tokens to generate at most.
    stop: texts that end the answer where the first of them is complete; they are not part of it.
    ignore_eos: go on behind the ids with which the model ends an answer.
    speculate: tokens that are guessed at most and checked in one pass with the last one (0: none); the answer stays
    what temperature 0 gives. Goes with temperature 0 alone.

    Raises ValueError, naming the option, its value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculate: int = 0

    def __post_init__(self) -> None:
        for name, limits in _RANGES.items():
            _check(name, getattr(self, name), *limits)
        _check_stop(self.stop)
        _check_flag("ignore_eos", self.ignore_eos)
        if self.speculate and not self.is_greedy:
            raise ValueError(
                f"speculate is {self.speculate} and temperature is {self.temperature}: guessed tokens are checked "
                "against the likeliest one, so speculate goes with temperature 0 alone"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that no random number is drawn."""
        return self.temperature == 0.0


# option -> (whether it is an integer, least, whether the least itself is allowed, largest)
_RANGES: dict[str, tuple[bool, float, bool, float]] = {
    "temperature": (False, 0, True, 1e6),
    "top_k": (True, 0, True, 2**31 - 1),
    "top_p": (False, 0, False, 1),
    "min_p": (False, 0, True, 1),
    "repetition_penalty": (False, 0, False, 1e6),
    "seed": (True, 0, True, 2**63 - 1),
    "max_tokens": (True, 1, True, 2**31 - 1),
    "speculate": (True, 0, True, 64),
}


def _check(name: str, value: object, is_integer: bool, least: float, including: bool, largest: float) -> None:
    if value is None and name == "seed":
        return
    wanted = _described(is_integer, least, including, largest)
    if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float):
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")
    if not least <= value <= largest or (value == least and not including):
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")


def _check_stop(value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"stop is {value!r}: it must be a tuple of texts that are not empty")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def _described(is_integer: bool, least: float, including: bool, largest: float) -> str:
    kind = "an integer" if is_integer else "a number"
    low = f"of at least {least:g}" if including else f"greater than {least:g}"
    return f"{kind} {low} and at most {int(largest)}"
