"""The parent's end of the driver: starts the child process, changes its stage, and hears of every request.

The child is the only process that imports Locust and gevent. It gets a session of its own, so Ctrl-C in the terminal
reaches only the parent, who decides; and it ends by itself when the parent is gone.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.protocol import (
    ClientHealth,
    DriverConfig,
    TimeLimits,
    decode_record,
    encode,
    encode_config,
)
from serving.clock import SystemClock
from serving.errors import PlimsollError
from serving.records import Outcome, RequestRecord

__all__ = ["ClientHealth", "DriverConfig", "DriverLink", "TimeLimits"]

_LINE_LIMIT_BYTES = 64 * 1024 * 1024
_START_SECONDS = 60.0
_END_SECONDS = 5.0
_LAST_LINES = 12


class DriverLink:
    """A running driver. Make one with `start`, and always `close` it.

    Every request that the driver said it issued is reported exactly once through `on_record`: if the driver dies, the
    requests it had in flight are reported as unfinished, and then `on_died` is called.
    """

    def __init__(
        self,
        config: DriverConfig,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        handlers: tuple[
            Callable[[RequestRecord], None] | None,
            Callable[[int, int], None] | None,
            Callable[[ClientHealth], None] | None,
            Callable[[int, str], None] | None,
        ],
    ) -> None:
        self.issued = 0
        """Requests that the driver has issued."""
        self._config = config
        self._clock = SystemClock(config.anchor_ns)
        self._process = process
        self._reader, self._writer = streams
        self._on_record, self._on_in_flight, self._on_health, self._on_died = handlers
        self._open: dict[int, Sequence[Any]] = {}
        self._ready = asyncio.Event()
        self._in_force: dict[str, asyncio.Future[int]] = {}
        self._stopping = False
        self._last_words: deque[str] = deque(maxlen=_LAST_LINES)
        self._ended = asyncio.Event()
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def start(
        cls,
        config: DriverConfig,
        *,
        on_record: Callable[[RequestRecord], None] | None = None,
        on_in_flight: Callable[[int, int], None] | None = None,
        on_health: Callable[[ClientHealth], None] | None = None,
        on_died: Callable[[int, str], None] | None = None,
    ) -> "DriverLink":
        """Start the child and wait until it is ready for its first stage.

        Args:
            config: what to send, and where.
            on_record: called with each request that ended, within a quarter of a second.
            on_in_flight: called with (requests in flight, t_ns) at every change, at most every 100 ms and at least
                every second.
            on_health: called every second.
            on_died: called with (exit code, last lines of its error output) when the child ends without being told.

        Raises:
            PlimsollError: the child did not start.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with tempfile.TemporaryDirectory(prefix="plimsoll-driver-") as empty:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "loadgen.driver", "--fd", str(theirs.fileno())),
                    cwd=empty,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            streams = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT_BYTES)
            link = cls(config, process, streams, (on_record, on_in_flight, on_health, on_died))
            try:
                await link._begin()
            except BaseException:
                await link.close()
                raise
        return link

    async def stage(self, name: str, offered: int) -> int:
        """Offer `offered` requests at once under that stage name from now on; returns `t_ns` since when.

        Users that are no longer wanted finish their request first; new ones begin at once.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._in_force[name] = future
        if self._ended.is_set() or not self._send(encode(stage={"name": name, "offered": offered})):
            return self._clock.now_ns()
        return await future

    async def stop(self, grace_seconds: float) -> None:
        """Issue no more requests; give those in flight `grace_seconds` to end, then cut them off as unfinished.

        Every record has been reported when this returns.
        """
        self._stopping = True
        if not self._ended.is_set() and self._send(encode(stop={"grace_seconds": grace_seconds})):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds + _END_SECONDS):
                    await self._ended.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the child now. What it had in flight is reported as unfinished."""
        self._stopping = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
        await self._following

    async def close(self) -> None:
        """Make sure that the child is gone and nothing is left open."""
        await self.kill()

    async def _begin(self) -> None:
        self._send(encode_config(self._config))
        waiting = [asyncio.create_task(event.wait()) for event in (self._ready, self._ended)]
        try:
            done, _ = await asyncio.wait(waiting, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not self._ready.is_set():
            why = "\n".join(self._last_words) if done else f"not ready within {_START_SECONDS:g} s"
            raise PlimsollError(f"the load generator's process did not start: {why or 'it ended without a word'}")

    def _send(self, line: bytes) -> bool:
        if self._writer.is_closing():
            return False
        self._writer.write(line)
        return True

    async def _follow(self) -> None:
        """Everything that the child says, until it is gone."""
        listening = asyncio.create_task(self._listen())
        stopped = False
        try:
            with contextlib.suppress(OSError):
                while line := await self._reader.readline():
                    if not line.endswith(b"\n"):
                        break  # the child died while it wrote
                    stopped = self._take(json.loads(line)) or stopped
        finally:
            # Also when a handler raised: nobody may wait for a child that is no longer listened to.
            self._writer.close()
            code = await self._reap()
            await listening
            self._ended.set()
            for future in self._in_force.values():
                if not future.done():
                    future.set_result(self._clock.now_ns())
        self._report_cut()
        if not stopped and not self._stopping and self._ready.is_set() and self._on_died is not None:
            self._on_died(code, "\n".join(self._last_words))

    async def _reap(self) -> int:
        """The child's exit code; it ends by itself once its socket is closed, or else by force."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            self._process.send_signal(signal.SIGKILL)
            return await self._process.wait()

    async def _listen(self) -> None:
        stream = self._process.stderr
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # a line beyond the limit was thrown away
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._last_words.append(text[:300])

    def _take(self, message: dict[str, Any]) -> bool:
        """Handle one message; True when it was the last one of an orderly stop."""
        for kind, value in message.items():
            if kind == "record":
                record = decode_record(value)
                self._open.pop(record.request_id, None)
                if self._on_record is not None:
                    self._on_record(record)
            elif kind == "issued":
                self.issued += len(value)
                self._open.update((request[0], request) for request in value)
            elif kind == "in_flight":
                if self._on_in_flight is not None:
                    self._on_in_flight(*value)
            elif kind == "health":
                if self._on_health is not None:
                    self._on_health(ClientHealth(**value))
            elif kind == "stage":
                name, t_ns = value
                future = self._in_force.pop(name, None)
                if future is not None and not future.done():
                    future.set_result(t_ns)
            elif kind == "ready":
                self._ready.set()
            elif kind == "stopped":
                return True
        return False

    def _report_cut(self) -> None:
        """Report what a dead driver left open: the parent promised one record for each request."""
        now_ns = self._clock.now_ns()
        for request_id, stage, user, t_plan_ns, prompt_tokens, output_tokens in self._open.values():
            record = RequestRecord(
                request_id=request_id,
                stage=stage,
                user=user,
                outcome=Outcome.UNFINISHED,
                t_plan_ns=t_plan_ns,
                t_send_ns=None,
                t_headers_ns=None,
                t_first_ns=None,
                t_first_content_ns=None,
                t_last_ns=None,
                t_end_ns=now_ns,
                frames=0,
                frame_gaps_us=(),
                planned_prompt_tokens=prompt_tokens,
                planned_output_tokens=output_tokens,
                prompt_tokens=None,
                cached_tokens=None,
                completion_tokens=None,
                finish_reason=None,
                http_status=None,
                error="the load generator's process ended before the answer did",
                arrival_source="read",
                arrival_lag_us=None,
            )
            if self._on_record is not None:
                self._on_record(record)
        self._open.clear()
