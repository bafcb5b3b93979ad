import json
import math
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monitor import history as module
from monitor.history import Epoch, SqliteHistory, StoredFinding
from serving.clock import NS
from serving.errors import ConfigError, RecordError
from serving.records import Event, Outcome, RequestRecord, Stage
from serving.signals import SIGNALS, Kind, Scope, Series, signals_of

T0 = 1_790_000_000 * NS
URL = "http://127.0.0.1:8000"
NEVER = 3600.0  # commit interval of tests that say themselves when

REQUEST = RequestRecord(
    request_id=7,
    stage="40",
    user=3,
    outcome=Outcome.OK,
    t_plan_ns=T0,
    t_send_ns=T0 + 1_000_000,
    t_headers_ns=T0 + 3_000_000,
    t_first_ns=T0 + 201_000_000,
    t_first_content_ns=T0 + 201_000_000,
    t_last_ns=T0 + 701_000_000,
    t_end_ns=T0 + 702_000_000,
    frames=6,
    frame_gaps_us=(100_000, 0, 100_001, 99_999, 200_000),
    planned_prompt_tokens=512,
    planned_output_tokens=256,
    prompt_tokens=511,
    cached_tokens=0,
    completion_tokens=11,
    finish_reason="length",
    http_status=200,
    error=None,
    arrival_source="kernel",
    arrival_lag_us=42,
)
REFUSED = RequestRecord(
    8, "40", 4, Outcome.CLIENT_ERROR, T0, None, None, None, None, None, T0 + 5, 0, (), 512, 256,
    None, None, None, None, None, "connection refused", "read", None,
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


@pytest.fixture
def history(path):
    with SqliteHistory.create(path, commit_interval_s=NEVER) as made:
        yield made


# --- round trips -----------------------------------------------------------------------------------------------------


def test_a_tick_comes_back_as_series_per_target_gpu_and_role(history):
    history.append_tick(
        URL,
        T0,
        {"requests_running": 8, "kv_cache_usage_ratio": 0.25},
        gpus={"GPU-a": {"gpu_memory_used_bytes": 2.0**37}, "GPU-b": {"gpu_memory_used_bytes": 1.5}},
        processes={"engine": {"process_threads": 12}},
        histograms={"time_to_first_token_seconds": (1.5, 3)},
    )
    assert history.series("requests_running", target=URL) == [Series("requests_running", (T0,), (8.0,))]
    assert history.series("gpu_memory_used_bytes", target=URL) == [
        Series("gpu_memory_used_bytes", (T0,), (2.0**37,), (("gpu", "GPU-a"),)),
        Series("gpu_memory_used_bytes", (T0,), (1.5,), (("gpu", "GPU-b"),)),
    ]
    assert history.series("process_threads", target=URL)[0].labels == (("role", "engine"),)
    assert history.series("time_to_first_token_seconds_sum", target=URL)[0].values == (1.5,)
    assert history.series("time_to_first_token_seconds_count", target=URL)[0].values == (3.0,)


def test_without_a_target_every_series_is_labelled_with_its_own(history):
    for name in ("b", "a"):
        history.append_tick(name, T0, {"up": 1}, {"GPU-a": {"gpu_power_watts": 5}})
    assert [one.labels for one in history.series("up")] == [(("target", "a"),), (("target", "b"),)]
    assert history.series("gpu_power_watts")[0].labels == (("target", "a"), ("gpu", "GPU-a"))
    assert history.targets() == ["a", "b"]


@pytest.mark.parametrize(
    ("signal", "labels", "found"),
    [
        ("gpu_power_watts", {"gpu": "GPU-a"}, 1),
        ("gpu_power_watts", {"gpu": "GPU-c"}, 0),
        ("gpu_power_watts", {"gpu": "GPU-a", "target": "x"}, 1),
        ("gpu_power_watts", {"target": "y"}, 0),
        ("gpu_power_watts", {"role": "engine"}, 0),
        ("process_threads", {"role": "engine"}, 1),
        ("up", {"gpu": "GPU-a"}, 0),
        ("up", {"target": "x"}, 1),
        ("requests_waiting", {}, 0),
    ],
)
def test_labels_select_series(history, signal, labels, found):
    gpus = {"GPU-a": {"gpu_power_watts": 1}, "GPU-b": {"gpu_power_watts": 2}}
    history.append_tick("x", T0, {"up": 1}, gpus, {"engine": {"process_threads": 3}})
    assert len(history.series(signal, labels=labels)) == found


def test_both_ends_of_a_stretch_belong_to_it(history):
    for second in range(5):
        history.append_tick(URL, T0 + second * NS, {"up": second})
    (one,) = history.series("up", T0 + NS, T0 + 3 * NS, target=URL)
    assert one.values == (1, 2, 3)
    assert history.series("up", T0 + 9 * NS) == []


def test_series_are_in_time_order_however_they_were_appended(history):
    for second in (3, 1, 2):
        history.append_tick(URL, T0 + second * NS, {"up": second})
    assert history.series("up")[0].values == (1, 2, 3)


def test_a_tick_may_arrive_in_pieces(history):
    history.append_tick(URL, T0, {"requests_running": 1})
    history.append_tick(URL, T0, {"requests_waiting": 2})
    history.append_tick(URL, T0, {}, {"GPU-a": {"gpu_power_watts": 3}})
    history.append_tick(URL, T0, {}, {"GPU-a": {"gpu_temperature_celsius": 4}})
    for name, value in (
        ("requests_running", 1),
        ("requests_waiting", 2),
        ("gpu_power_watts", 3),
        ("gpu_temperature_celsius", 4),
    ):
        assert history.series(name)[0].values == (value,)


@pytest.mark.parametrize("absent", [None, math.nan, math.inf, -math.inf])
def test_what_was_not_measured_is_null_and_no_point(history, path, absent):
    history.append_tick(URL, T0, {"up": 1, "requests_running": absent}, {"GPU-a": {"gpu_power_watts": absent}})
    assert history.series("requests_running") == history.series("gpu_power_watts") == []
    history.close()
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT up, requests_running FROM target_sample").fetchall() == [(1.0, None)]
        assert plain.execute("SELECT count(*) FROM gpu_sample").fetchone() == (0,)
    plain.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from([one.name for one in signals_of(Scope.TARGET) if one.kind is not Kind.HISTOGRAM]),
        st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    )
)
def test_any_values_come_back_as_they_were(tmp_path_factory, values):
    with SqliteHistory.create(tmp_path_factory.mktemp("any") / "h.db", commit_interval_s=NEVER) as history:
        history.append_tick(URL, T0, values)
        for name, value in values.items():
            expected = [] if value is None else [Series(name, (T0,), (value,))]
            assert history.series(name, target=URL) == expected


@pytest.mark.parametrize(
    "record", [REQUEST, REFUSED, replace(REQUEST, outcome=Outcome.SHORT, error='it said "no"; ünïcödé')]
)
def test_a_request_comes_back_as_it_was(history, record):
    history.append_request(record)
    assert history.requests() == [record]


def test_every_outcome_can_be_stored(history):
    for outcome in Outcome:
        history.append_request(replace(REQUEST, outcome=outcome))
    assert [record.outcome for record in history.requests()] == list(Outcome)


def test_requests_of_one_stage(history):
    for number, stage in enumerate(("10", "20", "10")):
        history.append_request(replace(REQUEST, request_id=number, stage=stage))
    assert [record.request_id for record in history.requests(stage="10")] == [0, 2]
    assert [record.request_id for record in history.requests()] == [0, 1, 2]
    assert history.requests(stage="30") == []


@given(st.lists(st.integers(-5, 2**34)))
def test_frame_gaps_are_32_bit_microseconds(gaps):
    packed = module._pack_gaps(gaps)
    assert struct.unpack(f"<{len(gaps)}I", packed) == tuple(min(max(gap, 0), 2**32 - 1) for gap in gaps)
    assert module._unpack_gaps(packed) == struct.unpack(f"<{len(gaps)}I", packed)


def test_a_stage_appended_again_is_completed(history):
    begun = Stage("40", 40, T0, None, None, counted=False)
    ended = replace(begun, t_settled_ns=T0 + NS, t_end_ns=T0 + 9 * NS, counted=True)
    again = replace(begun, t_start_ns=T0 + 20 * NS)
    for stage in (begun, again, ended):
        history.append_stage(stage)
    assert history.stages() == [ended, again]


def test_events_and_findings_come_back_in_time_order(history):
    late, early, elsewhere = (
        Event(T0 + 2, "deploy", "v2"),
        Event(T0 + 1, "config", "slots 8"),
        Event(T0 + 3, "deploy", "other"),
    )
    history.append_event(late)
    history.append_event(early, target="x")
    history.append_event(elsewhere, target="y")
    assert history.events() == [early, late, elsewhere]
    assert history.events(T0 + 2, T0 + 2) == [late]
    assert history.events(target="x") == [early, late]
    detail = {"title": "memory grows", "figures": {"bytes_per_hour": 1.5e9}, "labels": {}}
    history.append_finding(T0 + 5, "memory_only_grows", "firing", detail, target="x")
    history.append_finding(T0 + 4, "memory_only_grows", "pending", {})
    assert history.findings() == [
        StoredFinding(T0 + 4, "memory_only_grows", "pending", {}),
        StoredFinding(T0 + 5, "memory_only_grows", "firing", detail, "x"),
    ]
    assert history.findings(target="y") == history.findings(until_ns=T0 + 4)


def test_the_manifest_is_json_by_key_and_can_be_amended(history):
    history.set_manifest({"target": {"url": URL, "version": None}, "configured": 8})
    history.set_manifest({"configured": 9, "seeds": [1, 2]})
    assert history.manifest() == {"target": {"url": URL, "version": None}, "configured": 9, "seeds": [1, 2]}
    with pytest.raises(ValueError, match="JSON"):
        history.set_manifest({"bad": math.nan})


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_a_restart_ends_an_epoch_and_series_can_be_read_by_epoch(history):
    for second in range(6):
        history.append_tick(URL, T0 + second * NS, {"up": second})
    history.append_event(Event(T0 + 3 * NS, "restart", "counters went back"))
    history.append_event(Event(T0 + 4 * NS, "deploy", "not a restart"))
    first, second = history.epochs()
    assert first == Epoch(URL, 1, T0, T0 + 3 * NS, "first sample")
    assert second == Epoch(URL, 2, T0 + 3 * NS, None, "counters went back")
    assert history.series("up", epoch=first)[0].values == (0, 1, 2)
    assert history.series("up", epoch=second)[0].values == (3, 4, 5)
    assert history.series("up", T0 + 4 * NS, T0 + 4 * NS, epoch=second)[0].values == (4,)
    assert history.series("up", epoch=second, target="another") == []


def test_a_restart_of_one_target_leaves_the_epochs_of_others(history):
    for name in ("a", "b"):
        history.append_tick(name, T0, {"up": 1})
    history.append_event(Event(T0 + NS, "restart", "a again"), target="a")
    assert [(epoch.target, epoch.number) for epoch in history.epochs()] == [("a", 1), ("a", 2), ("b", 1)]
    assert [epoch.number for epoch in history.epochs("b")] == [1]


def test_a_restart_before_the_first_sample_is_where_the_first_epoch_begins(history):
    history.append_event(Event(T0, "restart", "started by us"), target=URL)
    history.append_event(Event(T0, "restart", "started by us"), target=URL)
    history.append_tick(URL, T0 + NS, {"up": 1})
    assert history.epochs() == [Epoch(URL, 1, T0, None, "started by us")]


def test_an_empty_history_has_no_epochs(history):
    assert history.epochs() == history.targets() == history.requests() == history.stages() == history.events() == []


def test_the_past_of_one_target_has_no_other_target_in_it(history):
    for name in ("a", "b"):
        for second in range(4):
            history.append_tick(name, T0 + second * NS, {"up": 1})
    history.append_event(Event(T0 + 2 * NS, "restart", "all"))
    past = history.past("a")
    assert past.series("up", T0 + NS, T0 + 2 * NS) == [Series("up", (T0 + NS, T0 + 2 * NS), (1.0, 1.0))]
    assert past.events(T0, T0 + 2 * NS) == [Event(T0 + 2 * NS, "restart", "all")]
    starts = [past.epoch_start_ns(T0 + offset) for offset in (-1, 0, 2 * NS - 1, 2 * NS)]
    assert starts == [None, T0, T0, T0 + 2 * NS]


# --- the caller's mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ({"speed": 1.0},),
        ({"gpu_power_watts": 1.0},),
        ({"time_to_first_token_seconds": 1.0},),
        ({}, {"GPU-a": {"up": 1.0}}),
        ({}, {}, {"engine": {"gpu_power_watts": 1.0}}),
        ({}, {}, {}, {"requests_running": (1.0, 2.0)}),
    ],
)
def test_a_name_that_is_no_signal_of_the_scope_is_refused(history, arguments):
    with pytest.raises(ConfigError, match="not a signal"):
        history.append_tick(URL, T0, *arguments)


def test_asking_for_no_signal_is_refused_with_a_hint_for_histograms(history):
    with pytest.raises(ConfigError, match=r"'speed' is not a signal$"):
        history.series("speed")
    with pytest.raises(ConfigError, match="ask for request_queue_seconds_sum or request_queue_seconds_count"):
        history.series("request_queue_seconds")


def test_nothing_can_be_added_after_closing_or_to_a_file_opened_to_read(path):
    with SqliteHistory.create(path) as history:
        history.append_tick(URL, T0, {"up": 1})
    with pytest.raises(RecordError, match="closed"):
        history.append_tick(URL, T0, {"up": 1})
    history.close()
    with SqliteHistory.open(path) as reading, pytest.raises(RecordError, match="read-only"):
        reading.append_event(Event(T0, "deploy", "x"))


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_closed_history_is_one_file(tmp_path, path):
    with SqliteHistory.create(path) as history:
        history.append_tick(URL, T0, {"up": 1})
        history.flush()
        assert len(list(tmp_path.iterdir())) > 1  # the log is there while it is written
    assert list(tmp_path.iterdir()) == [path]
    with SqliteHistory.open(path) as reading:
        assert len(reading.series("up")) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_closing_while_somebody_reads_keeps_everything(path):
    history = SqliteHistory.create(path)
    history.append_tick(URL, T0, {"up": 1})
    history.flush()
    reader = SqliteHistory.open(path)
    history.append_tick(URL, T0 + NS, {"up": 1})
    history.close()
    assert history.error is None
    assert len(reader.series("up")[0]) == 2
    reader.close()


def test_folders_are_made(tmp_path):
    deep = tmp_path / "runs" / "today" / "run.db"
    SqliteHistory.create(deep).close()
    assert deep.exists()


def test_an_existing_file_is_never_overwritten(path):
    path.write_text("precious")
    with pytest.raises(RecordError, match="exists and would be overwritten"):
        SqliteHistory.create(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("place", ["file/run.db", "/proc/run.db"])
def test_a_place_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"cannot write .*name a file in a folder you can write"):
        SqliteHistory.create(tmp_path / place)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_file_can_be_read_but_not_written(path):
    SqliteHistory.create(path).close()
    path.chmod(0o444)
    SqliteHistory.open(path).close()
    with pytest.raises(RecordError, match="read-only"):
        SqliteHistory.open(path, readonly=False)


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Plimsoll file"),
        (b"t,value\n1,2\n", "not a Plimsoll file"),
        (b"t,value\n1,2\n" * 1000, "not a Plimsoll file"),
        (None, "there is no file"),
    ],
)
def test_what_is_not_a_history_is_refused(path, content, message, readonly):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        SqliteHistory.open(path, readonly=readonly)
    assert content is None or path.read_bytes() == content


def test_another_programs_database_is_refused_and_left_alone(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE target (id)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(RecordError, match="not a Plimsoll file"):
        SqliteHistory.open(path, readonly=False)
    assert path.read_bytes() == before


def fill(path, seconds):
    with SqliteHistory.create(path, commit_interval_s=NEVER) as history:
        for second in range(seconds):
            history.append_tick(URL, T0 + second * NS, {"up": 1, "kv_cache_usage_ratio": second / 7})


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_truncated_file_is_an_error_not_a_short_answer(path, share):
    fill(path, 2000)
    os.truncate(path, int(path.stat().st_size * share) // 4096 * 4096)
    with pytest.raises(RecordError, match="damaged or cut short"):
        SqliteHistory.open(path)


def test_damage_inside_the_file_is_an_error_when_it_is_read(path):
    fill(path, 2000)
    with path.open("r+b") as file:
        for page in range(20, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    with SqliteHistory.open(path) as history, pytest.raises(RecordError, match="damaged"):
        history.series("up")


def test_a_request_with_half_a_gap_is_an_error(history):
    history.append_request(REQUEST)
    history.flush()
    history._writer.execute("UPDATE request SET frame_gaps_us = x'0102030405'")
    with pytest.raises(RecordError, match="request 7 cannot be read"):
        history.requests()


def test_a_file_of_a_newer_layout_is_refused(path):
    SqliteHistory.create(path).close()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {module.SCHEMA_MAJOR + 1}")
    newer.close()
    for readonly in (True, False):
        with pytest.raises(RecordError, match="newer Plimsoll"):
            SqliteHistory.open(path, readonly=readonly)


def test_an_older_file_without_a_signal_is_read_and_gains_the_column_when_written(path):
    with SqliteHistory.create(path) as history:
        history.append_tick(URL, T0, {"up": 1})
    older = sqlite3.connect(path)
    older.execute("DROP VIEW v_target_sample")
    older.execute("ALTER TABLE target_sample DROP COLUMN requests_running")
    older.execute("ALTER TABLE target_sample ADD COLUMN signal_of_another_version REAL")
    older.close()
    with SqliteHistory.open(path) as history:
        assert history.series("requests_running") == []
        assert len(history.series("up")) == 1
    with SqliteHistory.open(path, readonly=False) as history:
        history.append_tick(URL, T0 + NS, {"up": 1, "requests_running": 4})
        assert history.series("requests_running", target=URL) == [Series("requests_running", (T0 + NS,), (4.0,))]
        assert len(history.series("up")[0]) == 2


def test_writing_goes_on_in_a_file_that_was_closed(path):
    fill(path, 3)
    with SqliteHistory.open(path, readonly=False) as history:
        history.append_tick(URL, T0 + 3 * NS, {"up": 1})
        assert len(history.series("up")[0]) == 4


# --- durability ------------------------------------------------------------------------------------------------------


def test_others_can_read_while_it_is_written(history, path):
    history.append_tick(URL, T0, {"up": 1})
    history.flush()
    with SqliteHistory.open(path) as other:
        assert len(other.series("up")[0]) == 1
        history.append_tick(URL, T0 + NS, {"up": 1})
        history.flush()
        assert len(other.series("up")[0]) == 2


def test_appends_are_committed_without_being_asked(path):
    with SqliteHistory.create(path, commit_interval_s=0.01) as history, SqliteHistory.open(path) as other:
        history.append_tick(URL, T0, {"up": 1})
        for _ in range(1000):
            if other.series("up"):
                break
            threading.Event().wait(0.01)
        assert len(other.series("up")) == 1


def test_at_most_a_second_may_be_lost_by_default():
    assert module.COMMIT_INTERVAL_S < 1


CHILD = """
import sys
from pathlib import Path
from monitor.history import SqliteHistory
history = SqliteHistory.create(Path(sys.argv[1]), commit_interval_s=3600)
for second in range(10**9):
    history.append_tick("x", second * 10**9, {"up": 1, "requests_running": second})
    if second == 500:
        history.flush()
    print(second, flush=True)
"""


def test_a_killed_writer_leaves_all_that_was_committed(path, tmp_path):
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE) as child:
        while int(child.stdout.readline()) < 700:
            pass
        child.send_signal(signal.SIGKILL)
    assert path.with_name("run.db-wal").exists()
    with SqliteHistory.open(path) as history:
        assert history.series("requests_running")[0].values == tuple(range(501))
    with SqliteHistory.open(path, readonly=False) as history:
        history.append_tick("x", 501 * NS, {"requests_running": 501})
        assert history.series("requests_running")[0].values == tuple(range(502))
    assert list(tmp_path.iterdir()) == [path]


def full(history):
    """Make SQLite say what it says when the disk is full, from the next page on."""
    (pages,) = history._writer.execute("PRAGMA page_count").fetchone()
    history._writer.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_costs_the_appends_and_says_so_once(history):
    history.append_tick(URL, T0, {"up": 1})
    history.flush()
    full(history)
    for number in range(200):
        history.append_request(replace(REQUEST, request_id=number))
    history.flush()
    assert "the disk is full: free some space" in str(history.error)
    assert history.dropped == 200
    first = history.error
    assert history.requests() == []
    assert len(history.series("up")) == 1
    history._writer.execute("PRAGMA max_page_count = 1000000")
    history.append_request(REQUEST)
    assert history.requests() == [REQUEST]
    assert (history.error, history.dropped) == (first, 200)


def test_a_full_disk_at_the_end_still_closes(path):
    with SqliteHistory.create(path, commit_interval_s=NEVER) as history:
        history.append_tick(URL, T0, {"up": 1})
        history.flush()
        full(history)
        for _ in range(200):
            history.append_request(REQUEST)
    assert history.dropped == 200
    with SqliteHistory.open(path) as reading:
        assert len(reading.series("up")) == 1
        assert reading.requests() == []


def test_one_append_that_cannot_be_stored_costs_only_itself(history):
    history.append_event(Event(T0, "deploy", "before"))
    history.append_event(Event(T0 + 1, "deploy", "half a pair \ud800"))
    history.append_event(Event(2**70, "deploy", "the end of time"))
    history.append_event(Event(T0 + 2, "deploy", "after"))
    assert [event.text for event in history.events()] == ["before", "after"]
    assert history.dropped == 2
    assert "surrogates" in str(history.error)


class Interrupted:
    """A connection on which Ctrl-C comes with the third statement."""

    def __init__(self, real):
        self._real, self._left = real, 3

    def execute(self, *arguments):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._real.execute(*arguments)

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_an_interrupt_in_the_middle_of_a_commit_forgets_nothing_and_stores_nothing_twice(history):
    for number in range(5):
        history.append_request(replace(REQUEST, request_id=number))
    real, history._writer = history._writer, Interrupted(history._writer)
    with pytest.raises(KeyboardInterrupt):
        history.flush()
    history._writer = real
    history.append_request(replace(REQUEST, request_id=5))
    assert [record.request_id for record in history.requests()] == list(range(6))
    assert history.dropped == 0


def test_many_threads_may_append(history):
    def work(number):
        for second in range(200):
            history.append_tick(f"t{number}", T0 + second * NS, {"up": 1})
            if second % 50 == 0:
                history.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one) for one in history.series("up")] == [200] * 4
    assert history.dropped == 0


# --- documented, and readable with sqlite3 alone ---------------------------------------------------------------------


def documented():
    """Heading of each table and view in docs/history.md to its text."""
    text = (Path(__file__).parents[2] / "docs" / "history.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def plain(path):
    with SqliteHistory.create(path) as history:
        history.append_tick(URL, T0, {"up": 1}, {"GPU-a": {"gpu_power_watts": 1}}, {"engine": {"process_threads": 2}})
        history.append_request(REQUEST)
        history.append_request(REFUSED)
        history.append_stage(Stage("40", 40, T0, T0 + NS, T0 + 11 * NS, counted=True))
        history.append_event(Event(T0 + NS, "restart", "again"))
        history.append_finding(T0, "memory_only_grows", "firing", {"a": 1}, URL)
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    yield connection
    connection.close()


def test_every_table_and_view_is_documented_and_no_other(plain):
    real = {row["name"] for row in plain.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    assert set(documented()) == real


@pytest.mark.parametrize("table", [name for name in documented() if not name.startswith("v_")])
def test_the_columns_of_each_table_are_as_documented(plain, table):
    told = re.findall(r"^\| (\w+) \| ([A-Z]+) \|", documented()[table], flags=re.MULTILINE)
    scope = {"target_sample": Scope.TARGET, "gpu_sample": Scope.GPU, "process_sample": Scope.PROCESS}.get(table)
    for one in SIGNALS.values():
        if one.scope is scope:
            parts = ("_sum", "_count") if one.kind is Kind.HISTOGRAM else ("",)
            told += [(one.name + part, "REAL") for part in parts]
    assert [(row["name"], row["type"]) for row in plain.execute(f"PRAGMA table_info({table})")] == told


@pytest.mark.parametrize("view", [name for name in documented() if name.startswith("v_")])
def test_the_columns_of_each_view_are_as_documented(plain, view):
    (row, *_) = plain.execute(f"SELECT * FROM {view}").fetchall()  # noqa: S608
    listed = re.findall(r"`(\w+)`", documented()[view].partition(", then all")[0])
    columns = [name for name in listed if name not in ("NULL", "ok")]
    if view.endswith("_sample"):
        columns += [column["name"] for column in plain.execute(f"PRAGMA table_info({view.removeprefix('v_')})")]
    assert row.keys() == columns


def test_the_view_of_requests_gives_the_durations_in_seconds(plain):
    good, refused = plain.execute("SELECT * FROM v_request").fetchall()
    assert good["planned_at"] == "2026-09-21T14:13:20.000Z"
    assert (good["send_lag_seconds"], good["ttft_seconds"], good["ttft_user_seconds"]) == (0.001, 0.2, 0.201)
    assert (good["tpot_seconds"], good["e2e_seconds"]) == (0.05, 0.7)
    assert (refused["outcome"], refused["ttft_seconds"], refused["tpot_seconds"], refused["error"]) == (
        "client_error",
        None,
        None,
        "connection refused",
    )


def test_other_views_read_well(plain):
    stage = plain.execute("SELECT * FROM v_stage").fetchone()
    assert (stage["settling_seconds"], stage["measured_seconds"], stage["counted"]) == (1.0, 10.0, 1)
    assert tuple(plain.execute("SELECT * FROM v_event").fetchone()) == (
        "2026-09-21T14:13:21.000Z",
        None,
        "restart",
        "again",
    )
    finding = plain.execute("SELECT * FROM v_finding").fetchone()
    assert (finding["target"], json.loads(finding["detail"])) == (URL, {"a": 1})
    assert plain.execute("SELECT target, uuid, gpu_power_watts FROM v_gpu_sample").fetchone()[1:] == ("GPU-a", 1.0)
    assert plain.execute("SELECT role, process_threads FROM v_process_sample").fetchone()["role"] == "engine"
    assert [tuple(row) for row in plain.execute("SELECT number, reason FROM v_epoch")] == [
        (1, "first sample"),
        (2, "again"),
    ]


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="no sqlite3 program")
def test_the_documented_command_works(plain, path):
    command = next(re.finditer(r'"(SELECT stage.*)"', (Path(__file__).parents[2] / "docs" / "history.md").read_text()))[
        1
    ]
    done = subprocess.run(["sqlite3", str(path), command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "40|ok|0.2|0.05|0.7"


def test_a_file_has_one_writer_at_a_time_and_any_number_of_readers(tmp_path):
    path = tmp_path / "watch.db"
    with SqliteHistory.create(path) as first:
        with pytest.raises(RecordError, match="another Plimsoll process writes"):
            SqliteHistory.open(path, readonly=False)
        with SqliteHistory.open(path) as reader:
            assert reader.manifest() == {}
        first.set_manifest({"kind": "watch"})
        first.flush()
        assert first.error is None
    with SqliteHistory.open(path, readonly=False) as second:
        assert second.manifest() == {"kind": "watch"}


def test_a_folder_is_no_history(tmp_path):
    with pytest.raises(RecordError, match="is a folder"):
        SqliteHistory.open(tmp_path)
