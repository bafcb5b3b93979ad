"""How many bytes a sample costs in each layout that the history could have, and in the one it has.

    python benchmarks/history_size.py [--hours 24] [--requests 10000]

Values are made to compress no better than real ones: counters that grow, floats with all their digits, byte counts of
the size of GPU memory. One tick has 20 values of the target, 5 of each of 8 GPUs and 6 of each of 3 processes. Two
targets share the file, since that is where the order of the primary key matters.
"""

import argparse
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from monitor.history import SqliteHistory
from serving.clock import NS
from serving.records import Outcome, RequestRecord

START_NS = 1_790_000_000 * NS
TARGETS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
GIB = 2**30

HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_duration_seconds",
    "request_queue_seconds",
)
TARGET = (
    "requests_running", "requests_waiting", "kv_cache_usage_ratio", "request_preemptions_total", "prompt_tokens_total",
    "prompt_tokens_cached_total", "generation_tokens_total", "requests_finished_total", "up", "scrape_duration_seconds",
    "host_memory_available_bytes", "host_swap_used_bytes",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count")),
)  # fmt: skip
GPU = (
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_utilization_ratio",
    "gpu_power_watts",
    "gpu_temperature_celsius",
)
PROCESS = (
    "process_anonymous_memory_bytes", "process_resident_memory_bytes", "process_swap_bytes", "process_open_fds",
    "process_threads", "process_cpu_seconds_total",
)  # fmt: skip
ROLES = ("api", "engine", "worker:0")
GPUS = tuple(f"GPU-{number:08x}-aaaa-bbbb-cccc-0123456789ab" for number in range(8))
VALUES_PER_TICK = len(TARGET) + len(GPUS) * len(GPU) + len(ROLES) * len(PROCESS)

Tick = tuple[int, int, tuple[float, ...], list[tuple[float, ...]], list[tuple[float, ...]]]


def ticks(seconds: int) -> Iterator[Tick]:
    """(t_ns, target number, target values, values of each GPU, values of each process), once a second for each target."""
    rnd = random.Random(1)
    tokens = [[1e6, 2e5, 1e6, 5e3, 0.0] for _ in TARGETS]
    sums = [[0.0] * 8 for _ in TARGETS]
    for second in range(seconds):
        for target in range(len(TARGETS)):
            counter, histogram = tokens[target], sums[target]
            running = rnd.randint(20, 48)
            for place, step in enumerate((4300, 800, running * 45, 8, rnd.random() < 0.01)):
                counter[place] += rnd.randint(0, 2 * step) if step > 1 else step
            for place in range(0, 8, 2):
                count = rnd.randint(4, 12) if place != 2 else running * 45
                histogram[place + 1] += count
                histogram[place] += count * rnd.random()
            values = (
                running, rnd.choice((0, 0, 0, 1, 2)), rnd.random(), counter[4], counter[0], counter[1], counter[2], counter[3],
                1, rnd.uniform(0.004, 0.03), rnd.randint(200 * GIB, 220 * GIB) & ~4095, 0, *histogram,
            )  # fmt: skip
            gpus = [
                (
                    120 * GIB + rnd.randint(0, GIB) & ~4095,
                    141 * GIB,
                    rnd.randint(60, 100) / 100,
                    rnd.randint(300_000, 690_000) / 1000,
                    rnd.randint(40, 75),
                )
                for _ in GPUS
            ]
            processes = [
                (rnd.randint(2 * GIB, 6 * GIB) & ~4095, rnd.randint(4 * GIB, 9 * GIB) & ~4095, 0, rnd.randint(60, 400), rnd.randint(30, 180), second * 1.7 + 0.01 * rnd.randint(0, 99))
                for _ in ROLES
            ]  # fmt: skip
            jitter_ns = rnd.randint(0, 3_000_000)
            yield START_NS + second * NS + jitter_ns, target, values, gpus, processes


def long_rows(tick: Tick) -> Iterator[tuple[int, int, float]]:
    """(series number, t_ns, value) for every value of a tick."""
    t_ns, target, values, gpus, processes = tick
    series = target * VALUES_PER_TICK
    for value in (*values, *(value for row in (*gpus, *processes) for value in row)):
        yield series, t_ns, value
        series += 1


def fill_long(connection: sqlite3.Connection, seconds: int, *, clustered: bool) -> None:
    key, options = (", PRIMARY KEY (series_id, t_ns)", " WITHOUT ROWID") if clustered else ("", "")
    connection.execute(
        f"CREATE TABLE sample (series_id INTEGER NOT NULL, t_ns INTEGER NOT NULL, value REAL NOT NULL{key}){options}"
    )
    if not clustered:
        connection.execute("CREATE INDEX by_series ON sample (series_id, t_ns)")
    for number, tick in enumerate(ticks(seconds)):
        connection.executemany("INSERT INTO sample VALUES (?, ?, ?)", long_rows(tick))
        if number % 2000 == 0:
            connection.commit()


def fill_wide(connection: sqlite3.Connection, seconds: int, *, key: tuple[str, ...] | None) -> None:
    for table, extra, columns in (
        ("target", (), TARGET),
        ("gpu", ("gpu_id",), GPU),
        ("process", ("role_id",), PROCESS),
    ):
        keys = ["t_ns", "target_id", *extra]
        ordered = ", ".join([*(key or ()), *extra])
        declared = ", ".join([*(f"{name} INTEGER NOT NULL" for name in keys), *(f"{name} REAL" for name in columns)])
        if key:
            connection.execute(f"CREATE TABLE {table}_sample ({declared}, PRIMARY KEY ({ordered})) WITHOUT ROWID")
        else:
            connection.execute(f"CREATE TABLE {table}_sample ({declared})")
            connection.execute(f"CREATE INDEX by_t_{table} ON {table}_sample (t_ns)")
    marks = {size: f"({', '.join('?' * size)})" for size in range(30)}
    for number, (t_ns, target, values, gpus, processes) in enumerate(ticks(seconds)):
        connection.execute(f"INSERT INTO target_sample VALUES {marks[2 + len(values)]}", (t_ns, target, *values))
        for table, rows in (("gpu", gpus), ("process", processes)):
            connection.executemany(
                f"INSERT INTO {table}_sample VALUES {marks[3 + len(rows[0])]}",
                ((t_ns, target, place, *row) for place, row in enumerate(rows)),
            )
        if number % 2000 == 0:
            connection.commit()


def file_size(path: Path, fill: Callable[[sqlite3.Connection], None]) -> int:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    fill(connection)
    connection.commit()
    connection.close()
    size = path.stat().st_size
    path.unlink()
    return size


def fill_history(path: Path, seconds: int) -> tuple[int, float]:
    """Bytes of the file and seconds of writing, with the product's own writer."""
    spent = 0.0
    with SqliteHistory.create(path, commit_interval_s=3600) as history:
        for number, (t_ns, target, values, gpus, processes) in enumerate(ticks(seconds)):
            plain, sums = dict(zip(TARGET[:12], values[:12], strict=True)), values[12:]
            histograms = dict(zip(HISTOGRAMS, zip(sums[::2], sums[1::2], strict=True), strict=True))
            by_gpu = {uuid: dict(zip(GPU, row, strict=True)) for uuid, row in zip(GPUS, gpus, strict=True)}
            by_role = {role: dict(zip(PROCESS, row, strict=True)) for role, row in zip(ROLES, processes, strict=True)}
            began = time.perf_counter()
            history.append_tick(TARGETS[target], t_ns, plain, by_gpu, by_role, histograms)
            if number % 100 == 0:
                history.flush()
            spent += time.perf_counter() - began
    return path.stat().st_size, spent


def fill_requests(path: Path, count: int, frames: int = 250) -> int:
    rnd = random.Random(2)
    with SqliteHistory.create(path) as history:
        for number in range(count):
            gaps = tuple(rnd.randint(15_000, 40_000) for _ in range(frames - 1))
            t_ns = START_NS + number * NS // 8
            first_ns = t_ns + 200_000_000
            last_ns = first_ns + sum(gaps) * 1000
            history.append_request(
                RequestRecord(
                    number, "40", number % 40, Outcome.OK, t_ns, t_ns + 40_000, t_ns + 2_000_000, first_ns, first_ns, last_ns,
                    last_ns + 300_000, frames, gaps, 512, frames, 514, 0, frames, "length", 200, None, "kernel", 600,
                )
            )  # fmt: skip
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    seconds = round(options.hours * 3600)
    samples = seconds * len(TARGETS) * VALUES_PER_TICK
    print(f"{options.hours:g} h, {len(TARGETS)} targets, {VALUES_PER_TICK} values a second each: {samples:,} samples")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "size.db"
        layouts: dict[str, Callable[[sqlite3.Connection], None]] = {
            "a row per sample, index on series and time": lambda it: fill_long(it, seconds, clustered=False),
            "a row per sample, clustered by series and time": lambda it: fill_long(it, seconds, clustered=True),
            "a wide row per tick, index on time": lambda it: fill_wide(it, seconds, key=None),
            "a wide row per tick, clustered by target and time": lambda it: fill_wide(
                it, seconds, key=("target_id", "t_ns")
            ),
            "a wide row per tick, clustered by time and target": lambda it: fill_wide(
                it, seconds, key=("t_ns", "target_id")
            ),
        }
        for name, fill in layouts.items():
            size = file_size(path, fill)
            print(f"{name:50} {size / 1e6:8.1f} MB {size / samples:6.1f} bytes a sample", flush=True)
        size, spent = fill_history(path, seconds)
        print(f"{'monitor.history':50} {size / 1e6:8.1f} MB {size / samples:6.1f} bytes a sample")
        print(f"  {seconds * len(TARGETS) / spent:,.0f} ticks a second written")
        size = fill_requests(Path(folder) / "requests.db", options.requests)
        print(f"  {size / options.requests:,.0f} bytes a request of 250 frames")


if __name__ == "__main__":
    main()
