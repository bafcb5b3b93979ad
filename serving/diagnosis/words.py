"""The words in which the end of a server is told: classes of failure, the evidence, and the one thing to do next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Confidence", "DiagnosedLog", "Diagnosis", "EarlierStart", "Evidence", "Failure", "Phase", "State"]


class Failure(StrEnum):
    """Why a server did not start, died, or did not do what it was asked."""

    WEIGHTS_UNREADABLE = "weights_unreadable"
    """Path, shards, format or quantisation: the weights cannot be read."""
    WEIGHTS_OUT_OF_MEMORY = "weights_out_of_memory"
    MEMORY_TAKEN = "memory_taken"
    """The card's memory is held by another process before the engine begins."""
    KV_CACHE_UNALLOCATED = "kv_cache_unallocated"
    KV_CACHE_BELOW_REQUEST = "kv_cache_below_request"
    """There is a KV cache, and it holds less than one request of the configured length."""
    WARM_UP = "warm_up"
    """Profile run, workspace, graph capture or warm-up."""
    RUNTIME_OUT_OF_MEMORY = "runtime_out_of_memory"
    KV_CACHE_EXHAUSTED = "kv_cache_exhausted"
    """The KV cache ran full while serving, and requests were lost for it."""
    REQUEST_REFUSED = "request_refused"
    """The server is well; what it was sent is not: too long, a bad field, a time limit."""
    COMMUNICATION = "communication"
    HANG = "hang"
    """The engine stopped making progress and its own watchdog ended it."""
    KILLED = "killed"
    """Ended from outside: signal 9, the kernel's or a container's memory limit."""
    CRASHED = "crashed"
    """A process ended by a signal of its own making: segmentation fault, abort, illegal instruction."""
    DRIVER = "driver"
    """Driver, CUDA library or the card itself."""
    MODEL_UNSUPPORTED = "model_unsupported"
    """This release or this card cannot run this model, or may not (custom code)."""
    SETTINGS = "settings"
    """A setting that the engine refuses."""
    PORT_IN_USE = "port_in_use"
    ACCESS_DENIED = "access_denied"
    DISK_FULL = "disk_full"
    SHARED_MEMORY = "shared_memory"
    LIMITS = "limits"
    """A limit of the operating system, such as open files."""


class Phase(StrEnum):
    """How far a start had come."""

    LAUNCH = "launch"
    WEIGHTS = "weights"
    PROFILE = "profile"
    KV_CACHE = "kv_pool"
    GRAPHS = "graphs"
    SERVING = "serving"
    UNKNOWN = "unknown"
    """The log does not show it."""


class State(StrEnum):
    """What the log leaves the server in."""

    SERVING = "serving"
    STARTING = "starting"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """Nothing in the log is a word of an engine that is known."""


class Confidence(StrEnum):
    """How much the evidence carries."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line of the log, fit to be shown: cut, without terminal codes, without secrets.

    Attributes:
        line: its number, from 1.
        text: what it says.
        times: how many lines said the same.
        ranks: which ranks did.
    """

    line: int
    text: str
    times: int = 1
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why the last start failed or the server died.

    Attributes:
        failure: the class.
        title: the class for people.
        cause: one sentence, with the figures.
        figures: figures from the evidence and the start-up lines by name, with the unit in the name.
        evidence: lines that say so, in the order of the log; the first that named the cause is `cause_line`.
        cause_line: number of that line.
        ranks: ranks that said it; empty where the log names none.
        phase: how far the start had come, or serving.
        requests_before: requests answered before it; None where the log does not show them.
        confidence: how much the evidence carries.
        doubts: what lowers it.
        next_step: the one thing to do.
        leave_alone: what not to touch, and why.
        engine: whose log it is, where that was seen.
    """

    failure: Failure
    title: str
    cause: str
    figures: Mapping[str, float | int | str]
    evidence: tuple[Evidence, ...]
    cause_line: int
    ranks: tuple[str, ...]
    phase: Phase
    requests_before: int | None
    confidence: Confidence
    doubts: tuple[str, ...]
    next_step: str
    leave_alone: tuple[str, ...]
    engine: str | None


@dataclass(frozen=True, slots=True)
class EarlierStart:
    """A start before the one that is diagnosed.

    Attributes:
        first_line: where it begins.
        last_line: where it ends.
        state: what it came to.
        failure: why, where that is known.
        cause: the sentence about it.
    """

    first_line: int
    last_line: int
    state: State
    failure: Failure | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class DiagnosedLog:
    """What a whole log tells.

    Attributes:
        diagnosis: of the last start; None where no cause was found.
        state: what the log leaves the server in.
        state_text: the same as a sentence.
        engine: whose log it is, where that was seen.
        lines: lines read.
        starts: starts seen in the log, 0 where it begins in the middle of one.
        earlier: starts before the last one, the newest last; of many only the last ones.
        refused: kind of refused request -> how many, in the last start.
        last_error: the last error of the last start that no class knows.
    """

    diagnosis: Diagnosis | None
    state: State
    state_text: str
    engine: str | None
    lines: int
    starts: int
    earlier: tuple[EarlierStart, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    last_error: Evidence | None = None
