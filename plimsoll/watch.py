"""`plimsoll watch`: stay beside one server, sample it, judge it by rules, export what is seen.

Sampling never waits for judging, and neither stops because the server is down: a server that cannot be read is what the
watch is there to see. Wiring only; the parts are in `monitor` and `alerts`.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from alerts.rules import RULES, Look, Rule, make_rule
from alerts.state import AlertState, Health, Sight, State, Transition, advance
from alerts.verdict import Finding
from monitor.exporter import TickCollector, make_app, serve
from monitor.gpu import gpu_reader
from monitor.history import SqliteHistory
from monitor.http import BaseUrl, converse, open_session, parse_url
from monitor.process import ServerProcesses, process_exists
from monitor.sampler import ReadTarget, Sampler, Tick, find_restart
from monitor.schedule import Job, Schedule
from serving.clock import NS, Clock, SystemClock
from serving.engines import ENGINES, Reading, ScrapeFailure, TargetFacts, probe, scrape
from serving.errors import ConfigError, RecordError, TargetError
from serving.records import Event
from serving.signals import SIGNALS, Kind
from serving.strict_yaml import Node, read_yaml

__all__ = ["EXAMPLES", "Watch", "WatchConfig", "WatchTarget", "add_arguments", "keep_watch", "read_config", "run"]

EXAMPLES = """examples:
  plimsoll watch watch.yaml

a watch.yaml with everything in it; only `targets` and `url` must be there:
  targets:
    - url: http://127.0.0.1:8000
      name: hy3                # label `target` (default: host:port)
      model: hy3-instruct      # default: the first that the server lists
      interval: 1              # seconds from sample to sample
      gpu: auto                # auto, nvml, none, or the URL of a DCGM exporter
      pid: 4711                # the server's process (default: found by its port on this host)
  listen: 127.0.0.1:9464       # where /metrics and /healthz are served
  history: watch.db            # beside this file; an existing one is continued
  evaluate_every: 60           # seconds between two judgements
  rules:                       # on unless switched off; parameters are in docs/rules.md
    memory_only_grows: {window_s: 7200}
    decode_speed_down: off

An API key is read from PLIMSOLL_API_KEY. SIGTERM and Ctrl-C end the watch; started again, it continues."""

_log = logging.getLogger("plimsoll.watch")
_REPEAT_NS = 60 * NS
_CALM_TICKS = 5
"""A target that stays down for changing reasons is told of this often."""
_FORGET_AFTER = frozenset({"http_404", "not_metrics", "no_engine_metrics"})
"""Failures after which the target may be another engine than before."""


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """The server to watch."""

    url: BaseUrl
    name: str
    model: str | None = None
    interval_s: float = 1.0
    gpu: str = "auto"
    pid: int | None = None
    kv_cache_capacity_tokens: int | None = None
    """What the server's start-up log says, where the server itself does not."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """What a watch file says, checked."""

    target: WatchTarget
    history: Path
    host: str = "127.0.0.1"
    port: int = 9464
    evaluate_every_s: float = 60.0
    rules: tuple[Rule, ...] = field(default_factory=lambda: tuple(make_rule(name, {}) for name in RULES))


def read_config(path: Path) -> WatchConfig:
    """Read a watch file.

    Raises:
        ConfigError: the file cannot be read, or something in it cannot be meant; with file and line.
    """
    root = read_yaml(path)
    keys = root.mapping(("targets", "listen", "history", "evaluate_every", "rules"), required=("targets",))
    targets = keys["targets"].items()
    if len(targets) != 1:
        raise keys["targets"].error(f"one target is watched at a time, {len(targets)} are listed")
    host, port = _listen(keys["listen"]) if "listen" in keys else ("127.0.0.1", 9464)
    history = Path(keys["history"].text()) if "history" in keys else Path("watch.db")
    return WatchConfig(
        target=_target(targets[0]),
        # Relative to the file, not to where the watch happens to be started from.
        history=path.parent / history,
        host=host,
        port=port,
        evaluate_every_s=keys["evaluate_every"].number(1, 3600) if "evaluate_every" in keys else 60.0,
        rules=_rules(keys.get("rules")),
    )


def _target(node: Node) -> WatchTarget:
    known = ("url", "name", "model", "interval", "gpu", "pid", "kv_cache_capacity_tokens")
    keys = node.mapping(known, required=("url",))
    try:
        url = parse_url(keys["url"].text())
    except ConfigError as error:
        raise keys["url"].error(str(error)) from None
    return WatchTarget(
        url=url,
        name=keys["name"].text() if "name" in keys else f"{url.host}:{url.port}",
        model=keys["model"].text() if "model" in keys else None,
        # Above 15 s the rules would take the time between two samples for a gap.
        interval_s=keys["interval"].number(0.1, 15) if "interval" in keys else 1.0,
        gpu=_gpu(keys["gpu"]) if "gpu" in keys else "auto",
        pid=keys["pid"].integer(1, 2**22) if "pid" in keys else None,
        kv_cache_capacity_tokens=_capacity(keys),
    )


def _capacity(keys: Mapping[str, Node]) -> int | None:
    name = "kv_cache_capacity_tokens"
    return keys[name].integer(1, 10**12) if name in keys else None


def _gpu(node: Node) -> str:
    source = node.text()
    try:
        gpu_reader(source)
    except ConfigError as error:
        raise node.error(str(error)) from None
    return source


def _listen(node: Node) -> tuple[str, int]:
    host, colon, port = node.text().rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise node.error(f"{node.text()!r} is not an address; write HOST:PORT, for example 127.0.0.1:9464")
    return host.strip("[]"), int(port)


def _rules(node: Node | None) -> tuple[Rule, ...]:
    """All rules with their defaults, less those switched off, with the parameters that are set."""
    chosen = {name: make_rule(name, {}) for name in RULES}
    for name, value in (node.mapping(RULES) if node is not None and not node.is_null() else {}).items():
        if value.is_mapping():
            parameters = {}
            for key, one in value.mapping().items():
                parameters[key] = one.number()
                try:
                    chosen[name] = make_rule(name, parameters)
                except ConfigError as error:
                    raise one.error(str(error)) from None
        elif not value.flag():
            del chosen[name]
    return tuple(chosen.values())


class Watch:
    """What the watch remembers and concludes; what it hears comes in by `on_tick` and `on_event`.

    Args:
        config: what to watch.
        history: open for writing. What an earlier watch of the same target left in it is taken up.
        clock: the sampler's clock.
    """

    def __init__(self, config: WatchConfig, history: SqliteHistory, clock: Clock) -> None:
        self.config = config
        self.history = history
        self.clock = clock
        self._name = config.target.name
        self._past = history.past(self._name)
        left = history.manifest().get(f"watch of {self._name}", {})
        self.alerts = {rule.name: _restored(rule.name, left.get("alerts", {})) for rule in config.rules}
        self.looks: dict[str, Look] = {}
        self._judged_ns: int | None = None
        self._before = _tick_from_json(left.get("last_tick"))
        """The last tick of the watch before this one, until it has been compared with our first."""
        self._last_up: Tick | None = None
        self._told: tuple[bool, str | None, int] | None = None
        self._dropped = 0
        self._losing = False
        self._calm_ticks = 0

    def on_tick(self, tick: Tick) -> None:
        """Keep a tick, and say when the target comes or goes."""
        if tick.up:
            why = find_restart(self._before, tick) if self._before is not None else None
            self._before, self._last_up = None, tick
            if why is not None:
                self.on_event(Event(tick.t_ns, "restart", f"while nobody watched: {why}"))
        self._tell(tick)
        totals = tick.histogram_totals()
        self.history.append_tick(self._name, tick.t_ns, tick.values, tick.gpus, tick.processes, totals)
        self._tell_of_history()

    def on_event(self, event: Event) -> None:
        """Keep an event."""
        _log.warning("%s: %s: %s", self._name, event.kind, event.text)
        self.history.append_event(event, self._name)

    async def judge(self) -> None:
        """Evaluate every rule once, and move its alert."""
        t_ns = self.clock.now_ns()
        # Reading hours of samples takes a while; the loop has to tick on.
        seen = await asyncio.to_thread(lambda: [self._look(rule, t_ns) for rule in self.config.rules])
        self._judged_ns = t_ns
        for rule, (look, error) in zip(self.config.rules, seen, strict=True):
            alert = self.alerts[rule.name]
            if error is not None and look.why != alert.message:  # the same one every minute is told once
                _log.error("%s: rule %s failed", self._name, rule.name, exc_info=error)
            self.looks[rule.name] = look
            self.alerts[rule.name], changes = advance(alert, look.sight, t_ns, rule.patience, look.why)
            for change in changes:
                self._record(rule.name, change, look.findings)
        self.save()

    def save(self) -> None:
        """Leave in the history what the next watch takes up."""
        last = self._last_up or self._before
        self.history.set_manifest(
            {
                f"watch of {self._name}": {
                    "alerts": {name: alert.to_json() for name, alert in self.alerts.items()},
                    "last_tick": None if last is None else _tick_to_json(last),
                }
            }
        )

    def families(self) -> Iterator[Metric]:
        """What `/metrics` shows of the rules and of the history."""
        states = GaugeMetricFamily(
            "plimsoll_alert_state",
            "1 for the state that the alert of a rule is in.",
            labels=("target", "rule", "state"),
        )
        healths = GaugeMetricFamily(
            "plimsoll_alert_health",
            "1 for how the last evaluation of a rule went; unknown: there was no data.",
            labels=("target", "rule", "health"),
        )
        since = GaugeMetricFamily(
            "plimsoll_alert_since_timestamp_seconds",
            "When the alert of a rule entered its state, Unix time.",
            labels=("target", "rule"),
        )
        findings = GaugeMetricFamily(
            "plimsoll_findings", "What the last evaluation of a rule found.", labels=("target", "rule")
        )
        for name, alert in self.alerts.items():
            for state in State:
                states.add_metric((self._name, name, state.value), float(alert.state is state))
            for health in Health:
                healths.add_metric((self._name, name, health.value), float(alert.health is health))
            if alert.since_ns is not None:
                since.add_metric((self._name, name), alert.since_ns / NS)
            look = self.looks.get(name)
            if look is not None and look.sight in (Sight.PRESENT, Sight.ABSENT):
                findings.add_metric((self._name, name), float(len(look.findings)))
        yield from (family for family in (states, healths, since, findings) if family.samples)
        if self._judged_ns is not None:
            yield GaugeMetricFamily(
                "plimsoll_last_evaluation_timestamp_seconds",
                "When the rules were last evaluated, Unix time.",
                value=self._judged_ns / NS,
            )
        yield CounterMetricFamily(
            "plimsoll_history_dropped",
            "Entries that did not reach the history, because it could not be written.",
            value=float(self.history.dropped),
        )

    def _look(self, rule: Rule, t_ns: int) -> tuple[Look, Exception | None]:
        try:
            return rule.look(self._past, t_ns), None
        except Exception as error:  # noqa: BLE001 - a rule that fails must not end the others, nor the watch
            return Look(Sight.ERROR, why=f"{type(error).__name__}: {error}"), error

    def _record(self, rule: str, change: Transition, findings: tuple[Finding, ...]) -> None:
        told = [finding.to_json() for finding in findings]
        detail = {"came_from": change.came_from.value, "findings": told}
        self.history.append_finding(change.t_ns, rule, change.state.value, detail, self._name)
        level = logging.WARNING if change.state is State.FIRING else logging.INFO
        _log.log(level, "%s: %s: %s, now %s", self._name, rule, change.came_from, change.state)
        if change.state is State.FIRING:
            for finding in findings:
                _log.warning("%s: %s: %s. Next: %s", self._name, finding.title, finding.evidence, finding.next_step)

    def _tell_of_history(self) -> None:
        """Say when the history loses entries, and when it has not lost any for a while."""
        lost, self._dropped = self.history.dropped - self._dropped, self.history.dropped
        self._calm_ticks = 0 if lost else self._calm_ticks + 1
        if lost and not self._losing:
            self._losing = True
            _log.error("%s; sampling and /metrics go on, and writing is tried again", self.history.error)
        elif self._losing and self._calm_ticks >= _CALM_TICKS:
            self._losing = False
            _log.warning("the history is written again; %d entries were lost in all", self._dropped)

    def _tell(self, tick: Tick) -> None:
        was_up, failure, told_ns = self._told or (None, None, 0)
        if tick.up == was_up and (tick.failure == failure or tick.t_ns - told_ns < _REPEAT_NS):
            return
        self._told = (tick.up, tick.failure, tick.t_ns)
        if tick.up != was_up:
            text = "answers" if tick.up else f"does not answer: {tick.failure}"
            self.history.append_event(Event(tick.t_ns, "up" if tick.up else "down", text), self._name)
        if tick.up:
            _log.info("%s: up", self._name)
        else:
            _log.warning("%s: down: %s", self._name, tick.failure)


def watching_reader(
    session: aiohttp.ClientSession, target: WatchTarget, found: Callable[[TargetFacts], None]
) -> ReadTarget:
    """A scrape that first finds out what the target is, as often as it takes, and again when it became another.

    What the probe learned of the target's limits is part of every reading that does not tell it by itself.
    """
    known: TargetFacts | None = None

    async def read() -> Reading | ScrapeFailure:
        nonlocal known
        if known is None:
            try:
                known = await converse(session, target.url.text, probe(target.model, where=target.url.text))
            except TargetError as error:
                return ScrapeFailure("not_ready", str(error))
            if target.kv_cache_capacity_tokens is not None:
                known = replace(
                    known,
                    kv_cache_capacity_tokens=target.kv_cache_capacity_tokens,
                    kv_cache_capacity_source="the watch file",
                    notes=(),
                )
            found(known)
        conversation = scrape(ENGINES[known.engine], kv_cache_capacity_tokens=known.kv_cache_capacity_tokens)
        outcome = await converse(session, target.url.text, conversation)
        if isinstance(outcome, ScrapeFailure):
            if outcome.reason in _FORGET_AFTER:
                known = None
            return outcome
        limits = _limits(known)
        return replace(
            outcome,
            values={name: value for name, (value, _) in limits.items()} | dict(outcome.values),
            sources={name: source for name, (_, source) in limits.items()} | dict(outcome.sources),
        )

    return read


async def keep_watch(config: WatchConfig, stop: asyncio.Event, listening: Callable[[str], None] | None = None) -> None:
    """Watch until `stop` is set; `listening` is told the address of the metrics.

    Raises:
        ConfigError: the address cannot be listened on, or the GPU source is unknown.
        RecordError: the history cannot be opened or made.
    """
    target = config.target
    clock = SystemClock()
    here = target.url.is_loopback or target.pid is not None
    # The GPUs of this host say nothing of a server on another one.
    gpu = gpu_reader("none" if target.gpu == "auto" and not here else target.gpu)
    for note in target.url.notes:
        _log.info("%s: %s", target.name, note)
    if target.pid is not None and not process_exists(target.pid):
        raise ConfigError(f"pid {target.pid}: there is no such process on this host; leave it out to find it by port")
    _require_free(config.host, config.port)
    with contextlib.closing(_open_history(config.history, clock)) as history:
        watch = Watch(config, history, clock)
        collector = TickCollector(clock, extra=watch.families)

        def found(facts: TargetFacts) -> None:
            _log.info(
                "%s: %s, model %s", target.name, " ".join(filter(None, (facts.engine, facts.version))), facts.model
            )
            for note in facts.notes:
                _log.info("%s: %s", target.name, note)
            collector.describe_target(target.name, facts)

        async with serve(make_app(collector), config.host, config.port) as address, open_session() as session:
            sampler = Sampler(
                clock,
                watching_reader(session, target, found),
                gpu=gpu,
                processes=ServerProcesses(target.url.port, pid=target.pid) if here else None,
                interval_seconds=target.interval_s,
            )
            sampler.add_listener(watch.on_tick)
            sampler.add_event_listener(watch.on_event)
            collector.follow(target.name, sampler)
            if listening is not None:
                listening(f"{address}/metrics")
            sampling, stopping = asyncio.create_task(sampler.run()), asyncio.create_task(stop.wait())
            try:
                async with Schedule([Job("rules", watch.judge, config.evaluate_every_s)]):
                    # A watch that no longer samples must end, so that whoever supervises it can start it again.
                    await asyncio.wait((sampling, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                sampling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sampling
                await gpu.close()
        watch.save()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="what to watch")


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is told to end; returns its exit code."""
    config = read_config(arguments.config)
    logging.basicConfig(
        format="%(asctime)sZ %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S", level=logging.INFO
    )
    logging.Formatter.converter = time.gmtime
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    asyncio.run(_run_until_signal(config))
    return 0


async def _run_until_signal(config: WatchConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await keep_watch(
        config,
        stop,
        lambda address: _log.info(
            "watching %s as %s; metrics at %s; history in %s",
            config.target.url.text,
            config.target.name,
            address,
            config.history,
        ),
    )
    _log.info("ended")


def _open_history(path: Path, clock: Clock) -> SqliteHistory:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"history {path}: there is no folder {path.absolute().parent}; make it, or name another")
    if not path.exists():
        history = SqliteHistory.create(path)
        history.set_manifest({"kind": "watch", "plimsoll_version": version("plimsoll"), "started_t_ns": clock.now_ns()})
        return history
    history = SqliteHistory.open(path, readonly=False)
    kind = history.manifest().get("kind")
    if kind != "watch":
        history.close()
        raise ConfigError(f"{path} is the file of another kind of run ({kind}); name another `history`")
    return history


def _require_free(host: str, port: int) -> None:
    """Refuse an address that is taken before anything is written; `serve` says the same of what changes meanwhile."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; name another address with `listen`"
            ) from error


def _restored(rule: str, stored: Mapping[str, Any]) -> AlertState:
    try:
        return AlertState.from_json(stored[rule]) if rule in stored else AlertState()
    except RecordError as error:
        _log.warning("rule %s begins anew: %s", rule, error)
        return AlertState()


def _limits(facts: TargetFacts) -> dict[str, tuple[float, str]]:
    told = {
        "config_max_running_requests": (facts.max_running_requests, facts.max_running_source),
        "config_context_tokens": (facts.context_tokens, None),
        "kv_cache_capacity_tokens": (facts.kv_cache_capacity_tokens, facts.kv_cache_capacity_source),
    }
    return {
        name: (float(value), source or "told when probed")
        for name, (value, source) in told.items()
        if value is not None
    }


def _tick_to_json(tick: Tick) -> dict[str, Any]:
    """What `find_restart` needs of a tick."""
    kept = [
        name for name in tick.values if SIGNALS[name].kind is Kind.COUNTER or name == "engine_start_timestamp_seconds"
    ]
    return {
        "t_ns": tick.t_ns,
        "values": {name: tick.values[name] for name in kept},
        "sources": {name: tick.sources[name] for name in kept if name in tick.sources},
        "server_mark": tick.server_mark,
        "process_mark": tick.process_mark,
    }


def _tick_from_json(stored: Mapping[str, Any] | None) -> Tick | None:
    return None if stored is None else Tick(up=True, **stored)
