"""Changing a serving file, or writing one with its reasons, without touching what was not to be changed.

A value is replaced where YAML's own parser says that it stands, and nothing else of the file is written anew: comments,
order, quotes, alignment, blank lines, line ends and a byte order mark stay as they are, to the byte. What comes out is
read again before it replaces the file, and must say what was asked and nothing more.
"""

import difflib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from serving.errors import ConfigError
from serving.settings.keys import SETTING_ALIASES, SETTING_KEYS, Scalar, Settings, parse_settings, spelt_value
from serving.settings.versions import locked, read_bytes, replace_bytes

__all__ = ["SettingEntry", "edit_settings", "write_settings"]

Value: TypeAlias = Scalar | Mapping[str, Scalar]
"""A setting, or the inputs of `derived_from`."""

_BOM: Final = "\ufeff"
_WIDTH: Final = 120


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One key of a file to be written: its value and why it is so."""

    key: str
    value: Value
    reason: str = ""


def edit_settings(
    path: str | Path, changes: Mapping[str, Value | None], *, reasons: Mapping[str, str] | None = None
) -> Settings:
    """Change settings in a file, and nothing else in it.

    A key keeps the name under which the file has it. A new key goes to the end, with its reason as a comment; the
    comment of a key that is there already stays, whatever it says. `derived_from` is given whole: inputs that are not
    in it are removed.

    Args:
        path: the file; a link is followed.
        changes: canonical key -> new value, or None to remove its line.
        reasons: canonical key -> why a new key has this value.

    Returns:
        The file as it now reads.

    Raises:
        ConfigError: the file cannot be read, or would not be a serving file that says what was asked.
        RecordError: it cannot be written, or is being written by another process.
    """
    with locked(Path(path)):
        raw = _edited(read_bytes(Path(path)), changes, reasons or {}, str(path))
        replace_bytes(Path(path), raw)
    return parse_settings(raw, path)


def write_settings(
    path: str | Path, entries: Iterable[SettingEntry], *, heading: str = "", overwrite: bool = False
) -> Settings:
    """Write a serving file in which every value has its reason beside it.

    Args:
        path: the file.
        entries: what it says, in this order.
        heading: comment above all.
        overwrite: replace a file that is there; `backup` it first.

    Raises:
        ConfigError: the entries make no serving file, or the file is there.
        RecordError: it cannot be written, or is being written by another process.
    """
    lines = _comment(heading)
    for entry in entries:
        lines += _lines(entry.key, entry.value, entry.reason)
    raw = "".join(f"{line}\n" for line in lines).encode()
    settings = parse_settings(raw, path)
    with locked(Path(path)):
        if not overwrite and Path(path).exists():
            raise ConfigError(f"{path}: exists already; name another file, or say that it may be replaced")
        replace_bytes(Path(path), raw)
    return settings


# ---- text


def _lines(key: str, value: Value, reason: str, indent: str = "") -> list[str]:
    """A key with its value, its reason beside it where there is room and above it where there is not."""
    nested: list[str] = []
    if isinstance(value, Mapping):
        said = f"{indent}{key}:" if value else f"{indent}{key}: {{}}"
        for inner, one in value.items():
            nested += _lines(inner, one, "", f"{indent}  ")
    else:
        said = f"{indent}{key}: {_scalar(value)}"
    reason = _plain(reason)
    if not reason:
        return [said, *nested]
    if len(said) + len(reason) + 4 <= _WIDTH:
        return [f"{said}  # {reason}", *nested]
    return [*(f"{indent}{line}" for line in _comment(reason)), said, *nested]


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.splitlines()
        for line in textwrap.wrap(_plain(paragraph), _WIDTH - 4) or [""]
    ]


def _plain(text: str) -> str:
    """Text as one line without characters that YAML refuses even in comments."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _scalar(value: Scalar, quote: str | None = None) -> str:
    """A value in YAML, safe in braces too. Text takes the quotes that stood there."""
    style = quote if isinstance(value, str) else None
    if isinstance(value, str) and not value.isprintable():
        style = '"'
    told = yaml.safe_dump([value], default_flow_style=True, default_style=style, width=2**31, allow_unicode=True)
    return told.strip().removeprefix("[").removesuffix("]")


# ---- where things stand


@dataclass(slots=True)
class _Entry:
    """A key and its value in the text, by index of character.

    Attributes:
        start: where the key begins.
        value_start, value_end: the value, without blank lines after it.
        quote: the quotes around it, or None.
        inner: the keys of a mapping written one a line; None for other values.
    """

    start: int
    value_start: int
    value_end: int
    quote: str | None = None
    inner: "dict[str, _Entry] | None" = None


def _locate(text: str) -> tuple[dict[str, _Entry], bool, int]:
    """Top-level keys, whether they stand in braces, and the index at which the document ends."""
    events: list[Any] = list(yaml.parse(text, Loader=yaml.SafeLoader))
    root = next(at for at, event in enumerate(events) if isinstance(event, yaml.MappingStartEvent))
    entries, at = _mapping(text, events, root)
    document_end = events[at]
    return entries, bool(events[root].flow_style), document_end.start_mark.index if document_end.explicit else len(text)


def _mapping(text: str, events: list[Any], at: int) -> tuple[dict[str, _Entry], int]:
    """The entries of the mapping whose start is event `at`, and the index of the event after its end."""
    entries: dict[str, _Entry] = {}
    at += 1
    while not isinstance(events[at], yaml.MappingEndEvent):
        key, value = events[at], events[at + 1]
        entry = _Entry(key.start_mark.index, value.start_mark.index, value.end_mark.index)
        if isinstance(value, yaml.MappingStartEvent) and not value.flow_style:
            entry.inner, at = _mapping(text, events, at + 1)
            entry.value_end = max(inner.value_end for inner in entry.inner.values())
        else:
            last, at = _skip(events, at + 1)
            entry.value_end = last.end_mark.index
            if isinstance(value, yaml.ScalarEvent):
                entry.quote = value.style if value.style in ("'", '"') else None
                entry.value_end -= len(text[entry.value_start : entry.value_end]) - len(
                    text[entry.value_start : entry.value_end].rstrip()
                )
        entries[key.value] = entry
    return entries, at + 1


def _skip(events: list[Any], at: int) -> tuple[Any, int]:
    """The last event of the value that begins at event `at`, and the index of the next."""
    depth = 0
    while True:
        event = events[at]
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        at += 1
        if depth == 0:
            return event, at


# ---- the edit


def _edited(raw: bytes, changes: Mapping[str, Value | None], reasons: Mapping[str, str], path: str) -> bytes:
    before = parse_settings(raw, path)
    for key in changes:
        if key not in (*SETTING_KEYS, "derived_from"):
            near = SETTING_ALIASES.get(key) or ", ".join(difflib.get_close_matches(key, SETTING_KEYS, n=1))
            raise ConfigError(f"{path}: {key!r} is no canonical key" + (f"; use {near!r}" if near else ""))
    bare = raw.decode("utf-8-sig")
    mark = _BOM if raw.startswith(_BOM.encode()) else ""
    entries, in_braces, end = _locate(bare)
    newline = "\r\n" if bare[: bare.find("\n") + 1].endswith("\r\n") else "\n"
    page = _Page(bare, newline, path)
    for key, value in changes.items():
        spelling = before.spelt.get(key, key)
        entry = entries.get(spelling)
        if entry is None:
            if value is None:
                continue
            if in_braces:
                raise ConfigError(f"{path}: is written in braces; write one key a line, so that {key} can be added")
            first = min(one.start for one in entries.values())
            page.add(end, _lines(key, value, reasons.get(key, ""), page.indent(first)))
        elif value is None:
            page.remove(spelling, entry)
        elif isinstance(value, Mapping):
            names = {name: before.spelt.get(f"derived_from.{name}", name) for name in value}
            _edit_mapping(page, spelling, entry, {names[name]: one for name, one in value.items()})
        else:
            page.put(entry, spelt_value(spelling, value))
    after = (mark + page.text()).encode()
    _check(before, parse_settings(after, path), changes)
    return after


def _edit_mapping(page: "_Page", key: str, entry: _Entry, value: Mapping[str, Scalar]) -> None:
    inner = entry.inner
    if not inner or not value:
        braces = ", ".join(f"{name}: {_scalar(one)}" for name, one in value.items())
        page.replace(entry, f"{{{braces}}}")
        return
    for name, one in inner.items():
        if name not in value:
            page.remove(f"{key}.{name}", one)
        else:
            page.put(one, value[name])
    indent = page.indent(min(one.start for one in inner.values()))
    fresh = [line for name, one in value.items() if name not in inner for line in _lines(name, one, "", indent)]
    if fresh:
        page.add(page.line_end(entry.value_end), fresh, first=True)


def _check(before: Settings, after: Settings, changes: Mapping[str, Value | None]) -> None:
    """That the file says what was asked, and of all else what it said."""
    wanted: dict[str, Any] = {**before.values(), "derived_from": dict(before.derived_from)}
    for key, value in changes.items():
        if key == "derived_from":
            wanted[key] = dict(value) if isinstance(value, Mapping) else {}
        elif value is None:
            wanted.pop(key, None)
        else:
            wanted[key] = value
    said: dict[str, Any] = {**after.values(), "derived_from": dict(after.derived_from)}
    for key in wanted.keys() | said.keys():
        if wanted.get(key) != said.get(key):
            raise ConfigError(
                f"{before.where(key)}: cannot set {key} to {wanted.get(key)!r} and leave all else as it is: it would "
                f"read {said.get(key)!r}; edit the line by hand"
            )


class _Page:
    """A text and the places at which it is to be changed."""

    def __init__(self, text: str, newline: str, path: str) -> None:
        self._text = text
        self._newline = newline
        self._path = path
        self._cuts: list[tuple[int, int, str]] = []
        self._added: dict[int, list[str]] = {}

    def text(self) -> str:
        """The text with all changes made."""
        text = self._text
        cuts = [*self._cuts, *((place, place, self._joined(place)) for place in self._added)]
        for start, end, fresh in sorted(cuts, reverse=True):
            text = text[:start] + fresh + text[end:]
        return text

    def _joined(self, place: int) -> str:
        fresh = self._newline.join(self._added[place])
        if place == 0 or self._text[place - 1] == "\n":
            return fresh + self._newline
        # The last line has no end; then the new one has none either.
        return self._newline + fresh

    def put(self, entry: _Entry, value: Scalar) -> None:
        """Another value in the place of the old."""
        self.replace(entry, _scalar(value, entry.quote))

    def replace(self, entry: _Entry, fresh: str) -> None:
        """Other text in the place of a value."""
        self._cuts.append((entry.value_start, entry.value_end, fresh))

    def remove(self, name: str, entry: _Entry) -> None:
        """Take out the lines of a key, with the comment on its last."""
        start = self._text.rfind("\n", 0, entry.start) + 1
        if self._text[start : entry.start].strip():
            raise ConfigError(f"{self._path}: {name} does not begin its line; remove it by hand")
        self._cuts.append((start, self.line_end(entry.value_end), ""))

    def add(self, place: int, lines: list[str], *, first: bool = False) -> None:
        """New lines before `place`, which is the end of a line or of the text; `first` of those that go there."""
        there = self._added.get(place, [])
        self._added[place] = [*lines, *there] if first else [*there, *lines]

    def indent(self, place: int) -> str:
        """What stands before the key at `place` on its line."""
        start = self._text.rfind("\n", 0, place) + 1
        before = self._text[start:place]
        return before if not before.strip() else ""

    def line_end(self, place: int) -> int:
        """The index after the end of the line of `place`."""
        end = self._text.find("\n", place)
        return len(self._text) if end < 0 else end + 1
