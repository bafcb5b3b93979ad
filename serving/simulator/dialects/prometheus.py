"""Pages of metrics as the Prometheus client for Python writes them, fast enough to be asked for millions of times.

A page of vLLM has some 650 lines, and between two scrapes only their figures change. So a dialect builds a `Template`
once, with a named hole for each figure, and fills it at each scrape. The order of lines, the sorted labels and the
spelling of numbers are the client's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from serving.exposition import Histogram

__all__ = ["Figure", "Template", "bucket_values", "edges_of", "number"]

Figure: TypeAlias = float | str
"""A figure that never changes, or the name of a hole."""

LabelledFigures: TypeAlias = Iterable[tuple[Mapping[str, str], Figure]]


def edges_of(text: str) -> tuple[float, ...]:
    """Histogram edges, without infinity, from a list with blanks between."""
    return tuple(map(float, text.split()))


def number(value: float) -> str:
    """A sample's value as the client spells it: `8.0`, `1.79596504626e+09`, `+Inf`."""
    value = float(value)
    text = repr(value)
    if -1e6 < value < 1e6:
        return text
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def bucket_values(key: str, histogram: Histogram | None, edges: tuple[float, ...]) -> dict[str, str]:
    """What fills the holes of one histogram: its buckets, sum and count.

    Args:
        key: as given to `Template.histogram`.
        histogram: None when nothing was observed.
        edges: of the template, without infinity.

    Raises:
        ValueError: the histogram has other edges than the dialect says.
    """
    if histogram is None:
        return dict.fromkeys([*(f"{key}_{i}" for i in range(len(edges) + 1)), f"{key}_sum", f"{key}_count"], "0.0")
    if len(histogram.cumulative) != len(edges) + 1 or histogram.edges[:-1] != edges:
        raise ValueError(f"the histogram of {key} has edges {histogram.edges}: count with the dialect's own, {edges}")
    values = {f"{key}_{i}": number(value) for i, value in enumerate(histogram.cumulative)}
    values[f"{key}_sum"] = number(histogram.sum or 0.0)
    values[f"{key}_count"] = number(histogram.cumulative[-1])
    return values


class Template:
    """A page of metrics with holes.

    Args:
        created: value of the `_created` gauges that follow counters, histograms and summaries; None when the engine
            shows none (a server of several processes).
    """

    def __init__(self, created: Figure | None = None) -> None:
        self._created = created
        self._lines: list[str] = []
        self._text: str | None = None

    def gauge(self, name: str, series: LabelledFigures) -> None:
        """A gauge with its label sets."""
        self._family(name, "gauge")
        for labels, figure in series:
            self._sample(name, labels, figure)

    def counter(self, name: str, series: LabelledFigures, *, created: bool = True) -> None:
        """A counter; `name` with `_total`. The client's own counters have no `_created`."""
        listed = list(series)
        self._family(name, "counter")
        for labels, figure in listed:
            self._sample(name, labels, figure)
        if created:
            self._add_created(name.removesuffix("_total"), [labels for labels, _ in listed])

    def histogram(self, name: str, edges: Sequence[float], series: Iterable[tuple[Mapping[str, str], str]]) -> None:
        """A histogram: each label set with the key of its holes (see `bucket_values`)."""
        listed = list(series)
        self._family(name, "histogram")
        for labels, key in listed:
            for i, edge in enumerate((*edges, math.inf)):
                self._sample(f"{name}_bucket", {**labels, "le": number(edge)}, f"{key}_{i}")
            self._sample(f"{name}_count", labels, f"{key}_count")
            self._sample(f"{name}_sum", labels, f"{key}_sum")
        self._add_created(name, [labels for labels, _ in listed])

    def plain_histogram(
        self,
        name: str,
        edges: Sequence[float],
        rows: Iterable[tuple[Mapping[str, str], Figure, Figure]],
        settled_at: float = math.inf,
    ) -> None:
        """A histogram of which only count and sum are known: (labels, count, sum) for each label set.

        All observations count from the edge `settled_at` on.
        """
        listed = list(rows)
        self._family(name, "histogram")
        for labels, count, total in listed:
            for edge in (*edges, math.inf):
                figure = count if edge >= settled_at else 0.0
                self._sample(f"{name}_bucket", {**labels, "le": number(edge)}, figure)
            self._sample(f"{name}_count", labels, count)
            self._sample(f"{name}_sum", labels, total)
        self._add_created(name, [labels for labels, _, _ in listed])

    def summary(self, name: str, series: LabelledFigures) -> None:
        """A summary without quantiles whose sums are 0: each label set with its count."""
        listed = list(series)
        self._family(name, "summary")
        for labels, figure in listed:
            self._sample(f"{name}_count", labels, figure)
            self._sample(f"{name}_sum", labels, 0.0)
        self._add_created(name, [labels for labels, _ in listed])

    def render(self, values: Mapping[str, str]) -> bytes:
        """The page with these values, spelt by `number`, in its holes."""
        if self._text is None:
            self._text = "".join(self._lines)
        return (self._text % values).encode()

    def _add_created(self, name: str, label_sets: list[Mapping[str, str]]) -> None:
        if self._created is None or not label_sets:
            return
        self._family(f"{name}_created", "gauge")
        for labels in label_sets:
            self._sample(f"{name}_created", labels, self._created)

    def _family(self, name: str, kind: str) -> None:
        self._text = None
        words = name.rpartition(":")[2].replace("_", " ")
        self._lines.append(f"# HELP {name} Simulated: {words}.\n# TYPE {name} {kind}\n")

    def _sample(self, name: str, labels: Mapping[str, str], figure: Figure) -> None:
        pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels.items()))
        block = f"{{{pairs}}}".replace("%", "%%") if pairs else ""
        self._lines.append(f"{name}{block} {f'%({figure})s' if isinstance(figure, str) else number(figure)}\n")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
