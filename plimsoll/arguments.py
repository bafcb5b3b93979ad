"""Numbers on the command line, for `argparse`: read, kept within bounds, refused in words that say what to write."""

import argparse
from collections.abc import Callable

__all__ = ["duration", "number", "whole"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_YEAR_SECONDS = 366 * 86400.0


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:60]} is outside {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """Reads a number from `low` to `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:60]} is outside {low:g} to {high:g}")
        return value

    return read


def duration(low: float, high: float = _YEAR_SECONDS) -> Callable[[str], float]:
    """Reads a duration from `low` to `high` seconds, written as 30, 90s, 10m, 1h or 2d."""

    def read(text: str) -> float:
        written, scale = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
        try:
            value = float(written) * scale
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a duration: write 30, 90s, 10m or 1h") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a duration from {low:g} to {high:g} seconds")
        return value

    return read
