"""What the driver's process and its parent say to each other: JSON lines over a socket pair.

Down: one `config`, then `stage` and `stop`. Up: `ready`, `stage` (now in force), `issued`, `record`, `in_flight`,
`health` and `stopped`. Each message is an object with one member. Neither gevent nor Locust is needed to speak it.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from loadgen.prompts import Calibration
from loadgen.tally import SloLimits
from loadgen.workloads import RequestMaker, Workload
from serving.records import Outcome, RequestRecord
from serving.stream import Api

__all__ = [
    "ClientHealth",
    "DriverConfig",
    "TimeLimits",
    "decode_config",
    "decode_record",
    "encode",
    "encode_config",
    "encode_record",
]


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long to wait, seconds. `first_byte` runs from the request's first byte to the answer's head."""

    connect_seconds: float = 10.0
    first_byte_seconds: float = 300.0
    request_seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """What the driver needs to know before the first stage. The API key is not in it: it is inherited by environment.

    Attributes:
        base_url: where the target is.
        model: model name to send.
        api: request form.
        workload: lengths, already scaled to the target's context.
        calibration: tokens to words.
        seed: what lengths and texts depend on.
        anchor_ns: the parent clock's anchor, so that both stamp on one line.
        ignore_eos: the engine understands `ignore_eos`.
        shared_prefix: let prompts share their first half, for a look at the prefix cache.
        limits: time limits.
        run_nonce: 48 bits that keep prompts of this run apart from those of all others, whatever the seed.
    """

    base_url: str
    model: str
    api: Api
    workload: Workload
    calibration: Calibration
    seed: int
    anchor_ns: int
    ignore_eos: bool = True
    shared_prefix: bool = False
    limits: TimeLimits = field(default_factory=TimeLimits)
    run_nonce: int = field(default_factory=lambda: secrets.randbits(48))

    def maker(self) -> RequestMaker:
        """What makes this run's requests."""
        return RequestMaker(
            self.workload,
            self.calibration,
            self.model,
            self.api,
            self.seed,
            self.run_nonce,
            ignore_eos=self.ignore_eos,
            shared_prefix=self.shared_prefix,
        )


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How well the load generator kept up during one second, or about one.

    Attributes:
        t_ns: end of the interval.
        seconds: its length.
        cpu_ratio: CPU time of the driver's process over the interval; 1.0 is one core, which is all it can use.
        loop_lag_p99_seconds: lateness of a timer in the driver's event loop, 99th percentile.
        loop_lag_max_seconds: the same, largest.
        send_lag_max_seconds: largest time between a request's due time and its first byte; None when none was sent.
        arrival_lag_max_seconds: largest time between a frame's arrival and our reading it; None when not known.
    """

    t_ns: int
    seconds: float
    cpu_ratio: float
    loop_lag_p99_seconds: float
    loop_lag_max_seconds: float
    send_lag_max_seconds: float | None
    arrival_lag_max_seconds: float | None


_RECORD_FIELDS: Final = tuple(item.name for item in fields(RequestRecord))
_OUTCOME: Final = _RECORD_FIELDS.index("outcome")
_GAPS: Final = _RECORD_FIELDS.index("frame_gaps_us")


def encode(**message: Any) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_config(config: DriverConfig) -> bytes:
    """The first line down."""
    return encode(config=asdict(config))


def decode_config(values: dict[str, Any]) -> DriverConfig:
    """The inverse of `encode_config`, given the value of `config`."""
    workload = dict(values["workload"])
    workload["slo"] = SloLimits(**workload["slo"])
    changed = {
        "workload": Workload(**workload),
        "calibration": Calibration(**values["calibration"]),
        "limits": TimeLimits(**values["limits"]),
    }
    return DriverConfig(**(values | changed))


def encode_record(record: RequestRecord) -> bytes:
    """A record as one line, its fields in order."""
    return encode(record=[getattr(record, name) for name in _RECORD_FIELDS])


def decode_record(values: Sequence[Any]) -> RequestRecord:
    """The inverse of `encode_record`, given the value of `record`."""
    items = list(values)
    items[_OUTCOME] = Outcome(items[_OUTCOME])
    items[_GAPS] = tuple(items[_GAPS])
    return RequestRecord(*items)
