"""`/metrics` of what was sampled last, for Prometheus: one family per canonical signal, prefix `plimsoll_`.

Families are built when Prometheus asks, from the last tick of each target, so nothing stays that was not seen last: a
target that does not answer has `plimsoll_up` 0 and none of its own series. The sampler ticks on its own, because
growth and speed need even samples; `plimsoll_last_sample_timestamp_seconds` says how old they are.
"""

import errno
import html
import platform
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from monitor.sampler import Sampler, Tick
from serving.clock import NS, Clock
from serving.engines import TargetFacts
from serving.errors import ConfigError
from serving.signals import SIGNALS, Kind, Scope, Signal

__all__ = ["Family", "TickCollector", "families", "make_app", "serve"]

PREFIX = "plimsoll_"
DEFAULT_MAX_AGE_SECONDS = 60.0

_LABELS = {Scope.TARGET: ("target",), Scope.GPU: ("target", "gpu"), Scope.PROCESS: ("target", "role")}


@dataclass(frozen=True, slots=True)
class Family:
    """One exported metric: its name with the prefix, type, labels, and what HELP says without the source."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_LAST_SAMPLE = Family(
    f"{PREFIX}last_sample_timestamp_seconds",
    Kind.GAUGE,
    ("target",),
    "When the target was last sampled, whether or not it answered, Unix time.",
)
_SOURCE_INFO = Family(
    f"{PREFIX}signal_source_info",
    Kind.GAUGE,
    ("target", "signal", "source"),
    "1 for each signal of the last sample: the engine's own metric or page that it was read from.",
)
_ENGINE_INFO = Family(
    f"{PREFIX}engine_info", Kind.GAUGE, ("target", "engine", "version", "model"), "1: what the target runs."
)
_SKIPPED_TICKS = Family(
    f"{PREFIX}skipped_ticks_total", Kind.COUNTER, ("target",), "Samples left out because an earlier one took too long."
)
_SAMPLER_ERRORS = Family(
    f"{PREFIX}sampler_errors_total",
    Kind.COUNTER,
    ("target", "where"),
    "Errors of Plimsoll itself while sampling; each is a bug.",
)
_BUILD_INFO = Family(
    f"{PREFIX}build_info", Kind.GAUGE, ("version", "python"), "1: which Plimsoll exports this, on which Python."
)


def families() -> tuple[Family, ...]:
    """Every metric that a collector can export, but for the extra ones that it is given."""
    signals = tuple(_family(signal) for signal in SIGNALS.values())
    return (*signals, _LAST_SAMPLE, _SOURCE_INFO, _ENGINE_INFO, _SKIPPED_TICKS, _SAMPLER_ERRORS, _BUILD_INFO)


class TickCollector(Collector):
    """Prometheus families of the last tick of every target.

    Counters and histograms are the engine's own, with its resets and buckets: `rate()` reads through resets, and other
    buckets would be an invention.

    Args:
        clock: the clock of the samplers.
        extra: more families, made anew at each scrape (states of rules).
        max_age_seconds: a tick that is older is not shown any more: its sampler is stuck. Above the time that the
            slowest scrape may take.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        extra: Callable[[], Iterable[Metric]] = tuple,
        max_age_seconds: float = DEFAULT_MAX_AGE_SECONDS,
    ) -> None:
        self._clock = clock
        self._extra = extra
        self._max_age_ns = round(max_age_seconds * NS)
        self._ticks: dict[str, Tick] = {}
        self._facts: dict[str, TargetFacts] = {}
        self._samplers: dict[str, Sampler] = {}

    def follow(self, target: str, sampler: Sampler) -> None:
        """Show the ticks of a sampler under a target's name."""
        self._samplers[target] = sampler
        sampler.add_listener(partial(self.take, target))

    def take(self, target: str, tick: Tick) -> None:
        """Show this tick of a target from now on."""
        self._ticks[target] = tick

    def describe_target(self, target: str, facts: TargetFacts) -> None:
        """Say what a target runs; again when that has changed."""
        self._facts[target] = facts

    def problem(self) -> str | None:
        """Why what is shown is not what is, for a health check: a target without a fresh sample. None when all is well.

        A target that is down is no problem of the watch.
        """
        watched = self._samplers.keys() | self._ticks.keys()
        stale = sorted(target for target in watched if target not in self._fresh())
        return f"no sample of {', '.join(stale)} in the last {self._max_age_ns / NS:g} s" if stale else None

    def states(self) -> dict[str, str]:
        """Target to `up`, its failure, or that it is not sampled; for people."""
        fresh = self._fresh()
        return {
            target: "not sampled" if target not in fresh else fresh[target].failure or "up"
            for target in sorted(self._samplers.keys() | self._ticks.keys())
        }

    def collect(self) -> Iterator[Metric]:
        """All families that have a value now."""
        fresh = self._fresh()
        for signal in SIGNALS.values():
            yield from _non_empty(_signal_metric(signal, fresh))
        yield from _non_empty(self._last_samples())
        yield from _non_empty(_source_info(fresh))
        yield from _non_empty(self._engine_info())
        yield from self._sampler_metrics()
        build = _new_metric(_BUILD_INFO)
        build.add_metric((_own_version(), platform.python_version()), 1.0)
        yield build
        yield from self._extra()

    def _fresh(self) -> dict[str, Tick]:
        oldest_ns = self._clock.now_ns() - self._max_age_ns
        return {target: tick for target, tick in self._ticks.items() if tick.t_ns >= oldest_ns}

    def _last_samples(self) -> Metric:
        metric = _new_metric(_LAST_SAMPLE)
        for target, tick in self._ticks.items():
            metric.add_metric((target,), tick.t_ns / NS)
        return metric

    def _engine_info(self) -> Metric:
        metric = _new_metric(_ENGINE_INFO)
        for target, facts in self._facts.items():
            metric.add_metric((target, facts.engine, facts.version or "", facts.model), 1.0)
        return metric

    def _sampler_metrics(self) -> Iterator[Metric]:
        skipped, errors = _new_metric(_SKIPPED_TICKS), _new_metric(_SAMPLER_ERRORS)
        for target, sampler in self._samplers.items():
            skipped.add_metric((target,), float(sampler.skipped_ticks))
            for where, count in sampler.errors.items():
                errors.add_metric((target, where), float(count))
        yield from _non_empty(skipped)
        yield from _non_empty(errors)


def make_app(collector: TickCollector) -> web.Application:
    """The exporter as a web application: `/metrics`, `/healthz`, and an index for people at `/`.

    `/metrics` speaks Prometheus text or OpenMetrics, as the client asks, and adds the `process_*` metrics of this very
    process: who watches for leaks shows its own memory. `/healthz` is 200 while every target is being sampled, whether
    or not it is up, and 503 with the reason when a sampler is stuck.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(", ".join(request.headers.getall("Accept", [])))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        problem = collector.problem()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def index(_: web.Request) -> web.Response:
        rows = "".join(
            f"<tr><td>{html.escape(target)}</td><td>{html.escape(state)}</td></tr>"
            for target, state in collector.states().items()
        )
        return web.Response(text=_INDEX.format(rows=rows), content_type="text/html")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/", index)
    return app


_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plimsoll</title></head>
<body><h1>Plimsoll</h1>
<p><a href="metrics">metrics</a> for Prometheus, <a href="healthz">healthz</a> for whoever supervises this process.</p>
<table><tr><th>target</th><th>state</th></tr>{rows}</table>
</body></html>
"""


@asynccontextmanager
async def serve(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application while the block runs; gives its base URL. Port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {_advice(error, host)}") from None
        bound_port = runner.addresses[0][1]
        yield f"http://[{host}]:{bound_port}" if ":" in host else f"http://{host}:{bound_port}"
    finally:
        await runner.cleanup()


def _advice(error: OSError, host: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "something listens there already; stop it, or choose another port"
        case errno.EACCES:
            return "ports below 1024 need privileges; choose a higher one"
        case errno.EADDRNOTAVAIL:
            return f"this host has no address {host}; use 127.0.0.1, or 0.0.0.0 for all addresses"
        case _:
            return f"{error.strerror or error}; check the address"


def _family(signal: Signal) -> Family:
    return Family(PREFIX + signal.name, signal.kind, _LABELS[signal.scope], signal.help)


_Labelled = GaugeMetricFamily | CounterMetricFamily


def _new_metric(family: Family, sources: Iterable[str] = ()) -> _Labelled:
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    return make(family.name, _help(family, sources), labels=family.labels)


def _help(family: Family, sources: Iterable[str]) -> str:
    named = ", ".join(sorted(set(sources)))
    return f"{family.help} Read from {named}." if named else family.help


def _non_empty(metric: Metric) -> Iterator[Metric]:
    if metric.samples:
        yield metric


def _signal_metric(signal: Signal, ticks: Mapping[str, Tick]) -> Metric:
    family = _family(signal)
    sources = [tick.sources[signal.name] for tick in ticks.values() if signal.name in tick.sources]
    if signal.kind is Kind.HISTOGRAM:
        return _histogram_metric(family, signal.name, ticks, sources)
    metric = _new_metric(family, sources)
    for target, tick in ticks.items():
        for labels, values in _values_of(signal.scope, tick):
            if signal.name in values:
                metric.add_metric((target, *labels), values[signal.name])
    return metric


def _values_of(scope: Scope, tick: Tick) -> Iterator[tuple[tuple[str, ...], Mapping[str, float]]]:
    if scope is Scope.TARGET:
        yield (), tick.values
        return
    for label, values in (tick.gpus if scope is Scope.GPU else tick.processes).items():
        yield (label,), values


def _histogram_metric(family: Family, signal: str, ticks: Mapping[str, Tick], sources: Iterable[str]) -> Metric:
    metric = HistogramMetricFamily(family.name, _help(family, sources), labels=family.labels)
    for target, tick in ticks.items():
        if (histogram := tick.histograms.get(signal)) is not None:
            buckets = [
                (floatToGoString(edge), count)  # type: ignore[no-untyped-call] # gives str
                for edge, count in zip(histogram.edges, histogram.cumulative, strict=True)
            ]
            metric.add_metric((target,), buckets, histogram.sum)
    return metric


def _source_info(ticks: Mapping[str, Tick]) -> Metric:
    metric = _new_metric(_SOURCE_INFO)
    for target, tick in ticks.items():
        for signal, source in tick.sources.items():
            metric.add_metric((target, signal, source), 1.0)
    return metric


def _own_version() -> str:
    try:
        return version("plimsoll")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
