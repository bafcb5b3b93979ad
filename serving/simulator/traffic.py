"""Requests from elsewhere: the customers of a simulated server, so that a watch sees more than our own generator.

The rate has a day (a cosine around its peak hour), a weekend, a trend and seeded bursts; arrivals are a Poisson process
with that rate, thinned from a bound (Lewis and Shedler 1979). Time is divided into cells of a minute, each with a
generator of its own, so that what arrives does not depend on how the caller cuts time. Days and hours are UTC. Pure.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Final

from serving.clock import NS
from serving.errors import ConfigError
from serving.simulator.spec import Arrival, Finish

__all__ = ["Traffic", "parse_traffic"]

HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS
WEEK_SECONDS = 7 * DAY_SECONDS
CELL_SECONDS = 60
"""Short, so that the bound that arrivals are thinned from is close; a divisor of the day, so that a cell has one."""
CELL_NS = CELL_SECONDS * NS
FIRST_SATURDAY = 2
"""1970-01-01, day 0, was a Thursday."""
ID_BITS = 20
"""Arrivals of one cell are numbered in this many bits; above them stands the number of the cell."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What customers ask of a server.

    Attributes:
        per_second: mean requests per second on a working day at `since_ns`, bursts not counted.
        prompt_tokens: mean prompt length.
        output_tokens: mean answer length.
        prompt_spread: standard deviation of the logarithm of the prompt length.
        output_spread: the same of the answer length.
        context_tokens: lengths are cut to fit this context; None does not cut.
        diurnal_ratio: how far the day's peak is above its mean, and its trough below: 0 is flat, 1 is silent at night.
        peak_hour: hour of the day (UTC) at which most arrive.
        weekend_ratio: rate on Saturdays and Sundays over that on working days.
        bursts_per_day: mean number of bursts that begin in a day.
        burst_ratio: rate in a burst over that without it; bursts that overlap do not add up.
        burst_seconds: how long a burst lasts; at most a day.
        growth_ratio_per_week: 0.05 grows by 5 % a week, compounded.
        since_ns: when growth is nothing yet.
        disconnect_share: share of requests whose client goes away, anywhere in the answer.
        shared_prefix_share: share of prompts that begin with the common prefix.
        shared_prefix_tokens: its length; a shorter prompt has only its beginning.
        seed: everything that is drawn depends on it.

    Raises:
        ConfigError: a figure that makes no sense.
    """

    per_second: float
    prompt_tokens: float = 500.0
    output_tokens: float = 200.0
    prompt_spread: float = 0.6
    output_spread: float = 0.6
    context_tokens: int | None = None
    diurnal_ratio: float = 0.0
    peak_hour: float = 14.0
    weekend_ratio: float = 1.0
    bursts_per_day: float = 0.0
    burst_ratio: float = 3.0
    burst_seconds: float = 300.0
    growth_ratio_per_week: float = 0.0
    since_ns: int = 0
    disconnect_share: float = 0.0
    shared_prefix_share: float = 0.0
    shared_prefix_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for row in fields(self):
            value = getattr(self, row.name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"traffic: {row.name} must be a finite number, got {value}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"traffic: {name} must be {_words(low, high)}, got {value:g}")

    def rate(self, t_ns: int) -> float:
        """Requests per second at that moment."""
        second = t_ns / NS
        day = t_ns // (DAY_SECONDS * NS)
        swing = 1 + self.diurnal_ratio * math.cos(math.tau * (second / HOUR_SECONDS - self.peak_hour) / 24)
        rate = self.per_second * swing * self._weeks(t_ns)
        if (day - FIRST_SATURDAY) % 7 < 2:
            rate *= self.weekend_ratio
        if self.bursts_per_day and any(start <= second < start + self.burst_seconds for start in self._bursts(day)):
            rate *= self.burst_ratio
        return rate

    def arrivals(self, start_ns: int, end_ns: int, block_tokens: int = 16) -> Iterator[Arrival]:
        """Requests that arrive in [start, end), in order of time.

        Neighbouring spans put together give what one span over both gives. Ids grow with time and are far above those
        that anything which counts from 0 gives out.

        Args:
            start_ns: first moment.
            end_ns: first moment that does not count.
            block_tokens: tokens in one KV block, for the hashes of a prompt that begins with the common prefix.
        """
        for cell in range(start_ns // CELL_NS, -(-end_ns // CELL_NS)):
            for arrival in _cell(self, cell, block_tokens):
                if start_ns <= arrival.t_ns < end_ns:
                    yield arrival

    def _weeks(self, t_ns: int) -> float:
        if not self.growth_ratio_per_week:
            return 1.0
        return float((1 + self.growth_ratio_per_week) ** ((t_ns - self.since_ns) / (WEEK_SECONDS * NS)))

    def _bursts(self, day: int) -> tuple[float, ...]:
        """Starts, in seconds since the epoch, of all bursts that can touch that day."""
        return _burst_starts(self.seed, self.bursts_per_day, day - 1) + _burst_starts(
            self.seed, self.bursts_per_day, day
        )

    def _bound(self, cell: int) -> float:
        """A rate that is not exceeded in that cell, and close above what is reached."""
        start_ns, middle_ns, end_ns = cell * CELL_NS, cell * CELL_NS + CELL_NS // 2, (cell + 1) * CELL_NS
        day = cell * CELL_SECONDS // DAY_SECONDS
        hour = middle_ns / (HOUR_SECONDS * NS)
        # The cosine moves by less than its steepest slope times half a cell from its value in the middle.
        slack = math.tau / DAY_SECONDS * CELL_SECONDS / 2
        swing = 1 + self.diurnal_ratio * min(1.0, math.cos(math.tau * (hour - self.peak_hour) / 24) + slack)
        bound = self.per_second * swing * max(self._weeks(start_ns), self._weeks(end_ns))
        if (day - FIRST_SATURDAY) % 7 < 2:
            bound *= self.weekend_ratio
        if self.bursts_per_day and any(
            start < end_ns / NS and start_ns / NS < start + self.burst_seconds for start in self._bursts(day)
        ):
            bound *= max(1.0, self.burst_ratio)
        return bound


_UP: Final = math.inf
_RANGES: Final = (
    ("per_second", 0.0, 1e6),
    ("prompt_tokens", 1.0, _UP),
    ("output_tokens", 1.0, _UP),
    ("prompt_spread", 0.0, 3.0),
    ("output_spread", 0.0, 3.0),
    ("context_tokens", 2, _UP),
    ("diurnal_ratio", 0.0, 1.0),
    ("peak_hour", 0.0, 24.0),
    ("weekend_ratio", 0.0, _UP),
    ("bursts_per_day", 0.0, 1440.0),
    ("burst_ratio", 0.0, 1e3),
    ("burst_seconds", 0.0, DAY_SECONDS),
    ("growth_ratio_per_week", -0.99, 10.0),
    ("disconnect_share", 0.0, 1.0),
    ("shared_prefix_share", 0.0, 1.0),
    ("shared_prefix_tokens", 0, _UP),
)


def _words(low: float, high: float) -> str:
    return f"at least {low:g}" if high == _UP else f"between {low:g} and {high:g}"


@lru_cache(maxsize=64)
def _burst_starts(seed: int, per_day: float, day: int) -> tuple[float, ...]:
    rng = random.Random(f"{seed}/burst/{day}")
    starts: list[float] = []
    second = rng.expovariate(per_day)
    while second < 1:
        starts.append((day + second) * DAY_SECONDS)
        second += rng.expovariate(per_day)
    return tuple(starts)


# Callers step through time in spans far shorter than a cell.
@lru_cache(maxsize=16)
def _cell(traffic: Traffic, cell: int, block_tokens: int) -> tuple[Arrival, ...]:
    bound = traffic._bound(cell)  # noqa: SLF001
    if bound <= 0:
        return ()
    rng = random.Random(f"{traffic.seed}/cell/{cell}")
    prompt_centre = math.log(traffic.prompt_tokens) - traffic.prompt_spread**2 / 2
    output_centre = math.log(traffic.output_tokens) - traffic.output_spread**2 / 2
    context = traffic.context_tokens
    found: list[Arrival] = []
    second = rng.expovariate(bound)
    while second < CELL_SECONDS:
        t_ns = cell * CELL_NS + int(second * NS)
        if rng.random() * bound < traffic.rate(t_ns):
            prompt = max(1, round(rng.lognormvariate(prompt_centre, traffic.prompt_spread)))
            output = max(1, round(rng.lognormvariate(output_centre, traffic.output_spread)))
            if context is not None:
                output = min(output, context - 1)
                prompt = min(prompt, context - output)
            finish = Finish.STOP
            if rng.random() < traffic.disconnect_share:
                finish = Finish.CANCELLED
                output = rng.randint(1, output)
            number = cell << ID_BITS | len(found)
            prefix: tuple[int, ...] = ()
            if rng.random() < traffic.shared_prefix_share:
                blocks = prompt // block_tokens
                shared = min(blocks, traffic.shared_prefix_tokens // block_tokens)
                # Hashes of the common beginning are small, those of the rest are nobody else's.
                prefix = (*range(1, shared + 1), *range(number << ID_BITS, (number << ID_BITS) + blocks - shared))
            found.append(Arrival(number, t_ns, prompt, output, prefix, finish))
        second += rng.expovariate(bound)
    return tuple(found)


_PER: Final = {"s": 1, "min": 60, "h": HOUR_SECONDS, "day": DAY_SECONDS}
_KEYS: Final = {
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "prompt_spread": "prompt_spread",
    "output_spread": "output_spread",
    "context": "context_tokens",
    "diurnal": "diurnal_ratio",
    "peak": "peak_hour",
    "weekend": "weekend_ratio",
    "bursts": "bursts_per_day",
    "burst_size": "burst_ratio",
    "burst_seconds": "burst_seconds",
    "growth": "growth_ratio_per_week",
    "disconnect": "disconnect_share",
    "prefix": "shared_prefix_share",
    "prefix_tokens": "shared_prefix_tokens",
    "seed": "seed",
}
_WHOLE: Final = frozenset({"context_tokens", "shared_prefix_tokens", "seed"})


def parse_traffic(text: str, *, since_ns: int, seed: int = 0) -> Traffic:
    """Traffic as a flag gives it: a rate, then what differs from the defaults of `Traffic`.

    `2/s,prompt=500,output=200,diurnal=0.6,peak=14,weekend=0.4,bursts=3,burst_size=4,burst_seconds=300,growth=5%`

    Rates are per `s`, `min`, `h` or `day`; a figure may be in per cent.

    Args:
        text: the flag's value.
        since_ns: when growth is nothing yet: the start of the simulation.
        seed: used unless the text has one.

    Raises:
        ConfigError: the text cannot be read, or a figure makes no sense.
    """
    head, *items = (item.strip() for item in text.split(","))
    figure, slash, unit = head.partition("/")
    if not slash or unit.strip() not in _PER:
        raise ConfigError(
            f"traffic {text!r} must begin with a rate such as 2/s: requests per {', '.join(_PER)}, not {head!r}"
        )
    values: dict[str, float] = {"per_second": _number(head, figure) / _PER[unit.strip()]}
    for item in items:
        key, equals, figure = item.partition("=")
        name = _KEYS.get(key.strip().replace("-", "_"))
        if not equals or name is None:
            raise ConfigError(f"traffic: {item!r} is none of {', '.join(key + '=' for key in _KEYS)}")
        if name in values:
            raise ConfigError(f"traffic: {key.strip()} is given twice")
        value = _number(item, figure)
        if name in _WHOLE:
            if value != int(value):
                raise ConfigError(f"traffic: {key.strip()} must be a whole number, got {figure.strip()}")
            value = int(value)
        values[name] = value
    return replace(Traffic(0.0, since_ns=since_ns, seed=seed), **values)  # type: ignore[arg-type]


def _number(item: str, figure: str) -> float:
    figure = figure.strip()
    try:
        value = float(figure.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in figure:
        raise ConfigError(f"traffic: {item!r} has no number, but {figure!r}")
    return value / 100 if figure.endswith("%") else value
