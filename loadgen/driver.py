"""The load generator's child process: Locust as a library, told by its parent what to offer.

`python -P -m loadgen.driver --fd N` speaks `loadgen.protocol` over the socket it inherits as descriptor N. Users are
Locust users; how many of them ask at a time is changed by opening and closing a gate, not by stopping them, so a
smaller stage lets each finish its request and a larger one begins at once.
"""

# Locust patches the standard library when imported: before anything else binds a socket or lock of the original kind.
import locust  # noqa: F401, I001

import argparse
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import gevent  # type: ignore[import-untyped]
import gevent.socket  # type: ignore[import-untyped]
from gevent.event import Event  # type: ignore[import-untyped]
from locust import task
from locust.env import Environment
from locust.exception import StopUser

from loadgen.client import Endpoint, RequestSpec
from loadgen.protocol import ClientHealth, decode_config, encode, encode_record
from loadgen.scenarios.base import LoadUser, Traffic
from serving.clock import NS, SystemClock
from serving.records import Outcome, RequestRecord

__all__ = ["main"]

_FLUSH_SECONDS = 0.1
_REPORT_SECONDS = 1.0
_PROBE_SECONDS = 0.01
_CUT_SECONDS = 2.0
_ORPHANED = 3


class _Gate:
    """Lets the first `offered` users through, and none once the run stops."""

    def __init__(self) -> None:
        self.offered = 0
        self.stopping = False
        self._changed = Event()

    def set(self, offered: int) -> None:
        self.offered = offered
        self._wake()

    def stop(self) -> None:
        self.stopping = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def is_open(self, number: int) -> bool:
        return number < self.offered and not self.stopping

    def wait(self, number: int) -> bool:
        """Wait for the turn of user `number`; False when the run stops instead. True at once when it is open."""
        while not self.is_open(number):
            if self.stopping:
                return False
            self._changed.wait()
        return True

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the end of the run."""
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)


class DriverUser(LoadUser):
    """A user behind the gate."""

    gate: ClassVar[_Gate]

    @task
    def ask(self) -> None:
        """Ask as long as it is this user's turn, without going back to Locust in between."""
        while True:
            waited = not self.gate.is_open(self.number)
            if not self.gate.wait(self.number):
                raise StopUser
            if waited:
                self.t_due_ns = None
            self.ask_once()

    def pause(self, seconds: float) -> None:
        """Back off, but hear the end of the run."""
        self.gate.pause(seconds)


class _Driver:
    """The child's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = gevent.socket.socket(fileno=descriptor)
        self._gate = _Gate()
        self._runner: Any = None
        self._spawned = 0
        self._traffic: Traffic
        self._clock: SystemClock
        self._issued: list[tuple[int, str, int, int, int, int]] = []
        self._outbox: list[bytes] = []
        self._writing = False
        self._told_in_flight = 0
        self._loop_lags: list[float] = []
        self._send_lags: list[float] = []
        self._arrival_lags: list[float] = []

    def run(self) -> None:
        """Serve the parent until it says stop or is gone. Does not return."""
        for line in self._lines():
            message = json.loads(line)
            if "config" in message:
                self._prepare(message["config"])
            elif "stage" in message:
                self._offer(**message["stage"])
            elif "stop" in message:
                gevent.spawn(self._stop, message["stop"]["grace_seconds"])
        # End of file: the parent is gone, and with it everyone who could use what is still in flight.
        os._exit(_ORPHANED)

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(65536):
                *lines, rest = (rest + data).split(b"\n")
                yield from lines

    def _prepare(self, values: dict[str, Any]) -> None:
        config = decode_config(values)
        self._clock = SystemClock(config.anchor_ns)
        endpoint = Endpoint(
            config.base_url, api_key=os.environ.get("PLIMSOLL_API_KEY"), limits=config.limits, clock=self._clock
        )
        self._traffic = Traffic(endpoint, config.maker(), on_issue=self._on_issue, on_record=self._on_record)
        DriverUser.traffic = self._traffic
        DriverUser.gate = self._gate
        self._runner = Environment(user_classes=[DriverUser]).create_local_runner()
        gevent.spawn(self._probe)
        gevent.spawn(self._report)
        # What exists now lives as long as the process: the collector need not walk it between two frames.
        gc.collect()
        gc.freeze()
        self._outbox.append(encode(ready=os.getpid()))
        self._flush()

    def _offer(self, name: str, offered: int) -> None:
        self._traffic.stage = name
        self._gate.set(offered)
        t_ns = self._clock.now_ns()
        if offered > self._spawned:
            self._spawned = offered
            self._runner.start(offered, spawn_rate=offered)
            self._runner.spawning_greenlet.join()
        self._outbox.append(encode(stage=(name, t_ns)))
        self._flush()

    def _stop(self, grace_seconds: float) -> None:
        self._gate.stop()
        self._wait_idle(grace_seconds)
        for connection in list(self._traffic.connections):
            connection.abort(Outcome.UNFINISHED)
        self._wait_idle(_CUT_SECONDS)
        self._report_in_flight()
        self._outbox.append(encode(stopped=self._traffic.issued))
        while self._outbox or self._writing:
            self._flush()
            gevent.sleep(0.01)
        os._exit(0)

    def _wait_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._traffic.in_flight and time.monotonic() < deadline:
            gevent.sleep(0.01)

    def _on_issue(self, spec: RequestSpec) -> None:
        self._issued.append(
            (
                spec.request_id,
                spec.stage,
                spec.user,
                spec.t_plan_ns,
                spec.planned_prompt_tokens,
                spec.planned_output_tokens,
            )
        )

    def _on_record(self, record: RequestRecord) -> None:
        self._outbox.append(encode_record(record))
        if record.t_send_ns is not None:
            self._send_lags.append((record.t_send_ns - record.t_plan_ns) / NS)
        if record.arrival_lag_us is not None:
            self._arrival_lags.append(record.arrival_lag_us / 1e6)

    def _flush(self) -> None:
        """Send what has gathered; what gathers meanwhile waits for the next time."""
        if self._writing:
            return
        lines, self._outbox = self._outbox, []
        if self._issued:
            # Whoever counts must hear of a request before hearing how it ended.
            lines.insert(0, encode(issued=self._issued))
            self._issued = []
        self._writing = True
        try:
            self._socket.sendall(b"".join(lines))
        except OSError:
            os._exit(_ORPHANED)
        finally:
            self._writing = False

    def _probe(self) -> None:
        """How late does a timer come? The same lateness awaits every frame that has no kernel stamp."""
        while True:
            due = time.monotonic() + _PROBE_SECONDS
            gevent.sleep(_PROBE_SECONDS)
            self._loop_lags.append(max(0.0, time.monotonic() - due))

    def _report(self) -> None:
        last, last_cpu = time.monotonic(), time.process_time()
        while True:
            gevent.sleep(_FLUSH_SECONDS)
            now = time.monotonic()
            full = now - last >= _REPORT_SECONDS
            self._report_in_flight(always=full)
            if full:
                cpu = time.process_time()
                self._report_health(now - last, (cpu - last_cpu) / (now - last))
                last, last_cpu = now, cpu
            self._flush()

    def _report_in_flight(self, *, always: bool = False) -> None:
        in_flight = self._traffic.in_flight
        if always or in_flight != self._told_in_flight:
            self._told_in_flight = in_flight
            self._outbox.append(encode(in_flight=(in_flight, self._clock.now_ns())))

    def _report_health(self, seconds: float, cpu_ratio: float) -> None:
        lags = sorted(self._loop_lags) or [0.0]
        health = ClientHealth(
            t_ns=self._clock.now_ns(),
            seconds=seconds,
            cpu_ratio=cpu_ratio,
            loop_lag_p99_seconds=lags[(len(lags) - 1) * 99 // 100],
            loop_lag_max_seconds=lags[-1],
            send_lag_max_seconds=max(self._send_lags, default=None),
            arrival_lag_max_seconds=max(self._arrival_lags, default=None),
        )
        self._loop_lags, self._send_lags, self._arrival_lags = [], [], []
        self._outbox.append(encode(health=asdict(health)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the driver on the socket that the parent handed over."""
    parser = argparse.ArgumentParser(prog="loadgen.driver", description="Started by plimsoll, not by hand.")
    parser.add_argument("--fd", type=int, required=True)
    descriptor = parser.parse_args(arguments).fd
    # Ctrl-C is the parent's to handle: it stops this process in order, so that every request has its record.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _Driver(descriptor).run()


if __name__ == "__main__":
    main()
