"""The scenarios under plain Locust: `locust -f loadgen/scenarios/interactive.py --host URL`, web UI included.

Locust then shows its own tables and exits with its own code; what it is told of each request is the true time to the
first token and to the last one. Without `-u` the users climb to the load line, the way `plimsoll stress` does; with
`-u` that many are held.
"""

import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gevent  # type: ignore[import-untyped]
from locust import LoadTestShape, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import MasterRunner, WorkerRunner

from loadgen.client import Connection, Endpoint
from loadgen.load_line import MAX_CEILING, LoadLineSearch, StageSpec, did_hold
from loadgen.observation import WindowLedger, view_stage
from loadgen.plan import StagePacer, StagePhase, StagePolicy
from loadgen.prompts import calibrate
from loadgen.scenarios.base import LoadUser, Traffic
from loadgen.tally import StageTally, TokenBook, ttft_seconds
from loadgen.workloads import RequestMaker, Workload, find_workload
from serving.clock import NS
from serving.conversation import converse
from serving.engines import ENGINES, Engine, Reading, TargetFacts, probe, scrape
from serving.errors import ConfigError, PlimsollError
from serving.records import GOOD, RequestRecord
from serving.smoke import smoke

__all__ = ["LoadLineShape", "ScenarioUser"]

_log = logging.getLogger("plimsoll")
_WARMUP = "warmup"
_STOP_SECONDS = 10.0


def add_options(parser: LocustArgumentParser) -> None:
    """Plimsoll's options beside Locust's own; each has an environment variable too."""
    # Options of an argument group would be missing in the web UI.
    for name, kind, default, text in (
        ("max-batch", int, 0, "configured batch limit to climb to and a little past; 0 asks the server"),
        ("context", int, 0, "context length of the server in tokens; 0 asks the server"),
        ("model", str, "", "model name to send (default: the first that the server lists)"),
        ("prompt-tokens", int, 0, "mean prompt length in place of the workload's own"),
        ("output-tokens", int, 0, "mean answer length in place of the workload's own"),
        ("stage-seconds", int, 30, "least length of a stage of the climb"),
        ("seed", int, 1, "lengths and texts of requests depend on it"),
    ):
        variable = "PLIMSOLL_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", type=kind, default=default, env_var=variable, help=text)
    parser.add_argument(
        "--hold",
        action="store_true",
        default=False,
        env_var="PLIMSOLL_HOLD",
        help="hold the given number of users instead of climbing to the load line; implied by -u",
    )


def note_users(environment: Environment, **_: Any) -> None:
    """Take `-u` for what it says before Locust fills in its default of one user."""
    options: Any = environment.parsed_options
    if options is not None and options.num_users is not None:
        options.hold = True


@dataclass(slots=True)
class _Stage:
    spec: StageSpec
    pacer: StagePacer
    tally: StageTally
    ended: WindowLedger


@dataclass(frozen=True, slots=True)
class _Tick:
    t_ns: int
    values: Mapping[str, float]
    gpus: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    processes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Climb:
    """Looks for the load line from inside Locust: what `plimsoll stress` does, without its history and report.

    Args:
        traffic: whose requests are watched.
        engine: the target's table.
        facts: what the target says of itself.
        limit: the configured batch limit; None searches upwards by doubling.
        policy: how long stages take.
    """

    def __init__(
        self, traffic: Traffic, engine: Engine, facts: TargetFacts, limit: int | None, policy: StagePolicy
    ) -> None:
        self._traffic = traffic
        self._engine = engine
        self._facts = facts
        self._policy = policy
        self._search = LoadLineSearch(limit, slots=facts.max_running_requests)
        self._connection = Connection(traffic.endpoint)
        self._ticks: list[_Tick] = []
        self._book = TokenBook()
        self._stages: list[_Stage] = []
        self._scraping = gevent.spawn(self._scrape, min(1.0, max(0.25, policy.min_seconds / 20)))

    def close(self) -> None:
        """Scrape no more."""
        self._scraping.kill()
        self._connection.close()

    def add(self, record: RequestRecord) -> None:
        """Take in a request that ended."""
        self._book.add(record)
        if not self._stages:
            return
        running = self._stages[-1]
        running.pacer.on_request(record.t_plan_ns)
        if running.pacer.t_settled_ns is not None and record.t_end_ns >= running.pacer.t_settled_ns:
            running.ended.add(record)
        stage = next((one for one in reversed(self._stages) if one.spec.name == record.stage), None)
        if stage is not None:
            stage.tally.add(record)

    def offered(self) -> int | None:
        """Users wanted now, or None when the line is known."""
        now_ns = self._traffic.endpoint.clock.now_ns()
        if not self._stages:
            first = self._search.next_stage()
            if first is None:
                return None
            policy = StagePolicy(self._policy.warmup_seconds, self._policy.warmup_seconds, min_requests=1)
            return self._begin(StageSpec(_WARMUP, first.offered, "warmup"), policy, now_ns)
        stage = self._stages[-1]
        stage.pacer.on_in_flight(self._traffic.in_flight)
        phase = stage.pacer.advance(now_ns)
        stage.tally.t_settled_ns = stage.pacer.t_settled_ns
        if phase is not StagePhase.DONE:
            return stage.spec.offered
        stage.tally.t_end_ns = now_ns
        if stage.spec.name != _WARMUP:
            self._judge(stage, now_ns)
        spec = self._search.next_stage()
        if spec is None:
            self._conclude()
            return None
        return self._begin(spec, self._policy, now_ns)

    def _begin(self, spec: StageSpec, policy: StagePolicy, now_ns: int) -> int:
        pacer = StagePacer(spec.offered, policy, now_ns)
        tally = StageTally(self._traffic.maker.workload.slo)
        self._stages.append(_Stage(spec, pacer, tally, WindowLedger(self._engine.complaint)))
        self._traffic.stage = spec.name
        return spec.offered

    def _judge(self, stage: _Stage, now_ns: int) -> None:
        view = view_stage(
            stage.spec.offered,
            self._ticks,
            (stage.pacer.t_settled_ns or stage.pacer.t_start_ns, now_ns),
            stage.tally,
            self._book,
            stage.ended,
            client_valid=True,
            server_died=not any(tick.t_ns >= stage.pacer.t_start_ns for tick in self._ticks),
            overfull=stage.pacer.overfull,
        )
        held, why = did_hold(view.observation)
        _log.info("%d offered: %s (%s)", stage.spec.offered, "held" if held else "did not hold", why)
        self._search.record(view.observation)

    def _conclude(self) -> None:
        line = self._search.result()
        measured = "not found" if line.measured is None else line.measured
        _log.info(
            "load line %s (configured %s), bound by %s: %s. Next: %s",
            measured,
            line.configured if line.configured is not None else "unknown",
            line.bound_by.value,
            line.evidence,
            line.next_step,
        )

    def _scrape(self, interval_seconds: float) -> None:
        while True:
            conversation = scrape(self._engine, kv_cache_capacity_tokens=self._facts.kv_cache_capacity_tokens)
            reading = converse(conversation, self._connection.answer)
            now_ns = self._traffic.endpoint.clock.now_ns()
            values = reading.values if isinstance(reading, Reading) else None
            if values is not None:
                self._ticks.append(_Tick(now_ns, values))
            if self._stages:
                running = None if values is None else values.get("requests_running")
                self._stages[-1].pacer.on_sample(running, now_ns)
            gevent.sleep(interval_seconds)


class ScenarioUser(LoadUser):
    """A user of one workload under plain Locust; a scenario only names its workload."""

    abstract = True
    workload_name: ClassVar[str]

    def pause(self, seconds: float) -> None:
        """Back off."""
        gevent.sleep(seconds)

    @task
    def ask(self) -> None:
        """One request, start to end."""
        self.ask_once()


class LoadLineShape(LoadTestShape):
    """Climbs to the load line, or holds what `-u` says. `-t` ends either."""

    use_common_options = True
    prepared: ClassVar[bool] = False
    climb: ClassVar[Climb | None] = None

    def tick(self) -> tuple[int, float] | None:
        """Users wanted now and how many to add in a second, or None to end the run."""
        if self.runner is None:
            return None
        environment = self.runner.environment
        options: Any = environment.parsed_options
        try:
            prepare(environment)
        except PlimsollError as error:
            environment.process_exit_code = error.exit_code
            _log.error("%s", error)
            return None
        # In a headless run Locust starts its own timer only after the shape has ended.
        if options.run_time and time.perf_counter() - self.start_time >= options.run_time:
            return None
        if self.climb is not None:
            return climb_shape(self.climb)
        users = options.num_users or 1
        return users, float(options.spawn_rate or users)


def climb_shape(climb: Climb) -> tuple[int, float] | None:
    """The next tick of a climb, in Locust's words."""
    users = climb.offered()
    return None if users is None else (users, float(users))


def prepare_without_shape(environment: Environment, **_: Any) -> None:
    """A run that the shape did not begin: a worker's, or one with the default shape chosen in the web UI.

    Raises:
        StopTest: the target or the options cannot be used.
    """
    try:
        prepare(environment)
    except PlimsollError as error:
        environment.process_exit_code = error.exit_code
        raise StopTest(str(error)) from None


def prepare(environment: Environment) -> None:
    """Find out whom we talk to and how long its tokens are, once for each run.

    Raises:
        PlimsollError: the target or the options cannot be used.
    """
    options: Any = environment.parsed_options
    user_class = next((one for one in environment.user_classes if issubclass(one, ScenarioUser)), None)
    if user_class is None or LoadLineShape.prepared:
        return
    if isinstance(environment.runner, MasterRunner):
        if not options.hold:
            raise ConfigError("climbing to the load line needs one process: give -u, or leave out --master")
    else:
        user_class.traffic = _prepare(environment, find_workload(user_class.workload_name))
    LoadLineShape.prepared = True


def _prepare(environment: Environment, workload: Workload) -> Traffic:
    options: Any = environment.parsed_options
    for name in ("max_batch", "context", "prompt_tokens", "output_tokens", "stage_seconds"):
        value, least = getattr(options, name), int(name == "stage_seconds")
        if not isinstance(value, int) or value < least or (name == "max_batch" and value > MAX_CEILING):
            shown = f"--{name.replace('_', '-')} {value}"
            raise ConfigError(f"{shown} cannot be meant; give a whole number from {least}, or leave it out")
    if not environment.host:
        raise ConfigError("no target: give --host http://host:port")
    endpoint = Endpoint(environment.host, api_key=os.environ.get("PLIMSOLL_API_KEY"))
    connection = Connection(endpoint)
    facts = converse(
        probe(options.model or None, where=environment.host, require_metrics=not options.hold), connection.answer
    )
    engine = ENGINES[facts.engine]
    answer = converse(smoke(facts.model), connection.answer)
    context = options.context or facts.context_tokens
    workload = workload.scaled(context, options.prompt_tokens or None, options.output_tokens or None)
    calibration = converse(calibrate(facts.model, answer.api, context), connection.answer)
    connection.close()
    if not calibration.measured:
        _log.warning("%s reports no token usage: prompts have only roughly the length wanted", environment.host)
    worker = environment.runner.worker_index if isinstance(environment.runner, WorkerRunner) else 0
    maker = RequestMaker(
        workload,
        calibration,
        facts.model,
        answer.api,
        options.seed + worker,
        random.SystemRandom().getrandbits(48),
        ignore_eos=engine.dialect.supports_ignore_eos,
    )
    climb: Climb | None = None

    def tell(record: RequestRecord) -> None:
        _fire(environment, workload.name, record)
        if climb is not None:
            climb.add(record)

    traffic = Traffic(endpoint, maker, on_record=tell)
    limit = options.max_batch or facts.max_running_requests
    if not options.hold and environment.shape_class is not None:
        climb = Climb(traffic, engine, facts, limit, StagePolicy().with_stage_seconds(options.stage_seconds))
        # Fewer users must not mean requests cut in the middle: the server would see cancellations.
        environment.stop_timeout = max(environment.stop_timeout or 0.0, _STOP_SECONDS)
    LoadLineShape.climb = climb
    _log.info(
        "%s: %s, model %s, context %s tokens; %s: %d tokens in, %d out on average",
        environment.host,
        facts.engine,
        facts.model,
        context or "unknown",
        workload.name,
        workload.prompt_tokens,
        workload.output_tokens,
    )
    return traffic


def _fire(environment: Environment, name: str, record: RequestRecord) -> None:
    """Tell Locust of one request: its whole length, and its time to first token as an entry of its own."""
    failure = None if record.outcome in GOOD else RuntimeError(f"{record.outcome.value}: {record.error}")
    begin_ns = record.t_send_ns or record.t_plan_ns
    end_ns = record.t_last_ns if failure is None and record.t_last_ns is not None else record.t_end_ns
    fire: Any = environment.events.request.fire
    entry = {"request_type": "POST", "response_length": record.completion_tokens or 0, "context": {}}
    fire(
        name=f"{name} e2e",
        response_time=(end_ns - begin_ns) / NS * 1000,
        exception=failure,
        start_time=begin_ns / NS,
        **entry,
    )
    ttft = ttft_seconds(record)
    if failure is None and ttft is not None:
        # A row of its own, but no request of its own: Locust's totals must count each request once.
        environment.stats.get(f"{name} TTFT", "POST").log(round(ttft * 1000), 0)


def finish(environment: Environment, **_: Any) -> None:
    """Forget the run, so that the web UI can start another."""
    del environment
    if LoadLineShape.climb is not None:
        LoadLineShape.climb.close()
    LoadLineShape.prepared, LoadLineShape.climb = False, None


_EVENTS: Any = events
_EVENTS.init_command_line_parser.add_listener(add_options)
_EVENTS.init.add_listener(note_users)
_EVENTS.test_start.add_listener(prepare_without_shape)
_EVENTS.test_stop.add_listener(finish)
