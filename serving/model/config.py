"""The keys of one model configuration, asked for by type, with errors that name the file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving.errors import ConfigError

__all__ = ["Config", "read_object"]

_MAX_BYTES: Final = 2**22
"""Lists of modules that are not quantised make some configurations long, but not this long."""

_MOST = 2**40
"""Numbers above this one are no sizes of models, and only make figures overflow."""


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration.

    Attributes:
        where: what to call it in errors: its file.
        values: what is in it.
    """

    where: str
    values: Mapping[str, Any]

    def error(self, message: str) -> ConfigError:
        """An error about this configuration."""
        return ConfigError(f"{self.where}: {message}")

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """A whole number under the first of these keys that is there and not null.

        Raises:
            ConfigError: none is there and there is no default, or it is no such number.
        """
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                limits = f"at least {least}" if most == _MOST else f"{least} to {most}"
                raise self.error(f"{key} is {str(value)[:60]!r}; it must be a whole number of {limits}")
            return value
        if default is None:
            raise self.error(f"{keys[0]} is missing")
        return default

    def maybe(self, key: str, *, default: int | None = None, least: int = 1) -> int | None:
        """A whole number that may be null; `default` is for a key that is not there at all."""
        if self.values.get(key) is None:
            return None if key in self.values else default
        return self.count(key, least=least)

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
            raise self.error(f"{key} is {str(value)[:60]!r}; it must be a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {str(value)[:60]!r}; it must be true or false")
        return value

    def words(self, key: str, known: Mapping[str, str], length: int) -> list[str] | None:
        """A list of this many words, each translated by `known`; None if the key is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(f"{key} must say what each of the {length} layers is")
        for word in value:
            if not isinstance(word, str) or word not in known:
                raise self.error(f"{key} has {str(word)[:60]!r}; known: {', '.join(known)}")
        return [known[word] for word in value]

    def numbers(self, key: str, least: int = 0) -> list[int]:
        """A list of whole numbers; empty if the key is not there."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, int) and not isinstance(item, bool) and least <= item <= _MOST for item in value
        ):
            raise self.error(f"{key} must be a list of whole numbers of at least {least}")
        return list(value)

    def per_layer(self, key: str, layer: int, length: int, *, default: int | None = None, least: int = 1) -> int:
        """A whole number for one layer, where the key has one for all or a list with one for each."""
        if not isinstance(self.values.get(key), list):
            return self.count(key, default=default, least=least)
        numbers = self.numbers(key, least)
        if len(numbers) != length:
            raise self.error(f"{key} must have a number for each of the {length} layers")
        return numbers[layer]

    def inner(self, key: str) -> "Config | None":
        """An object inside of it; None if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object")
        return Config(f"{self.where}: {key}", value)

    def objects(self, key: str, length: int) -> "list[Config]":
        """A list of this many objects."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, Mapping) for item in value):
            raise self.error(f"{key} must have an object for each of the {length} layers")
        return [Config(f"{self.where}: {key}[{number}]", item) for number, item in enumerate(value)]


def read_object(path: Path, most_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: it cannot be read, is larger than `most_bytes`, or holds something else.
    """
    try:
        with path.open("rb") as file:
            body = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(body) > most_bytes:
        raise ConfigError(f"{path}: larger than {most_bytes} bytes, which no such file is")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return found
