"""Adding up request records: counts, percentiles, throughput and goodput. Pure; definitions as in docs/measurement.md.

Percentiles come from our own records, exact, and are None with fewer than 10 / (1 - p) samples. Tokens are booked when
their frames arrive, so a request that straddles the edge of a window counts only for its part inside. A request that
failed is in no latency and no throughput of successes; its tokens are wasted tokens.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.clock import NS
from serving.records import GOOD, Outcome, RequestRecord

__all__ = ["Percentiles", "SloLimits", "StageTally", "TokenBook", "percentile", "ttft_seconds"]

BIN_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Limits of one workload in seconds at a percentile; None means no limit."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    percentile: float = 0.95


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p95, p99 and the largest of one latency; None where there are too few samples."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    samples: int


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """The p-quantile (nearest rank) of values in ascending order, or None with fewer than 10 / (1 - p) of them."""
    if len(ordered) < round(10 / (1 - p)):
        return None
    rank = max(1, -(-len(ordered) * round(p * 1000) // 1000))
    return ordered[rank - 1]


def summarize(values: Iterable[float]) -> Percentiles:
    """Percentiles of values in any order."""
    ordered = sorted(values)
    return Percentiles(
        percentile(ordered, 0.50),
        percentile(ordered, 0.95),
        percentile(ordered, 0.99),
        ordered[-1] if ordered else None,
        len(ordered),
    )


def ttft_seconds(record: RequestRecord) -> float | None:
    """Service TTFT: first text-bearing frame minus first byte sent."""
    if record.t_first_ns is None or record.t_send_ns is None:
        return None
    return (record.t_first_ns - record.t_send_ns) / NS


def tpot_seconds(record: RequestRecord) -> float | None:
    """(last frame - first frame) / (n - 1), n from the server's usage; None for n < 2."""
    tokens = record.completion_tokens
    if record.t_first_ns is None or record.t_last_ns is None or tokens is None or tokens < 2:
        return None
    return (record.t_last_ns - record.t_first_ns) / NS / (tokens - 1)


def prefill_speed(record: RequestRecord) -> float | None:
    """Uncached prompt tokens per second until the first frame. Queue time is inside where the server does not tell."""
    ttft = ttft_seconds(record)
    if not ttft or record.prompt_tokens is None:
        return None
    return (record.prompt_tokens - (record.cached_tokens or 0)) / ttft


def _tpot_within(record: RequestRecord, tpot: float | None, limit: float) -> bool:
    """One token has no TPOT to miss a limit with; a request without usage cannot show that it met one."""
    return tpot <= limit if tpot is not None else record.completion_tokens is not None


class TokenBook:
    """Output tokens of successful requests by arrival time, in bins of 100 ms, for any window afterwards."""

    def __init__(self) -> None:
        self._bins: defaultdict[int, float] = defaultdict(float)
        self._prompt_bins: defaultdict[int, float] = defaultdict(float)
        self._uncounted = 0

    def add(self, record: RequestRecord) -> None:
        """Book one record's tokens: each frame bears an equal share of the tokens that the server reported."""
        if record.outcome not in GOOD or record.t_first_ns is None:
            return
        if record.prompt_tokens is not None:
            self._prompt_bins[record.t_first_ns // BIN_NS] += record.prompt_tokens
        if record.completion_tokens is None:
            self._uncounted += 1
            return
        if record.frames == 0:
            return
        share = record.completion_tokens / record.frames
        t_ns = record.t_first_ns
        self._bins[t_ns // BIN_NS] += share
        for gap_us in record.frame_gaps_us:
            t_ns += gap_us * 1000
            self._bins[t_ns // BIN_NS] += share

    def output_rate(self, t_from_ns: int, t_to_ns: int) -> float | None:
        """Output tokens per second inside the window; None for an empty one, or when an answer came without a count."""
        return None if self._uncounted else self._rate(self._bins, t_from_ns, t_to_ns)

    def prompt_rate(self, t_from_ns: int, t_to_ns: int) -> float | None:
        """Prompt tokens per second inside the window, booked at each request's first frame."""
        return self._rate(self._prompt_bins, t_from_ns, t_to_ns)

    @staticmethod
    def _rate(bins: dict[int, float], t_from_ns: int, t_to_ns: int) -> float | None:
        first, last = -(-t_from_ns // BIN_NS), t_to_ns // BIN_NS
        if last <= first:
            return None
        total = sum(bins.get(index, 0.0) for index in range(first, last))
        return total / ((last - first) * BIN_NS / NS)


class StageTally:
    """All requests of one stage. `issued` equals the sum of `outcomes` once every record is in.

    Latencies and goodput come from the requests that were due inside the measured window; the counts are of all.
    """

    def __init__(self, slo: SloLimits) -> None:
        self.slo = slo
        self.outcomes: Counter[Outcome] = Counter()
        self.t_settled_ns: int | None = None
        self.t_end_ns: int | None = None
        self.ended_in_window = 0
        self.met_slo = 0
        self.met_ttft = 0
        self.met_tpot = 0
        self.planned_in_window = 0
        self.first_error: str | None = None
        self.wasted_tokens = 0
        self.send_lag = array("d")
        self.kv_tokens = array("d")
        self.output_tokens = array("d")
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._ttft = array("d")
        self._tpot = array("d")
        self._e2e = array("d")
        self._prefill = array("d")
        self._decode = array("d")
        self._gaps_us = array("I")

    @property
    def issued(self) -> int:
        """Requests of this stage in all."""
        return self.outcomes.total()

    def add(self, record: RequestRecord) -> None:
        """Take in one record of this stage."""
        self.outcomes[record.outcome] += 1
        if record.error and self.first_error is None and record.outcome not in GOOD:
            self.first_error = record.error
        if record.outcome not in GOOD:
            self.wasted_tokens += record.completion_tokens or record.frames
        if record.prompt_tokens is not None:
            self.kv_tokens.append(record.prompt_tokens + (record.completion_tokens or 0))
            self.output_tokens.append(record.completion_tokens or 0)
            self._prompt_tokens += record.prompt_tokens
            self._cached_tokens += record.cached_tokens or 0
        if not self._in_window(record):
            return
        self.planned_in_window += 1
        if record.t_send_ns is not None:
            self.send_lag.append((record.t_send_ns - record.t_plan_ns) / NS)
        if record.outcome not in GOOD:
            return
        self.ended_in_window += 1
        ttft, tpot = ttft_seconds(record), tpot_seconds(record)
        for value, store in ((ttft, self._ttft), (tpot, self._tpot), (prefill_speed(record), self._prefill)):
            if value is not None:
                store.append(value)
        if record.t_last_ns is not None and record.t_send_ns is not None:
            self._e2e.append((record.t_last_ns - record.t_send_ns) / NS)
        if tpot:
            self._decode.append(1 / tpot)
        self._gaps_us.extend(record.frame_gaps_us)
        ttft_met = self.slo.ttft_seconds is None or (ttft is not None and ttft <= self.slo.ttft_seconds)
        tpot_met = self.slo.tpot_seconds is None or _tpot_within(record, tpot, self.slo.tpot_seconds)
        self.met_ttft += ttft_met
        self.met_tpot += tpot_met
        self.met_slo += ttft_met and tpot_met

    def _in_window(self, record: RequestRecord) -> bool:
        if self.t_settled_ns is None or record.t_plan_ns < self.t_settled_ns:
            return False
        return self.t_end_ns is None or record.t_plan_ns < self.t_end_ns

    def cached_ratio(self) -> float | None:
        """Share of prompt tokens that came from the prefix cache; None without prompts."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def slo_met(self, *, min_samples: int = 20) -> bool | None:
        """Whether every limit was met by at least the SLO's share of all planned requests.

        A p95 limit is met exactly when 95 % of requests are within it, which needs fewer samples than the figure p95;
        limits count each for itself. None with too few requests, or without limits.
        """
        if self.slo.ttft_seconds is None and self.slo.tpot_seconds is None:
            return None
        if self.planned_in_window < min_samples:
            return None
        return min(self.met_ttft, self.met_tpot) / self.planned_in_window >= self.slo.percentile

    def worst_slo(self) -> str | None:
        """The first limit that is missed, in words, or None. A figure needs enough samples; a share does not."""
        for name, values, limit, met in (
            ("ttft_seconds", self._ttft, self.slo.ttft_seconds, self.met_ttft),
            ("tpot_seconds", self._tpot, self.slo.tpot_seconds, self.met_tpot),
        ):
            if limit is None or not self.planned_in_window or met / self.planned_in_window >= self.slo.percentile:
                continue
            at = percentile(sorted(values), self.slo.percentile)
            if at is not None and at > limit:
                return f"{name} p{self.slo.percentile * 100:g} {at:.3g} > {limit:g}"
            slow = sum(value > limit for value in values)
            if slow:
                return f"{name} > {limit:g} in {slow} of {self.planned_in_window} requests"
        return None

    def ttft(self) -> Percentiles:
        """Service TTFT in seconds."""
        return summarize(self._ttft)

    def tpot(self) -> Percentiles:
        """Seconds per output token after the first, per request."""
        return summarize(self._tpot)

    def e2e(self) -> Percentiles:
        """Seconds from the first byte sent to the last text-bearing frame."""
        return summarize(self._e2e)

    def frame_gap(self) -> Percentiles:
        """Seconds between successive text-bearing frames, over all requests."""
        return summarize(gap / 1e6 for gap in self._gaps_us)

    def prefill(self) -> Percentiles:
        """Uncached prompt tokens per second until the first frame, per request."""
        return summarize(self._prefill)

    def decode(self) -> Percentiles:
        """Tokens per second after the first frame, per request."""
        return summarize(self._decode)

    def goodput_rate(self, seconds: float) -> float | None:
        """Requests per second that met every SLO, over the measured window."""
        return self.met_slo / seconds if seconds > 0 else None

    def request_rate(self, seconds: float) -> float | None:
        """Requests per second that ended well, over the measured window."""
        return self.ended_in_window / seconds if seconds > 0 else None
