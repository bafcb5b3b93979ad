"""The truth file is written the same way twice, and what is computed from it is what was written."""

import io
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError, RecordError
from serving.simulator import truth
from serving.simulator.spec import Arrival, Finish, MemoryPlan, ServerSpec, Step
from serving.simulator.truth import TruthWriter, read_truth

NS = 1_000_000_000
MS = 1_000_000
BORN = 1_700_000_000 * NS


class Cost:
    def seconds(self, work):
        return 0.01


SPEC = ServerSpec("vllm", "0.32.0", "m", 8, 4096, 512, 16, 100, Cost(), memory=MemoryPlan(cards=1))
HEAD = '{"schema":"plimsoll.truth/1","start":[0,1],"kv_blocks":100}\n'


class Server:
    """A batch of at most `slots` requests in steps of 10 ms, just real enough to write a truth file with."""

    def __init__(self, slots=8, *, preempts_above=None, fails_above=None):
        self.stream = io.StringIO()
        self.truth = TruthWriter(self.stream)
        self.slots = slots
        self.preempts_above = preempts_above
        self.fails_above = fails_above
        self.t_ns = BORN
        self.waiting, self.running, self.left = [], [], {}
        self.received = 0
        self.truth.start(self.t_ns, SPEC, 1)

    def arrive(self, t_ns, output_tokens=50):
        self.received += 1
        self.left[self.received] = output_tokens
        self.waiting.append(self.received)
        self.truth.received(t_ns, Arrival(self.received, t_ns, 10, output_tokens))

    @property
    def inside(self):
        return len(self.waiting) + len(self.running)

    def begin(self):
        """Schedule a step; the ids that it admits and preempts."""
        preempted = ()
        if self.preempts_above is not None and len(self.running) > self.preempts_above:
            preempted = (self.running.pop(),)
            self.waiting.insert(0, preempted[0])
            return (), preempted
        admitted = tuple(self.waiting[: self.slots - len(self.running)])
        del self.waiting[: len(admitted)]
        self.running += admitted
        return admitted, preempted

    def step(self, during=(), length_ns=10 * MS):
        """Take a step; `during` are (offset, tokens) of arrivals while it computes."""
        begin_ns, end_ns = self.t_ns, self.t_ns + length_ns
        admitted, preempted = self.begin()
        running, waiting = len(self.running), len(self.waiting)
        for offset_ns, tokens in during:
            self.arrive(begin_ns + offset_ns, tokens)
        self.t_ns = end_ns
        emitted = tuple(self.running)
        finished = []
        if self.fails_above is not None and running > self.fails_above:
            emitted = ()
            finished = [(key, Finish.KV_FULL) for key in self.running]
        for key in emitted:
            self.left[key] -= 1
            if not self.left[key]:
                finished.append((key, Finish.LENGTH))
        for key, _ in finished:
            self.running.remove(key)
        self.truth.step(
            Step(begin_ns, end_ns, running, waiting, running * 5, 0, admitted, preempted, emitted, tuple(finished)),
            1000 + running,
            2000 + running,
        )
        return finished

    def offer(self, level, seconds, *, turnaround_ns=0, output_tokens=50):
        """A closed loop of `level` clients that need `turnaround_ns` between two requests."""
        end_ns = self.t_ns + round(seconds * NS)
        due = [self.t_ns] * (level - self.inside)
        while self.t_ns < end_ns:
            now_ns = self.t_ns
            for t_ns in [t_ns for t_ns in due if t_ns <= now_ns]:
                self.arrive(t_ns if t_ns == now_ns else now_ns, output_tokens)
            due = [t_ns for t_ns in due if t_ns > now_ns]
            during = [(t_ns - now_ns, output_tokens) for t_ns in due if t_ns < now_ns + 10 * MS]
            due = [t_ns for t_ns in due if t_ns >= now_ns + 10 * MS]
            if not self.inside:
                self.t_ns += 10 * MS
                for offset_ns, tokens in during:
                    self.arrive(now_ns + offset_ns, tokens)
                continue
            finished = self.step(during)
            room = level - self.inside - len(due)
            due += [self.t_ns + turnaround_ns] * max(0, min(len(finished), room))

    def report(self, **more):
        return read_truth(io.StringIO(self.stream.getvalue()), **more)


def verdicts(report):
    return {row.level: row.verdict for row in report.levels}


def test_the_same_calls_write_the_same_bytes_one_whole_object_a_line():
    written = []
    for _ in range(2):
        server = Server()
        server.offer(4, 1.0)
        server.truth.rejected(server.t_ns, 99, "queue_full")
        server.truth.ended(server.t_ns, 1, Finish.CANCELLED)
        server.truth.leak(server.t_ns, gpu_bytes=12.5, kv_blocks=3)
        server.truth.event(server.t_ns, "fault_on", fault='http_500=0.1,"odd"')
        written.append(server.stream.getvalue())
    assert written[0] == written[1]
    lines = [json.loads(line) for line in written[0].splitlines()]
    assert lines[0] == {
        "schema": "plimsoll.truth/1",
        "start": [BORN, 1],
        "engine": "vllm",
        "release": "0.32.0",
        "model": "m",
        "max_batch": 8,
        "asked_max_batch": None,
        "context_tokens": 4096,
        "token_budget": 512,
        "block_tokens": 16,
        "kv_blocks": 100,
        "queue_limit": None,
        "cards": 1,
    }
    assert lines[1] == {"received": [BORN, 1, 10, 50]}
    assert lines[5] == {
        "step": [BORN, BORN + 10 * MS, 4, 0, 20, 1004, 2004, 0],
        "admitted": [1, 2, 3, 4],
        "emitted": [1, 2, 3, 4],
    }
    assert lines[-4:] == [
        {"rejected": [BORN + NS, 99, "queue_full"]},
        {"ended": [BORN + NS, 1, "cancelled"]},
        {"leak": [BORN + NS, {"gpu_bytes": 12.5, "kv_blocks": 3}]},
        {"event": [BORN + NS, "fault_on", {"fault": 'http_500=0.1,"odd"'}]},
    ]


def test_only_the_first_start_bears_the_schema():
    server = Server()
    server.truth.start(server.t_ns, SPEC, 2)
    first, second = (json.loads(line) for line in server.stream.getvalue().splitlines())
    assert "schema" in first
    assert "schema" not in second
    assert second["start"] == [BORN, 2]


def test_a_writer_refuses_what_would_make_the_file_unreadable():
    with pytest.raises(ValueError, match="begins with a start"):
        TruthWriter(io.StringIO()).received(0, Arrival(1, 0, 1, 1))
    writer = Server().truth
    with pytest.raises(ValueError, match="totals so far"):
        writer.event(0, "leak", amount=5)
    with pytest.raises(ValueError, match="JSON"):
        writer.leak(0, gpu_bytes=float("nan"))


def test_what_was_written_a_second_ago_has_reached_the_file():
    class Stream(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = len(self.getvalue())

    stream = Stream()
    writer = TruthWriter(stream)
    written = []
    writer.start(BORN, SPEC, 1)
    for number in range(200):
        t_ns = BORN + number * 70 * MS
        writer.received(t_ns, Arrival(number, t_ns, 1, 1))
        written.append((t_ns, len(stream.getvalue())))
        old = [length for then_ns, length in written if then_ns <= t_ns - NS]
        assert not old or stream.flushed >= old[-1]
    flushes = stream.flushed
    writer.flush()
    assert stream.flushed == written[-1][1] >= flushes


GOLDEN = HEAD + (
    # Two requests; the second arrives while the first step computes and is written before it.
    '{"received":[0,1,10,3]}\n'
    '{"received":[4000000000,2,10,2]}\n'
    '{"step":[0,10000000000,1,0,40,7000,9000,10],"admitted":[1],"emitted":[1]}\n'
    '{"step":[10000000000,20000000000,2,0,80,7500,9500,10],"admitted":[2],"emitted":[1,2]}\n'
    '{"step":[20000000000,26000000000,2,0,50,7200,9100,0],"emitted":[1,2],"finished":[[1,"length"],[2,"stop"]]}\n'
    # A third never gets in, a fourth is refused, a fifth is cancelled while it waits.
    '{"received":[30000000000,3,10,5]}\n'
    '{"received":[31000000000,4,10,5]}\n'
    '{"rejected":[31000000000,4,"rejected"]}\n'
    '{"received":[32000000000,5,10,5]}\n'
    '{"ended":[33000000000,5,"cancelled"]}\n'
    '{"event":[40000000000,"fault_on",{}]}\n'
)


def test_a_small_file_worked_out_by_hand():
    report = read_truth(io.StringIO(GOLDEN))
    assert (report.received, report.ended, report.inside) == (
        5,
        {"cancelled": 1, "length": 1, "rejected": 1, "stop": 1},
        1,
    )
    assert (report.tokens, report.steps, report.prefill_tokens, report.preemptions) == (5, 3, 20, 0)
    assert (report.seconds, report.tokens_per_second, report.tokens_per_step_second) == (40.0, 5 / 40, 5 / 26)
    assert (report.kv_blocks_max, report.kv_ratio_max) == (80, 0.8)
    assert (report.gpu_bytes_max, report.host_bytes_max) == (7500, 9500)
    assert (report.running_max, report.waiting_max) == (2, 0)
    # TTFT 10 s and 16 s; TPOT (26 - 10) / 2 and (26 - 20) / 1; the second waited 6 s to be let in.
    assert (report.ttft_seconds.p50, report.ttft_seconds.max, report.ttft_seconds.samples) == (10.0, 16.0, 2)
    assert (report.tpot_seconds.p50, report.tpot_seconds.max, report.tpot_seconds.samples) == (6.0, 8.0, 2)
    assert (report.queue_seconds.p50, report.queue_seconds.max) == (0.0, 6.0)
    assert (report.starts, report.restarts, report.events) == (1, 0, {"fault_on": 1})
    assert report.problems == {}
    rows = {row.level: row for row in report.levels}
    # One inside: [0, 4) and, never admitted, [30, 32) and [33, 40). Two inside: [4, 26) and [32, 33).
    assert (rows[1].seconds, rows[1].settled_seconds) == (13.0, 4.0)
    assert (rows[2].seconds, rows[2].settled_seconds) == (23.0, 16.0)
    assert (rows[2].running_p50, rows[2].at_level_ratio, rows[2].waiting_mean) == (2, 1.0, 0.0)
    assert rows[2].tokens_per_second == 4 / 16
    assert report.largest_unqueued_batch == 2
    assert not report.exceeded


def test_a_file_whose_last_line_was_cut_is_read_up_to_it():
    whole = read_truth(io.StringIO(GOLDEN))
    for length in (1, 2, 10, 30):
        report = read_truth(io.StringIO(GOLDEN[:-length]))
        assert report.cut is (length > 1)
        assert report.lines == whole.lines - (length > 1)
        assert report.received == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ("{}\n", "not a truth file of plimsoll.truth/1"),
        ('{"schema":"plimsoll.truth/2","start":[0,1],"kv_blocks":1}\n', "not a truth file of plimsoll.truth/1"),
        ("hello\n", "truth:1: not a line of a truth file"),
        ("[1]\n", "truth:1: not a line of a truth file"),
        (HEAD + '{"received":[0,1\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"odd":1}\n', "truth:2: not a line"),
        (HEAD + '{"received":[0]}\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"step":[0,1,0]}\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"event":[0,"crash"]}\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + "[" * 100_000 + "\n{}\n", "truth:2: not a line"),
        (HEAD + '{"received":[1e400,1,5,5]}\n', "truth:2: not a line"),
        (HEAD + f'{{"received":[{10**30},1,5,5]}}\n', "truth:2: not a line"),
        (HEAD + f'{{"step":[2,{10**30},1,0,0,0,0,0]}}\n', "truth:2: not a line"),
        (HEAD + f'{{"step":[2,3,1,0,{10**400},0,0,0]}}\n', "truth:2: not a line"),
        (HEAD + f'{{"start":[1,2],"kv_blocks":{10**400}}}\n', "truth:2: not a line"),
        (HEAD + '{"leak":[5,{"x":NaN}]}\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"leak":[5,{"x":1e400}]}\n{"received":[0,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"step":[2,3,1,0,0,0,0,0],"finished":[[1]]}\n{"received":[4,2,1,1]}\n', "truth:2: not a line"),
        (HEAD + '{"step":[2,3,1,0,0,0,0,0],"emitted":5}\n', "truth:2: not a line"),
        (HEAD + '{"step":[2,3,1,0,0,0,0,0],"admitted":[[1]]}\n', "truth:2: not a line"),
    ],
)
def test_what_is_no_truth_file_is_refused_with_its_line(text, complaint):
    with pytest.raises(RecordError) as caught:
        read_truth(io.StringIO(text))
    assert complaint in str(caught.value)


STEP = '{{"step":[{},{},0,0,0,0,0,0]}}\n'


@pytest.mark.parametrize("steps", [[(20, 10)], [(200, 300), (100, 150)]])
def test_steps_that_go_back_in_time_are_a_contradiction(steps):
    text = HEAD + "".join(STEP.format(*step) for step in steps)
    assert read_truth(text.splitlines()).problems == {"time goes back": 1}


def test_figures_of_any_kind_give_a_report_that_json_has():
    leaks = "".join(f'{{"leak":[{second * NS},{{"x":{"-" * (second % 2)}1e308}}]}}\n' for second in range(5))
    report = read_truth((HEAD + leaks).splitlines())
    assert report.leaks[0].per_hour.least_squares is None
    json.dumps(report.as_json(), allow_nan=False)


def test_names_in_the_file_reach_a_terminal_as_plain_words(tmp_path, capsys):
    path = tmp_path / "truth.jsonl"
    path.write_text(HEAD + '{"event":[1,"\\u001b[2J\\ud800",{}]}\n{"leak":[2,{"\\u0007":1}]}\n', encoding="utf-8")
    assert truth.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert r"1 \x1b[2J\ud800" in out
    assert r"leak of \x07" in out


@pytest.mark.parametrize("flag", ["--min-hold", "--dip"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_lengths_of_time_that_are_none_are_refused(tmp_path, capsys, flag, value):
    path = tmp_path / "truth.jsonl"
    path.write_text(HEAD, encoding="utf-8")
    assert truth.main([str(path), f"{flag}={value}"]) == ConfigError.exit_code
    assert "must be a number of seconds" in capsys.readouterr().err


def test_a_zombie_may_have_more_tokens_than_its_client_waited_for():
    step = '{{"step":[{0},{1},1,0,0,0,0,0],"emitted":[1]{2}}}\n'
    text = HEAD + '{"received":[0,1,5,1]}\n' + step.format(1, 2, ',"admitted":[1]')
    told = '{"event":[2,"zombie",{"id":1,"output_tokens":2}]}\n'
    end = step.format(2, 3, ',"finished":[[1,"length"]]')
    assert read_truth((text + told + end).splitlines()).problems == {}
    assert read_truth((text + end).splitlines()).problems == {"finished with other than the planned tokens": 1}


@pytest.mark.parametrize("turnaround_ns", [0, 3 * MS, 40 * MS])
def test_the_largest_unqueued_batch_is_the_number_of_slots_however_long_clients_need_between_requests(turnaround_ns):
    server = Server(slots=8)
    for level in (2, 4, 8, 10, 9):
        server.offer(level, 6.0, turnaround_ns=turnaround_ns, output_tokens=100)
    report = server.report()
    assert report.largest_unqueued_batch == 8
    assert report.exceeded
    assert verdicts(report) == {2: "un-queued", 4: "un-queued", 8: "un-queued", 9: "queued", 10: "queued"}
    rows = {row.level: row for row in report.levels}
    assert rows[10].waiting_mean == pytest.approx(2.0, abs=0.35)
    assert rows[10].running_p50 == 8
    assert report.problems == {}


def test_a_pause_between_requests_is_taken_out_of_the_level_only_where_asked():
    server = Server(slots=8)
    server.offer(4, 12.0, turnaround_ns=40 * MS, output_tokens=20)
    filled, strict = server.report().levels, server.report(dip_seconds=0.0).levels
    assert [row.level for row in filled] == [row.level for row in strict] == [4]
    # The last pause is not over when the file ends.
    assert filled[0].seconds == pytest.approx(12.0 - 0.04)
    assert strict[0].seconds == pytest.approx(12.0 * 200 / 240)


def test_a_dip_is_filled_up_to_the_lower_of_its_sides_if_it_is_short():
    """Levels 3, 1 for 0.2 s, 2: the dip belongs to 2. A dip of 0.3 s is one of its own."""
    text = HEAD + "".join(
        f'{{"received":[{t},{key},1,9]}}\n' if key > 0 else f'{{"ended":[{t},{-key},"cancelled"]}}\n'
        for t, key in [
            (0, 1),
            (0, 2),
            (0, 3),
            (2_000_000_000, -1),
            (2_000_000_000, -2),
            (2_200_000_000, 4),
            (4_000_000_000, -4),
            (4_300_000_000, 5),
        ]
    )
    text += '{"event":[6000000000,"end",{}]}\n'
    seconds = {row.level: row.seconds for row in read_truth(io.StringIO(text), min_hold_seconds=0.0).levels}
    assert seconds == pytest.approx({3: 2.0, 2: 2.0 + 1.7, 1: 0.3})


def test_a_level_at_which_something_was_preempted_is_not_unqueued_and_its_short_dips_are_not_the_level_below():
    server = Server(slots=20, preempts_above=6)
    for level in (4, 8, 6, 7):
        server.offer(level, 6.0, turnaround_ns=15 * MS, output_tokens=100)
    report = server.report()
    assert verdicts(report) == {4: "un-queued", 6: "un-queued", 7: "preempting", 8: "preempting"}
    assert (report.largest_unqueued_batch, report.exceeded) == (6, True)
    assert report.preemptions > 0


def test_a_level_at_which_the_engine_failed_requests_is_not_unqueued():
    server = Server(slots=20, fails_above=6)
    for level in (6, 7):
        server.offer(level, 6.0, turnaround_ns=3 * MS)
    report = server.report()
    assert verdicts(report) == {6: "un-queued", 7: "lost"}
    assert report.ended["kv_full"] > 0
    assert report.largest_unqueued_batch == 6


def test_the_crowd_at_the_start_of_a_stage_does_not_count():
    """Twelve come at once, one is let in each second, and then all run."""
    lines = [HEAD] + [f'{{"received":[0,{key},1,1000]}}\n' for key in range(12)]
    for turn in range(40):
        running = min(12, turn + 1)
        admitted = [turn] if turn < 12 else []
        lines.append(
            json.dumps(
                {
                    "step": [turn * NS, (turn + 1) * NS, running, 12 - running, 0, 0, 0, 0],
                    "admitted": admitted,
                    "emitted": list(range(running)),
                }
            )
            + "\n"
        )
    report = read_truth(lines)
    row = report.levels[0]
    assert (row.level, row.seconds, row.settled_seconds, row.waiting_mean) == (12, 40.0, 29.0, 0.0)
    assert report.largest_unqueued_batch == 12
    assert report.problems == {}


def test_a_level_that_never_settles_is_no_evidence():
    text = HEAD + '{"received":[0,1,1,1]}\n{"event":[9000000000,"end",{}]}\n'
    report = read_truth(io.StringIO(text))
    assert verdicts(report) == {1: "unsettled"}
    assert report.largest_unqueued_batch is None


def test_a_level_that_was_held_for_less_than_the_minimum_is_left_out():
    server = Server(slots=8)
    server.offer(3, 0.9)
    assert server.report().levels == []
    assert server.report().brief_levels == 1
    assert verdicts(server.report(min_hold_seconds=0.5)) == {3: "un-queued"}


def test_a_server_that_hangs_carries_nothing():
    lines = [
        HEAD,
        '{"received":[0,1,1,9]}\n',
        '{"step":[0,1,1,0,0,0,0,1],"admitted":[1]}\n',
        '{"event":[9000000000,"end",{}]}\n',
    ]
    assert verdicts(read_truth(lines)) == {1: "silent"}


def short_requests(waits, runs, rounds=20):
    """One long request, and one short one after the other that waits and then runs for so many steps of 1 s."""
    lines = [HEAD, '{"received":[0,0,1,999]}\n']
    lines.append('{"step":[0,1000000000,1,0,0,0,0,1],"admitted":[0],"emitted":[0]}\n')
    t_ns = NS
    for key in range(1, rounds + 1):
        lines.append(f'{{"received":[{t_ns},{key},1,{runs}]}}\n')
        for turn in range(waits + runs):
            runs_now = turn >= waits
            record = {"step": [t_ns, t_ns + NS, 1 + runs_now, 1 - runs_now, 0, 0, 0, 0]}
            record["admitted"] = [key] * (turn == waits)
            record["emitted"] = [0, key][: 1 + runs_now]
            record["finished"] = [[key, "length"]] * (turn == waits + runs - 1)
            lines.append(json.dumps(record) + "\n")
            t_ns += NS
    return read_truth(lines)


@pytest.mark.parametrize(("waits", "runs", "verdict"), [(0, 1, "un-queued"), (1, 2, "un-queued"), (2, 1, "queued")])
def test_to_wait_for_the_next_step_is_no_queue_and_to_wait_most_of_the_time_is_one(waits, runs, verdict):
    report = short_requests(waits, runs)
    assert report.problems == {}
    assert verdicts(report)[2] == verdict
    assert {row.level: row for row in report.levels}[2].waiting_mean == pytest.approx(waits / (waits + runs), abs=0.02)


def test_a_level_that_is_reached_only_while_requests_wait_for_the_next_step_is_short():
    """One of eleven is always either new or just gone: no queue by the mean, and yet ten run at once."""
    server = Server(slots=20)
    for _ in range(9):
        server.arrive(server.t_ns, 10_000)
    for _ in range(600):
        server.step([(6 * MS, 1)])
    row = {row.level: row for row in server.report().levels}[11]
    assert (row.verdict, row.running_p50) == ("short", 10)
    assert row.waiting_mean == pytest.approx(0.4, abs=0.01)


def test_lines_may_lag_by_a_step_in_either_order():
    """A request that is received and cancelled while a step computes, written before that step and after it."""
    inner = '{"received":[5,2,1,9]}\n{"ended":[7,2,"cancelled"]}\n'
    step = '{"step":[0,10,1,0,0,0,0,1],"admitted":[1],"emitted":[1]}\n'
    begin = HEAD + '{"received":[0,1,1,9]}\n'
    one = read_truth(io.StringIO(begin + inner + step), min_hold_seconds=0.0, dip_seconds=0.0)
    other = read_truth(io.StringIO(begin + step + inner), min_hold_seconds=0.0, dip_seconds=0.0)
    assert one == other
    assert {row.level: round(row.seconds * NS) for row in one.levels} == {1: 8, 2: 2}
    assert one.problems == {}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"ended":[0,1,"length"]}'], "ended, but not inside"),
        (['{"received":[0,1,1,1]}', '{"received":[0,1,1,1]}'], "requests received twice"),
        (['{"step":[0,9,0,0,0,0,0,0],"admitted":[1]}'], "admitted, but not waiting"),
        (['{"step":[0,9,0,0,0,0,0,0],"preempted":[1]}'], "preempted, but not running"),
        (['{"step":[0,9,0,0,0,0,0,0],"emitted":[1]}'], "tokens for a request that does not run"),
        (['{"step":[0,9,0,0,0,0,0,0]}', '{"step":[8,19,0,0,0,0,0,0]}'], "steps that overlap"),
        (
            ['{"step":[5,9,0,0,0,0,0,0]}', '{"step":[9,12,0,0,0,0,0,0]}', '{"event":[1,"x",{}]}'],
            "time goes back",
        ),
        (
            ['{"step":[0,9,3,1,0,0,0,0]}'],
            "steps whose running or waiting is not that of their requests",
        ),
        (
            ['{"received":[0,1,1,1]}', '{"start":[9,2],"kv_blocks":100}'],
            "requests inside when the server starts",
        ),
        (
            [
                '{"received":[0,1,1,5]}',
                '{"step":[1,9,1,0,0,0,0,0],"admitted":[1],"emitted":[1],"finished":[[1,"length"]]}',
            ],
            "finished with other than the planned tokens",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_told(lines, problem):
    report = read_truth(io.StringIO(HEAD + "".join(line + "\n" for line in lines)))
    assert report.problems == {problem: 1}


def test_who_comes_or_goes_at_the_very_moment_a_step_begins_may_have_met_it_or_not():
    text = HEAD + (
        '{"received":[0,1,1,9]}\n{"ended":[0,1,"cancelled"]}\n{"received":[0,2,1,9]}\n'
        '{"step":[0,9,1,0,0,0,0,0],"admitted":[1]}\n'
    )
    assert read_truth(io.StringIO(text)).problems == {}


def test_leak_rates_against_time_requests_tokens_and_disconnects():
    """In each second 100 bytes and 4 blocks leak, 2 requests end with 1 token each, and 2 clients go away."""
    lines = [HEAD]
    t_ns, key, blocks = 0, 0, 0
    for turn in range(20):
        for part in range(2):
            key += 1
            lines.append(f'{{"received":[{t_ns},{key},1,10]}}\n')
            lines.append(
                json.dumps({"step": [t_ns, t_ns + 1, 1, 0, 0, 0, 0, 0], "admitted": [key], "emitted": [key]}) + "\n"
            )
            t_ns += NS // 2
            lines.append(f'{{"ended":[{t_ns},{key},"{"cancelled" if part else "kv_full"}"]}}\n')
        lines.append(f'{{"event":[{t_ns},"zombie",{{}}]}}\n')
        blocks += 4
        lines.append(f'{{"leak":[{t_ns},{{"gpu_bytes":{100 * (turn + 1) + 7},"kv_blocks":{blocks}}}]}}\n')
    report = read_truth(lines)
    gpu, kv = report.leaks
    assert (gpu.kind, gpu.start, gpu.first, gpu.last, gpu.readings) == ("gpu_bytes", 1, 107, 2007, 20)
    assert gpu.hours == pytest.approx(19 / 3600)
    for slope, expected in [
        (gpu.per_hour, 360_000),
        (gpu.per_request, 50),
        (gpu.per_token, 50),
        (gpu.per_disconnect, 50),
        (kv.per_disconnect, 2),
    ]:
        assert slope.least_squares == pytest.approx(expected)
        assert slope.simple == pytest.approx(expected)


def test_least_squares_and_the_simple_difference_differ_where_growth_is_uneven():
    text = HEAD + "".join(
        f'{{"leak":[{hour * 3600 * NS},{{"host_bytes":{amount}}}]}}\n' for hour, amount in enumerate([0, 0, 0, 40])
    )
    (leak,) = read_truth(io.StringIO(text)).leaks
    assert leak.per_hour.least_squares == pytest.approx(12.0)
    assert leak.per_hour.simple == pytest.approx(40 / 3)
    assert (leak.per_request.least_squares, leak.per_request.simple) == (None, None)


def test_each_start_of_the_server_has_leaks_and_a_kv_pool_of_its_own():
    text = HEAD + (
        '{"leak":[0,{"gpu_bytes":0}]}\n{"leak":[3600000000000,{"gpu_bytes":100}]}\n'
        '{"received":[3600000000000,1,1,9]}\n'
        '{"step":[3600000000000,3600000000001,1,0,50,0,0,1],"admitted":[1]}\n'
        '{"ended":[3700000000000,1,"died"]}\n{"event":[3700000000000,"crash",{}]}\n'
        '{"start":[3730000000000,2],"kv_blocks":1000}\n'
        '{"leak":[3730000000000,{"gpu_bytes":0}]}\n{"leak":[7330000000000,{"gpu_bytes":30}]}\n'
        '{"received":[7330000000000,2,1,9]}\n'
        '{"step":[7330000000000,7330000000001,1,0,60,0,0,1],"admitted":[2]}\n'
    )
    report = read_truth(io.StringIO(text))
    assert [leak.start for leak in report.leaks] == [1, 2]
    assert [leak.per_hour.simple for leak in report.leaks] == pytest.approx([100.0, 30.0])
    assert (report.starts, report.restarts) == (2, 1)
    assert (report.kv_blocks_max, report.kv_ratio_max) == (60, 0.5)
    assert report.problems == {}
    assert verdicts(report)[1] == "lost"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 9)), max_size=60), st.integers(1, 5))
@settings(max_examples=60)
def test_what_is_computed_adds_up_to_what_was_written(turns, slots):
    server = Server(slots=slots)
    tokens = steps = rejected = cancelled = 0
    first, running_ns, level_ns = {}, 0, 0
    for arrivals, output_tokens, offset_ms in turns:
        if not server.inside:
            server.arrive(server.t_ns, output_tokens)
        before = {key: server.left[key] for key in server.left}
        inside_before = server.inside
        begin_ns = server.t_ns
        finished = server.step([(offset_ms * MS, output_tokens)] * arrivals)
        steps += 1
        emitted = sum(before.get(key, output_tokens) - left for key, left in server.left.items())
        tokens += emitted
        running_ns += emitted * 10 * MS
        level_ns += inside_before * 10 * MS + arrivals * (10 - offset_ms) * MS
        for key, left in server.left.items():
            if left < before.get(key, output_tokens) and key not in first:
                first[key] = server.t_ns
        if offset_ms == 9 and server.waiting:
            key = server.waiting.pop()
            cancelled += 1
            server.truth.ended(server.t_ns, key, Finish.CANCELLED)
        if offset_ms == 0:
            server.received += 1
            rejected += 1
            server.truth.received(server.t_ns, Arrival(server.received, server.t_ns, 1, 1))
            server.truth.rejected(server.t_ns, server.received, "rejected")
        assert begin_ns < server.t_ns
        assert len(finished) <= slots
    report = server.report(min_hold_seconds=0.0, dip_seconds=0.0)
    assert report.problems == {}
    assert (report.tokens, report.steps, report.received) == (tokens, steps, server.received)
    assert report.received == sum(report.ended.values()) + report.inside
    assert report.inside == server.inside
    assert (report.ended.get("rejected", 0), report.ended.get("cancelled", 0)) == (rejected, cancelled)
    assert report.ttft_seconds.samples == len(first)
    assert report.running_max <= slots
    held_ns = sum(row.level * row.seconds for row in report.levels) * NS
    assert held_ns == pytest.approx(level_ns, abs=1.0)
    assert sum((row.tokens_per_second or 0.0) * row.settled_seconds for row in report.levels) <= tokens + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(0, 12),
)
def test_filled_dips_are_those_of_a_closing(stretches, dip):
    """Against the definition: at each moment, the least over all windows around it of the most within the window."""
    inside = [level for level, length in stretches for _ in range(length)]
    lines, key = [HEAD], 0
    stack = []
    for t_ns, level in enumerate(inside):
        while len(stack) < level:
            key += 1
            stack.append(key)
            lines.append(f'{{"received":[{t_ns},{key},1,1]}}\n')
        while len(stack) > level:
            lines.append(f'{{"ended":[{t_ns},{stack.pop()},"cancelled"]}}\n')
    lines.append(f'{{"event":[{len(inside)},"end",{{}}]}}\n')
    report = read_truth(lines, min_hold_seconds=0.0, dip_seconds=dip / NS)
    expected: dict[int, int] = {}
    # A dip of fewer than `dip` moments is filled, so windows are `dip` long; off the ends there is nobody inside.
    padded = [0] * dip + inside + [0] * dip
    for at in range(dip, dip + len(inside)):
        windows = [padded[begin : begin + max(dip, 1)] for begin in range(at - max(dip, 1) + 1, at + 1)]
        level = min(max(window) for window in windows)
        if level:
            expected[level] = expected.get(level, 0) + 1
    assert {row.level: round(row.seconds * NS) for row in report.levels} == expected


def test_the_script_reads_a_file_in_a_process_of_its_own(tmp_path):
    server = Server()
    server.offer(4, 3.0)
    path = tmp_path / "truth.jsonl"
    path.write_text(server.stream.getvalue())
    command = [sys.executable, "-W", "error", "-m", "serving.simulator.truth", str(path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["schema"] == "plimsoll.truth_report/1"
    assert document["largest_unqueued_batch"] == 4
    assert document["problems"] == {}
    assert (document["restarts"], document["ended"]) == (0, {"length": 24})
    assert done.stderr == ""


def test_the_script_knows_nothing_of_the_core():
    code = "import sys, serving.simulator.truth; print(*sorted(m for m in sys.modules if 'simulator' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["serving.simulator", "serving.simulator.spec", "serving.simulator.truth"]


def test_the_script_tells_people_the_same_and_fails_where_the_file_contradicts_itself(tmp_path, capsys):
    path = tmp_path / "truth.jsonl"
    path.write_text(GOLDEN + '{"leak":[41000000000,{"gpu_bytes":5}]}\n{"ended":[41000000000,77,"length"]}\n{"rec')
    assert truth.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "largest un-queued batch   2 (no larger level was held that queued)" in out
    assert "KV cache at most          80 blocks, 80.0%" in out
    assert "ended, but not inside: 1" in out
    assert "leak of gpu_bytes, start 1: 5 to 5" in out
    assert "the last line was cut off" in out
    assert truth.main([str(tmp_path / "none")]) == 4
    path.write_text("no truth\n")
    assert truth.main([str(path)]) == 4
    assert "not a line of a truth file" in capsys.readouterr().err
