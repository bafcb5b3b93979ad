"""Tolerant reader of `/metrics` pages: Prometheus text 0.0.4 and OpenMetrics.

Engines disagree with their own content type, mix both formats, and sit behind proxies that answer with a web page. So
the two formats are read as one, and a line that cannot be read costs that line, never the scrape. Samples are keyed by
the name they are exposed under (`vllm:prompt_tokens_total`, not its family), because families are where the formats
differ. Values that are not finite are dropped: an engine that says NaN has not measured. Written by hand instead of
with regular expressions: no input can make it backtrack, and a 55 kB page takes a few milliseconds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["MAX_BODY_BYTES", "Exposition", "Histogram", "Labels", "parse"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Bodies above this are refused unread; the largest engine pages are a few hundred kilobytes."""

Labels: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Histogram:
    """One cumulative histogram, as a counter: it only grows until the server restarts.

    Attributes:
        edges: upper bounds in ascending order; the last is infinity.
        cumulative: observations at or below each edge; as long as `edges`.
        sum: sum of all observations in the unit of the metric, or None when not exposed.
    """

    edges: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float | None = None

    @property
    def count(self) -> float:
        """All observations."""
        return self.cumulative[-1]


@dataclass(frozen=True, slots=True)
class Exposition:
    """What one page held.

    Attributes:
        samples: exposed sample name -> (labels, finite value) in page order. Labels may be shared between samples.
        bad_lines: lines that were neither sample, comment nor blank.
        refused: why the body was not read at all, else None.
    """

    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    bad_lines: int = 0
    refused: str | None = None

    def histogram(self, name: str, keep: Callable[[Labels], bool] | None = None) -> Histogram | None:
        """The histogram `name` (without `_bucket`), summed over all label sets except `le`.

        Label sets with different edges are summed over the edges they share: a cumulative count at an edge that one of
        them lacks is not known.

        Args:
            name: as exposed, without suffix.
            keep: which label sets to take; all by default.

        Returns:
            None when there are no readable buckets.
        """
        wanted = keep if keep is not None else _everything
        parts: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
        for labels, value in self.samples.get(name + "_bucket", ()):
            edge = _edge(labels)
            if edge is not None and wanted(labels):
                rest = frozenset(item for item in labels.items() if item[0] != "le")
                parts.setdefault(rest, {})[edge] = value
        # A bucket at infinity may be left out where `_count` says the same.
        for labels, value in self.samples.get(name + "_count", ()):
            part = parts.get(frozenset(labels.items()))
            if part is not None:
                part.setdefault(math.inf, value)
        if not parts:
            return None
        shared = set.intersection(*(set(part) for part in parts.values()))
        if math.inf not in shared:
            return None
        edges = tuple(sorted(shared))
        sums = [value for labels, value in self.samples.get(name + "_sum", ()) if wanted(labels)]
        return Histogram(
            edges=edges,
            cumulative=tuple(sum(part[edge] for part in parts.values()) for edge in edges),
            sum=sum(sums) if sums else None,
        )


def parse(body: bytes | str) -> Exposition:
    """Read a page of metrics. Never raises, whatever the body.

    A web page (first character `<`) gives no samples. A body above `MAX_BODY_BYTES` is refused, and says so.
    """
    if len(body) > MAX_BODY_BYTES:
        return Exposition(refused=f"the body is larger than {MAX_BODY_BYTES >> 20} MiB ({len(body) >> 20} MiB)")
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    lines = text.split("\n")
    if text.lstrip("\ufeff \t\r\n")[:1] == "<":
        return Exposition(bad_lines=sum(1 for line in lines if line.strip()))
    samples: dict[str, list[tuple[Labels, float]]] = {}
    blocks: dict[str, tuple[str, Labels]] = {}
    bad_lines = 0
    for raw in lines:
        line = raw.strip()
        if not line or line[0] == "#":
            continue
        try:
            name, labels, value = _sample(line, blocks)
        except (ValueError, IndexError):
            bad_lines += 1
            continue
        known = samples.get(name)
        if known is None and line[0] != "{" and not _is_metric_name(name):
            bad_lines += 1
        elif math.isfinite(value):
            if known is None:
                known = samples[name] = []
            known.append((labels, value))
    return Exposition(samples=samples, bad_lines=bad_lines)


_NO_LABELS: Labels = {}


def _sample(line: str, blocks: dict[str, tuple[str, Labels]]) -> tuple[str, Labels, float]:
    """Name, labels and value of one line; ValueError or IndexError when it is none.

    `blocks` remembers label blocks already read: engines repeat the same few on every line.
    """
    brace = line.find("{")
    head = line[:brace].rstrip() if brace >= 0 else line
    if brace < 0 or " " in head or "\t" in head:
        # No label block; a brace after the value belongs to an exemplar.
        name, tail = line.split(None, 1)
        return name, _NO_LABELS, _value(tail)
    guess = line.rfind("}")
    block = line[brace : guess + 1]
    known = blocks.get(block)
    if known is not None:
        quoted_name, labels = known
        end = guess
    else:
        quoted_name, labels, end = _scan_block(line, brace + 1)
        if end == guess:
            blocks[block] = (quoted_name, labels)
    if bool(head) == bool(quoted_name):
        raise ValueError(line)
    return head or quoted_name, labels, _value(line[end + 1 :])


def _scan_block(text: str, i: int) -> tuple[str, Labels, int]:
    """Read labels from just after `{`. Returns the quoted metric name (or ""), the labels, and where `}` is."""
    labels: dict[str, str] = {}
    name = ""
    while True:
        i = _skip_blanks(text, i)
        if text[i] == "}":
            return name, labels, i
        if text[i] == '"':
            key, i = _quoted(text, i + 1)
            i = _skip_blanks(text, i)
            if text[i] in ",}":
                # Prometheus 3 writes names outside the old alphabet as a quoted first item.
                if name or not key:
                    raise ValueError(text)
                name = key
                i += text[i] == ","
                continue
        else:
            equals = text.index("=", i)
            key = text[i:equals].rstrip()
            if not (key.isascii() and key.isidentifier()):
                raise ValueError(text)
            i = equals
        if text[i] != "=" or key in labels:
            raise ValueError(text)
        i = _skip_blanks(text, i + 1)
        if text[i] != '"':
            raise ValueError(text)
        labels[key], i = _quoted(text, i + 1)
        i = _skip_blanks(text, i)
        if text[i] == ",":
            i += 1
        elif text[i] != "}":
            raise ValueError(text)


def _skip_blanks(text: str, i: int) -> int:
    while text[i] in " \t":
        i += 1
    return i


_ESCAPES = {"\\": "\\", '"': '"', "n": "\n"}


def _quoted(text: str, i: int) -> tuple[str, int]:
    """The quoted string that begins at `i`, unescaped, and the index after its closing quote."""
    end = text.index('"', i)
    if "\\" not in text[i:end]:
        return text[i:end], end + 1
    parts: list[str] = []
    while text[i] != '"':
        if text[i] == "\\":
            parts.append(_ESCAPES.get(text[i + 1], "\\" + text[i + 1]))
            i += 2
        else:
            parts.append(text[i])
            i += 1
    return "".join(parts), i + 1


def _value(tail: str) -> float:
    """The value in `VALUE [TIMESTAMP] [# EXEMPLAR]`."""
    words = tail.partition("#")[0].split()
    if len(words) > 2:
        raise ValueError(tail)
    if len(words) == 2:
        _number(words[1])
    return _number(words[0])


def _number(word: str) -> float:
    # Python would also accept 1_000 and digits of other scripts.
    if "_" in word or not word.isascii():
        raise ValueError(word)
    return float(word)


def _is_metric_name(name: str) -> bool:
    return name.isascii() and name.replace(":", "_").isidentifier()


def _edge(labels: Labels) -> float | None:
    try:
        edge = _number(labels.get("le", ""))
    except ValueError:
        return None
    return None if math.isnan(edge) else edge


def _everything(_: Labels) -> bool:
    return True
