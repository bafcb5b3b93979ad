"""The records that cross package boundaries: a request, a stage, an event. Times are `t_ns` of `serving.clock`."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["GOOD", "Event", "Outcome", "RequestRecord", "Stage"]


class Outcome(StrEnum):
    """How one request ended. Every issued request has exactly one; the counts of a stage add up to `issued`."""

    OK = "ok"
    SHORT = "short"
    """Ended properly, but with fewer tokens than asked although the end-of-sequence token was to be ignored."""
    TRUNCATED = "truncated"
    """The stream ended without a finish reason, a terminator, or any text."""
    STREAM_ERROR = "stream_error"
    """An error event, or a frame that cannot be read, inside a stream that began with HTTP 200."""
    HTTP_ERROR = "http_error"
    TIMEOUT = "timeout"
    CLIENT_ERROR = "client_error"
    """Our side could not send: no port, no descriptor, no connection."""
    CANCELLED = "cancelled"
    """We ended it on purpose."""
    UNFINISHED = "unfinished"
    """Still running when the run had to end."""


GOOD = (Outcome.OK, Outcome.SHORT)
"""Outcomes that are answers: a short one is complete, only shorter than asked."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it. Never holds text of prompt or answer.

    Text-bearing frames are those with reasoning, content or tool arguments; role, usage, finish and comment frames do
    not count. `None` means not measured or not reported.
    """

    request_id: int
    stage: str
    """Name of the stage in force when the request was issued; `warmup` is not counted in results."""
    user: int
    outcome: Outcome
    t_plan_ns: int
    """When the request was due (closed loop: when the previous one of this user ended)."""
    t_send_ns: int | None
    """First byte written."""
    t_headers_ns: int | None
    t_first_ns: int | None
    """Arrival of the first text-bearing frame."""
    t_first_content_ns: int | None
    """Arrival of the first text that is not reasoning."""
    t_last_ns: int | None
    """Arrival of the last text-bearing frame."""
    t_end_ns: int
    frames: int
    """Text-bearing frames."""
    frame_gaps_us: tuple[int, ...]
    """Microseconds between successive text-bearing frames; length `frames - 1`."""
    planned_prompt_tokens: int
    planned_output_tokens: int
    prompt_tokens: int | None
    """From the server's usage."""
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    http_status: int | None
    error: str | None
    """The server's or the system's own message, at most 300 characters."""
    arrival_source: str
    """`kernel` when arrival stamps are the kernel's receive times, else `read`."""
    arrival_lag_us: int | None
    """Largest time between a frame's arrival and our reading of it: the client's own lateness."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of constant offered load. `t_settled_ns` begins the measured window, `t_end_ns` ends it."""

    name: str
    offered: int
    t_start_ns: int
    t_settled_ns: int | None
    t_end_ns: int | None
    counted: bool
    """False for warm-up and for a stage that was cut short."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the target or the run: restart, deploy, config, server_died, interrupted ..."""

    t_ns: int
    kind: str
    text: str
