"""`plimsoll settings ACTION FILE`: what a serving file says, said before, and would say to an engine."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from plimsoll.report import clean
from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.settings import (
    Backup,
    Scalar,
    Settings,
    backup,
    diff,
    engine_arguments,
    read_settings,
    restore,
    stale_warning,
    stored_settings,
    versions,
)

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """actions:
  show FILE            what the file says under canonical keys, and whether its batch size is stale
  arguments FILE       the flags that say the same to an engine
  backup FILE          store the file as it is, beside it
  versions FILE        what is stored
  diff FILE [OTHER]    against another file or a stored version (default: the newest); 1 where they differ
  restore FILE N       put version N back; what the file says now is stored first

examples:
  plimsoll settings show hy3-serving.yaml
  plimsoll settings arguments hy3-serving.yaml --engine sglang
  plimsoll settings backup hy3-serving.yaml --reason 'before expert parallelism 4'
  plimsoll settings diff hy3-serving.yaml 3
  plimsoll settings restore hy3-serving.yaml 3"""

_DIFFERENT: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do")
    parser.add_argument("file", metavar="FILE", type=Path, help="serving settings (docs/settings.md)")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="diff: another file or a version; restore: a version")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="arguments: whose flags (default: the file's engine)")
    parser.add_argument("--reason", default="", metavar="TEXT", help="backup, restore: why, kept with the version")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 where `diff` found a difference."""
    if arguments.other is not None and arguments.action not in ("diff", "restore"):
        raise ConfigError(f"{arguments.action} takes one FILE, and {arguments.other[:60]!r} is another")
    document, lines, warning = _ACTIONS[arguments.action](arguments)
    if arguments.json:
        print(json.dumps({"schema": "plimsoll.settings/1", "action": arguments.action, **document}, allow_nan=False))
    else:
        for line in lines:
            print(line)
    if warning is not None:
        print(f"warning: {clean(warning)}", file=sys.stderr)
    return _DIFFERENT if document.get("differences") else 0


_Outcome = tuple[dict[str, Any], list[str], str | None]
"""A document for programs, lines for people, and what both should be warned of."""


def _show(arguments: argparse.Namespace) -> _Outcome:
    settings = read_settings(arguments.file)
    values = settings.values()
    rows = [
        (key, _told(value), str(settings.lines[key]), "" if settings.spelt[key] == key else settings.spelt[key])
        for key, value in values.items()
    ]
    inputs = [
        (f"  {key}", _told(value), str(settings.lines[f"derived_from.{key}"]), "")
        for key, value in settings.derived_from.items()
    ]
    header = [("setting", "value", "line", "as")]
    origin = [("derived from", "", str(settings.lines["derived_from"]), "")] if inputs else []
    document = {
        "file": str(arguments.file),
        "settings": values,
        "lines": dict(settings.lines),
        "spelt": dict(settings.spelt),
        "derived_from": dict(settings.derived_from),
        "stale": [asdict(one) for one in settings.stale],
    }
    return document, _columns([*header, *rows, *origin, *inputs]), stale_warning(settings)


def _arguments(arguments: argparse.Namespace) -> _Outcome:
    settings = read_settings(arguments.file)
    told = engine_arguments(settings, arguments.engine)
    lines = [shlex.join(told.words)]
    lines += [f"# not said: {key}: {reason}" for key, reason in told.left_out.items()]
    document = {
        "file": str(arguments.file),
        "engine": told.engine,
        "arguments": list(told.words),
        "left_out": dict(told.left_out),
    }
    return document, lines, stale_warning(settings)


def _backup(arguments: argparse.Namespace) -> _Outcome:
    settings = read_settings(arguments.file)
    one = backup(arguments.file, reason=arguments.reason)
    again = f", stored {len(one.uses)} times" if len(one.uses) > 1 else ""
    document = {"file": str(arguments.file), "version": _described(one)}
    return document, [clean(f"version {one.version}: {one.path}{again}")], stale_warning(settings)


def _versions(arguments: argparse.Namespace) -> _Outcome:
    stored = versions(arguments.file)
    if not stored and not arguments.file.exists():
        raise ConfigError(f"{arguments.file}: there is no such file, and no stored version of one")
    rows = [("version", "hash", "stored", "reason")]
    for one in stored:
        for use in one.uses or (None,):
            told = ("unknown", "") if use is None else (use.at, use.reason)
            rows.append((str(one.version), one.sha256[:12], *told))
    document = {"file": str(arguments.file), "versions": [_described(one) for one in stored]}
    return document, _columns(rows) if stored else ["no version is stored"], None


def _diff(arguments: argparse.Namespace) -> _Outcome:
    now = read_settings(arguments.file)
    was = _other(arguments.file, arguments.other)
    differences = diff(was, now)
    rows = [
        (one.key, f"{_told(one.was)}{_at(one.was_line)}", f"{_told(one.now)}{_at(one.now_line)}") for one in differences
    ]
    lines = _columns([("setting", was.path, now.path), *rows]) if rows else [f"no setting differs from {was.path}"]
    document = {"was": was.path, "now": now.path, "differences": [asdict(one) for one in differences]}
    return document, lines, stale_warning(now)


def _restore(arguments: argparse.Namespace) -> _Outcome:
    version = _version(arguments.other)
    if version is None:
        raise ConfigError("restore needs the number of a version: `plimsoll settings versions FILE` lists them")
    one = restore(arguments.file, version, reason=arguments.reason)
    settings = read_settings(arguments.file)
    document = {"file": str(arguments.file), "version": _described(one)}
    return document, [f"{clean(str(arguments.file))}: version {one.version} is back"], stale_warning(settings)


_ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], _Outcome]]] = {
    "show": _show,
    "arguments": _arguments,
    "backup": _backup,
    "versions": _versions,
    "diff": _diff,
    "restore": _restore,
}


def _other(file: Path, named: str | None) -> Settings:
    """What a file is compared with: a stored version, the newest where none is named, or another file."""
    version = _version(named)
    if version is not None:
        return stored_settings(file, version)
    if named is not None:
        return read_settings(named)
    stored = versions(file)
    if not stored:
        raise ConfigError(f"{file}: no version of it is stored; name another file to compare with")
    return stored_settings(file, stored[-1].version)


def _version(named: str | None) -> int | None:
    """The number of a version, where that is what was given."""
    return int(named) if named is not None and named.isascii() and named.isdigit() and len(named) < 10 else None


def _described(one: Backup) -> dict[str, Any]:
    return asdict(one) | {"uses": [asdict(use) for use in one.uses]}


def _told(value: Scalar | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _at(line: int | None) -> str:
    return "" if line is None else f" (line {line})"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cleaned = [[" " * (len(cell) - len(cell.lstrip())) + clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cleaned]
