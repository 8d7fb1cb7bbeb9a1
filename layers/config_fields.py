"""Typed reading of a configuration's keys: the wrong JSON type or range is one clear error that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layers.errors import ModelConfigError

LARGEST_INT = 2**31 - 1
LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class Fields:
    """The keys of one JSON object. A key that is absent and a key that is null read the same, but for `has`.

    `called`: what the file calls a key, where that is not its usual name; for messages.
    """

    raw: Mapping[str, Any]
    where: str = "config.json"
    called: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """The same file read by other names: `names` maps the usual name of a key to the one in the file."""
        found = {ours: self.raw[theirs] for ours, theirs in names.items() if theirs in self.raw}
        called = {ours: theirs for ours, theirs in names.items() if theirs in self.raw or ours not in self.raw}
        return Fields({**self.raw, **found}, self.where, {**self.called, **called})

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """The same file with other values for some keys."""
        return Fields({**self.raw, **values}, self.where, self.called)

    def completed(self, values: Mapping[str, Any]) -> Fields:
        """The same file with these values for the keys that it does not have."""
        return self.changed({key: value for key, value in values.items() if key not in self.raw})

    def has(self, key: str) -> bool:
        """Whether the key is there, null included."""
        return key in self.raw

    def positive_int(self, key: str, *, default: int | None = None, largest: int = LARGEST_INT) -> int:
        """An integer from 1 to `largest`; absent without a default is an error."""
        value = self._required(key, default)
        return self._int(key, value, least=1, largest=largest)

    def optional_int(self, key: str, *, least: int = 1) -> int | None:
        """An integer of at least `least`, or None where the key is absent or null."""
        value = self.raw.get(key)
        return None if value is None else self._int(key, value, least=least, largest=LARGEST_INT)

    def int_list(self, key: str) -> tuple[int, ...] | None:
        """One integer or a list of them, none negative."""
        value = self.raw.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        return tuple(self._int(key, entry, least=0, largest=LARGEST_INT) for entry in values)

    def number(self, key: str, *, default: float | None = None, above: float = 0.0) -> float:
        """A finite number greater than `above`; absent without a default is an error."""
        return self._number(key, self._required(key, default), above=above)

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """The same, or None where the key is absent or null."""
        value = self.raw.get(key)
        return None if value is None else self._number(key, value, above=above)

    def numbers(self, key: str, *, count: int) -> tuple[float, ...]:
        """A list of exactly `count` positive numbers."""
        value = self._required(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list of numbers")
        if len(value) != count:
            raise ModelConfigError(f"{self.where}: {self._name(key)} has {len(value)} numbers, {count} are needed")
        return tuple(self._number(key, entry, above=0.0) for entry in value)

    def flag(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string; absent without a default is an error."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, value, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return value

    def wrong(self, key: str, value: object, wanted: str) -> ModelConfigError:
        """The error for a value of the wrong kind."""
        return ModelConfigError(f"{self.where}: {self._name(key)} must be {wanted}, not {shown(value)}")

    def _required(self, key: str, default: object) -> object:
        value = self.raw.get(key)
        if value is None and default is None:
            state = "is null" if key in self.raw else "is missing"
            raise ModelConfigError(f"{self.where}: {self._name(key)} {state}; the model cannot be built without it")
        return default if value is None else value

    def _name(self, key: str) -> str:
        return self.called.get(key, key)

    def _int(self, key: str, value: object, *, least: int, largest: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
            raise self.wrong(key, value, f"an integer from {least} to {largest}")
        return value

    def _number(self, key: str, value: object, *, above: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= LARGEST_NUMBER:
            raise self.wrong(key, value, f"a number greater than {above:g}")
        return float(value)


def shown(value: object) -> str:
    """A value as a message shows it: short, and with its kind where that is what is wrong."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__name__})" if isinstance(value, str | bool | list | dict | float) else text
