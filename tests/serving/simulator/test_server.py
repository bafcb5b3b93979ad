"""A simulated server in token mode: what it counts, how its memory moves, how it dies, and that it is deterministic."""

import io
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import NS
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.life import HistogramCounter
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Arrival, Finish, MemoryPlan, OnFull, Policy, ServerSpec, Work
from serving.simulator.traffic import Traffic
from serving.simulator.truth import TruthWriter, read_truth

T0 = 1_700_000_000 * NS
MIB = 2**20
HOUR = 3600 * NS
EDGES = {
    "time_to_first_token_seconds": (0.01, 0.1, 1.0),
    "inter_token_latency_seconds": (0.01, 0.1, 1.0),
    "request_duration_seconds": (0.1, 1.0, 10.0),
    "request_queue_seconds": (0.01, 0.1, 1.0),
}


class Linear:
    def seconds(self, work: Work) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens + 1e-3 * work.decode_sequences


SPEC = ServerSpec(
    engine="vllm",
    release="0.32.0",
    model="m",
    max_batch=8,
    context_tokens=2048,
    token_budget=512,
    block_tokens=16,
    kv_blocks=1000,
    cost=Linear(),
    memory=MemoryPlan(cards=2, card_total_bytes=1000 * MIB, weights_bytes=500 * MIB, kv_cache_bytes=200 * MIB),
)
TRAFFIC = Traffic(per_second=2.0, prompt_tokens=200, output_tokens=60, context_tokens=2048, seed=3)


def serve(*faults: str, seconds: float = 60, spec: ServerSpec = SPEC, traffic: Traffic | None = TRAFFIC, seed: int = 0):
    stream = io.StringIO()
    plan = FaultPlan([parse_fault(fault) for fault in faults], seed=seed)
    server = SimulatedServer(spec, t_ns=T0, edges=EDGES, plan=plan, truth=TruthWriter(stream), traffic=traffic)
    server.run_until(T0 + round(seconds * NS))
    return server, stream.getvalue()


def report(text: str):
    return read_truth(text.splitlines())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(), ("stuck_request=5%",), ("crash=3s,start=10s,every=20s",)]))
def test_the_same_seed_gives_the_same_truth_byte_for_byte(seed, faults):
    traffic = replace(TRAFFIC, seed=seed)
    first = serve(*faults, seconds=40, traffic=traffic, seed=seed)[1]
    assert first == serve(*faults, seconds=40, traffic=traffic, seed=seed)[1]
    assert report(first).problems == {}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 60), st.integers(0, 30), st.booleans()), min_size=1, max_size=12
    ),
    st.sampled_from([Policy(), Policy(on_full=OnFull.FAIL, counts_at_finish=True), Policy(prefill_first=True)]),
    st.sampled_from(["zombie=0", "zombie=50%"]),
)
def test_clients_may_go_away_at_any_moment(plan, policy, fault):
    """Each request ends once, blocks come back, and the truth does not contradict itself."""
    stream = io.StringIO()
    # So small a pool that requests are thrown out or fail.
    spec = replace(SPEC, kv_blocks=32, context_tokens=460, max_batch=4, policy=policy)
    server = SimulatedServer(
        spec, t_ns=T0, edges=EDGES, plan=FaultPlan([parse_fault(fault)]), truth=TruthWriter(stream)
    )
    for number, (prompt, output, _, _) in enumerate(plan):
        server.arrive(Arrival(number, T0, prompt, output))
    for turn in range(5000):
        begun = server.begin(server.t_ns)
        if begun is None:
            break
        during_ns = (begun.t_ns + begun.t_end_ns) // 2
        for number, (_, _, leaves_at, during) in enumerate(plan):
            if during and leaves_at == turn:
                server.cancel(number, during_ns)
        server.complete()
        for number, (_, _, leaves_at, during) in enumerate(plan):
            if not during and leaves_at == turn:
                server.cancel(number, server.t_ns)
    assert server.state.inside == server.state.pool.used == 0
    truth = report(stream.getvalue())
    assert truth.problems == {}
    assert sum(truth.ended.values()) == truth.received == sum(server.finished.values())


def test_counters_and_truth_agree():
    server, text = serve()
    truth = report(text)
    assert server.generated_tokens == truth.tokens > 1000
    assert server.steps == truth.steps
    assert server.finished[Finish.STOP] == truth.ended["stop"] > 50
    view = server.snapshot()
    assert view is not None
    assert (view.generated_tokens, view.preemptions) == (truth.tokens, truth.preemptions)
    first = view.histograms["time_to_first_token_seconds"]
    between = view.histograms["inter_token_latency_seconds"]
    assert first.count + between.count == truth.tokens
    assert view.histograms["request_duration_seconds"].count == truth.ended["stop"]
    assert view.http["/v1/completions", 200] == truth.received


def test_time_may_be_cut_in_any_way():
    whole, text = serve(seconds=30)
    stream = io.StringIO()
    pieces = SimulatedServer(SPEC, t_ns=T0, edges=EDGES, truth=TruthWriter(stream), traffic=TRAFFIC)
    for tenth in range(1, 301):
        pieces.run_until(T0 + tenth * NS // 10)
    assert stream.getvalue() == text
    assert pieces.snapshot() == whole.snapshot()


def test_a_full_queue_refuses():
    server, text = serve(spec=replace(SPEC, queue_limit=2, max_batch=1), seconds=30)
    truth = report(text)
    assert truth.ended["rejected"] > 5
    assert truth.waiting_max <= 2
    assert server.http["/v1/completions", 503] == truth.ended["rejected"]


def test_what_does_not_fit_the_context_is_refused():
    server = SimulatedServer(SPEC, t_ns=T0)
    assert server.arrive(Arrival(1, T0, 2000, 49)) is Finish.REJECTED
    assert server.arrive(Arrival(2, T0, 2000, 48)) is None


@pytest.mark.parametrize(
    ("fault", "figure", "per_hour"),
    [
        ("gpu_leak_per_hour=60MiB", "gpu_bytes", 60 * MIB),
        ("host_leak_per_hour=120MiB", "host_bytes", 120 * MIB),
        ("fd_leak_per_hour=3600", "descriptors", 3600),
        ("shm_leak_per_hour=36MiB", "shm_bytes", 36 * MIB),
    ],
)
def test_what_leaks_by_time_leaks_at_the_rate_that_was_asked_for(fault, figure, per_hour):
    server, text = serve(fault, seconds=120)
    (leak,) = report(text).leaks
    assert leak.kind == figure
    assert leak.per_hour.least_squares == pytest.approx(per_hour, rel=0.01)
    view = server.snapshot()
    assert view is not None
    shown = {
        "gpu_bytes": view.gpus[0].memory_used_bytes - view.gpus[1].memory_used_bytes,
        "host_bytes": view.process.anonymous_memory_bytes - SPEC.memory.host_base_bytes,
        "descriptors": view.process.open_fds - 64 - view.running - view.waiting,
        "shm_bytes": view.process.shared_memory_bytes,
    }[figure]
    in_use = view.running * SPEC.memory.host_bytes_per_request if figure == "host_bytes" else 0
    assert shown - in_use == pytest.approx(per_hour / 30, rel=0.01)


def test_what_leaks_by_work_follows_the_work():
    server, text = serve("gpu_leak_per_request=1MiB", "host_leak_per_token=1000B", seconds=120)
    truth = report(text)
    ended = sum(truth.ended.values())
    assert server.memory.gpu_leaked == pytest.approx(ended * MIB)
    assert server.memory.host_leaked == pytest.approx(truth.tokens * 1000)


def test_a_bounded_cache_stops_at_its_cap():
    server, _ = serve("cache_fill_per_hour=3600MiB,cap=40MiB", seconds=120)
    assert server.memory.cache_bytes == 40 * MIB


def test_a_high_water_allocator_keeps_what_the_busiest_moment_took():
    calm, _ = serve(seconds=60)
    kept, _ = serve("high_water", seconds=60)
    for server in (calm, kept):
        server.traffic = None
        server.run_until(T0 + 120 * NS)
    in_requests = [
        server.snapshot().process.anonymous_memory_bytes - SPEC.memory.host_base_bytes for server in (calm, kept)
    ]
    assert in_requests == [0, kept.memory.peak_running * SPEC.memory.host_bytes_per_request]


def test_disconnects_leak_blocks_and_a_restart_gives_them_back():
    traffic = replace(TRAFFIC, disconnect_share=0.5)
    server, text = serve("kv_leak_per_disconnect=3", seconds=60, traffic=traffic)
    cancelled = report(text).ended["cancelled"]
    assert server.state.pool.leaked == 3 * cancelled > 0
    server.go_down(0)
    server.elapse(server.t_ns + 1)
    assert server.state.pool.leaked == 0


def test_zombies_go_on_after_their_client_has_gone():
    for share, why in (("0", Finish.CANCELLED), ("1", Finish.LENGTH)):
        server = SimulatedServer(SPEC, t_ns=T0, plan=FaultPlan([parse_fault(f"zombie={share}")]))
        server.arrive(Arrival(1, T0, 100, 50))
        for _ in range(5):
            server.step(T0 + 60 * NS)
        server.cancel(1, server.t_ns)
        assert server.state.inside == (why is Finish.LENGTH)
        while server.step(T0 + 60 * NS):
            pass
        assert server.finished == {why: 1}


def test_decoding_slows_with_the_hours_and_a_restart_cures_it():
    def seconds_for_a_token(server: SimulatedServer, t_ns: int) -> float:
        server.run_until(t_ns)
        server.arrive(Arrival(t_ns, t_ns, 10, 3))
        steps = [server.step(t_ns + 60 * NS) for _ in range(3)]
        return (steps[1].t_end_ns - steps[1].t_ns) / NS

    faults = [parse_fault("decode_slows_per_hour=10%"), parse_fault("crash=1s,start=5h")]
    server = SimulatedServer(SPEC, t_ns=T0, plan=FaultPlan(faults))
    fresh = SPEC.cost.seconds(Work(decode_sequences=1, decode_context_tokens=11))
    speeds = [seconds_for_a_token(server, T0 + hours * HOUR) / fresh for hours in (0, 1, 4, 6)]
    assert speeds == pytest.approx([1.0, 1.1, 1.4, 1.1], abs=1e-3)


def test_a_clamp_holds_for_starts_while_it_is_on():
    server, text = serve("clamp_max_batch=3,end=30s", "crash=1s,start=40s", seconds=39)
    assert server.spec.max_batch == 3
    assert server.spec.asked_max_batch == 8
    assert report(text).running_max <= 3
    server.run_until(T0 + 60 * NS)
    assert server.spec == SPEC


def test_a_limit_that_is_not_in_effect_is_passed():
    busy = replace(TRAFFIC, per_second=20.0)
    assert report(serve(seconds=20, traffic=busy)[1]).running_max == 8
    assert report(serve("limit_ignored", seconds=20, traffic=busy)[1]).running_max > 8


def test_out_of_memory_takes_the_server_down_for_good():
    spec = replace(SPEC, memory=replace(SPEC.memory, gpu_bytes_per_request=10 * MIB))
    server, text = serve(f"oom_at_bytes={745 * MIB}B", spec=spec, traffic=replace(TRAFFIC, per_second=20.0), seconds=60)
    truth = report(text)
    assert server.died is Trouble.OUT_OF_MEMORY
    assert truth.running_max == 4
    assert truth.events["died"] == 1
    assert not server.alive
    assert server.snapshot() is None
    # Its customers read no answers, so that nobody has to be told.
    assert truth.ended["died"] > 0
    assert server.lost == []
    assert server.arrive(Arrival(1, server.t_ns, 10, 10)) is Finish.DIED


def test_a_crash_loses_what_was_inside_and_resets_the_counters():
    server, text = serve("crash=5s,start=20s,keeps_leaks", "gpu_leak_per_hour=360MiB", seconds=40)
    truth = report(text)
    assert truth.starts == 2
    assert truth.ended["died"] >= 1
    assert server.started_ns == T0 + 25 * NS
    assert server.generated_tokens < truth.tokens
    assert server.memory.gpu_leaked == pytest.approx(35 * 0.1 * MIB, rel=0.01)
    view = server.snapshot(T0 + 41 * NS)
    assert view is not None
    assert view.started_ns == T0 + 25 * NS


def test_a_server_that_loads_takes_no_requests_and_is_not_ready():
    server = SimulatedServer(replace(SPEC, start_seconds=30), t_ns=T0, cold=True)
    assert server.arrive(Arrival(1, T0 + NS, 10, 10)) is Finish.DIED
    assert server.snapshot().ready is False
    assert server.arrive(Arrival(2, T0 + 30 * NS, 10, 10)) is None
    assert server.step(T0 + 60 * NS) is not None


def test_a_deploy_brings_its_steps():
    server, _ = serve("deploy=2s,start=10s,memory=64MiB,speed=100%", seconds=20, traffic=None)
    server.arrive(Arrival(1, server.t_ns, 10, 3))
    first, second = server.step(server.t_ns + NS), server.step(server.t_ns + NS)
    assert second.t_end_ns - second.t_ns == pytest.approx(0.011 / 2 * NS, rel=0.01)
    assert first is not None
    assert server.memory.host_bytes(0, server.conditions) == SPEC.memory.host_base_bytes + 64 * MIB
    assert server.memory.gpu_bytes(0, 0) - server.memory.gpu_bytes(1, 0) == 64 * MIB


def test_frozen_gauges_stand_still_while_counters_go_on():
    server, _ = serve("frozen_gauges,start=30s,end=50s", seconds=30.5)
    then = server.snapshot()
    server.run_until(T0 + 49 * NS)
    now = server.snapshot()
    assert (now.running, now.waiting, now.kv_blocks_used) == (then.running, then.waiting, then.kv_blocks_used)
    assert now.generated_tokens > then.generated_tokens
    server.traffic = None
    server.run_until(T0 + 80 * NS)
    assert server.snapshot().running == 0


def test_an_engine_that_counts_at_finish_shows_nothing_before():
    spec = replace(SPEC, policy=Policy(counts_at_finish=True))
    server = SimulatedServer(spec, t_ns=T0)
    server.arrive(Arrival(1, T0, 100, 20))
    for _ in range(10):
        server.step(T0 + NS)
    view = server.snapshot()
    assert view.generated_tokens == 0
    (busy,) = [slot for slot in view.slots if slot.is_processing]
    assert (busy.processed_tokens, busy.decoded_tokens, len(view.slots)) == (100, 10, 8)
    while server.step(T0 + 60 * NS):
        pass
    assert server.snapshot().generated_tokens == 20


def test_a_histogram_counts_at_or_below_its_edges():
    counter = HistogramCounter((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        counter.observe(value)
    counter.observe(2.0, times=2.0)
    view = counter.view()
    assert view.edges == (1.0, 2.0, math.inf)
    assert view.cumulative == (2.0, 5.0, 6.0)
    assert view.sum == pytest.approx(9.5)


def test_a_death_takes_zombies_along_and_nobody_is_told():
    stream = io.StringIO()
    plan = FaultPlan([parse_fault("zombie=1")])
    server = SimulatedServer(SPEC, t_ns=T0, plan=plan, truth=TruthWriter(stream))
    server.arrive(Arrival(1, T0, 100, 50))
    server.step(T0 + NS)
    server.cancel(1, server.t_ns)
    server.go_down(1.0)
    server.elapse(server.t_ns + 2 * NS)
    assert server.lost == []
    truth = report(stream.getvalue())
    assert (truth.ended, truth.problems) == ({"died": 1}, {})


def test_a_client_that_left_during_the_step_in_which_the_server_dies_is_not_lost_too():
    stream = io.StringIO()
    server = SimulatedServer(SPEC, t_ns=T0, truth=TruthWriter(stream))
    for number in (1, 2):
        server.arrive(Arrival(number, T0, 100, 50))
    server.begin(T0)
    server.cancel(1, T0 + 1000)
    server.go_down(1.0)
    server.elapse(T0 + 2 * NS)
    assert [flight.id for flight in server.lost] == [2]
    truth = report(stream.getvalue())
    assert (truth.ended, truth.problems) == ({"cancelled": 1, "died": 1}, {})


def test_requests_that_are_about_to_fail_die_with_the_server():
    stream = io.StringIO()
    spec = replace(SPEC, kv_blocks=64, block_tokens=1, context_tokens=64, policy=Policy(on_full=OnFull.FAIL))
    server = SimulatedServer(spec, t_ns=T0, truth=TruthWriter(stream))
    for number in range(3):
        server.arrive(Arrival(number, T0, 20, 40))
    while not server.begin(server.t_ns).failed:
        server.complete()
    server.go_down(1.0)
    server.elapse(server.t_ns + 2 * NS)
    assert [flight.id for flight in server.lost] == [0, 1, 2]
    truth = report(stream.getvalue())
    assert (truth.ended, truth.problems) == ({"died": 3}, {})


@pytest.mark.parametrize("start", ["0.3s", "1.123456789s", "12345.6789s"])
def test_crashes_at_odd_moments_happen_once_each_for_years(start):
    server, text = serve(f"crash=0.1s,start={start},every=86400.1234567s", seconds=400 * 86400, traffic=None)
    assert server.start_number == report(text).starts == 401


def test_an_hour_of_crashes_each_second_is_no_matter_of_minutes():
    """Looking for the next crash must not cost as much as there are still to come."""
    server, _ = serve("crash=0s,start=1s,every=1s", seconds=3600, traffic=None)
    assert server.start_number == 3600


def test_faults_are_told_when_they_come_and_go_however_time_is_cut():
    text = serve("step_slowdown=2,start=10s,end=20s", seconds=100, traffic=None)[1]
    events = [json.loads(line)["event"] for line in text.splitlines() if "event" in line]
    assert [(t_ns - T0, kind) for t_ns, kind, _ in events] == [(10 * NS, "fault_on"), (20 * NS, "fault_off")]


def test_faults_that_are_put_in_and_taken_out_while_it_runs_are_told():
    stream = io.StringIO()
    plan = FaultPlan()
    server = SimulatedServer(SPEC, t_ns=T0, plan=plan, truth=TruthWriter(stream))
    server.elapse(T0 + 5 * NS)
    added = [plan.add(parse_fault("step_slowdown=2", now_s=5.0)), plan.add(parse_fault("frozen_gauges,start=1s"))]
    server.elapse(T0 + 8 * NS)
    for fault_id in added:
        plan.remove(fault_id)
    server.elapse(T0 + 9 * NS)
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines() if "event" in line]
    assert [(t_ns - T0, kind, more["id"]) for t_ns, kind, more in events] == [
        (5 * NS, "fault_on", 2),
        (5 * NS, "fault_on", 1),
        (8 * NS, "fault_off", 2),
        (8 * NS, "fault_off", 1),
    ]


def test_a_disconnect_leaks_all_its_blocks_where_none_are_free():
    stream = io.StringIO()
    spec = replace(SPEC, kv_blocks=10, context_tokens=160, prefix_cache=False)
    plan = FaultPlan([parse_fault("kv_leak_per_disconnect=3")])
    for during in (False, True):
        server = SimulatedServer(spec, t_ns=T0, plan=plan, truth=TruthWriter(stream))
        server.arrive(Arrival(1, T0, 150, 5))
        server.step(T0 + NS)
        assert server.state.pool.available == 0
        if during:
            server.begin(server.t_ns)
        server.cancel(1, server.t_ns)
        if during:
            server.complete()
        assert server.state.pool.leaked == server.state.pool.used == 3


def test_customers_that_go_away_leave_zombies_and_leaks_like_any_client():
    traffic = replace(TRAFFIC, disconnect_share=0.5)
    gone = serve("kv_leak_per_disconnect=1,start=20s", traffic=traffic)[1]
    server, text = serve("kv_leak_per_disconnect=1,start=20s", "zombie=1,start=20s", traffic=traffic)
    truth = report(text)
    assert truth.problems == {}
    # Whether a request is a zombie is decided when its client goes away, not when it comes.
    assert truth.ended["cancelled"] > 5
    assert truth.events["zombie"] == server.state.pool.leaked
    assert truth.events["zombie"] == pytest.approx(report(gone).ended["cancelled"] - truth.ended["cancelled"], abs=3)
    (leak,) = truth.leaks
    assert leak.per_disconnect.least_squares == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fault", "memory"),
    [
        ("gpu_leak_per_hour=3600MiB", SPEC.memory),
        ("host_leak_per_hour=3600MiB", replace(SPEC.memory, cards=0, host_base_bytes=700 * MIB)),
        ("cache_fill_per_hour=3600MiB,cap=1GiB", replace(SPEC.memory, cards=0, host_base_bytes=700 * MIB)),
    ],
)
def test_a_leak_kills_an_idle_server_at_the_moment_that_it_must(fault, memory):
    server, text = serve(fault, "oom_at_bytes=710MiB", spec=replace(SPEC, memory=memory), seconds=3600, traffic=None)
    assert server.died is Trouble.OUT_OF_MEMORY
    (died,) = [json.loads(line)["event"] for line in text.splitlines() if '"died"' in line]
    assert (died[0] - T0) / NS == pytest.approx(10.0, abs=1e-6)


def test_a_cache_that_is_full_below_the_limit_kills_nobody():
    memory = replace(SPEC.memory, cards=0, host_base_bytes=700 * MIB)
    faults = ("cache_fill_per_hour=3600MiB,cap=9MiB", "oom_at_bytes=710MiB")
    server, _ = serve(*faults, spec=replace(SPEC, memory=memory), seconds=3600, traffic=None)
    assert server.died is None
    assert server.memory.cache_bytes == 9 * MIB


def test_who_waits_comes_in_when_the_faults_change():
    server, _ = serve(
        "stuck_request=1,end=1s", "limit_ignored,start=20s", spec=replace(SPEC, max_batch=1), traffic=None
    )
    server = SimulatedServer(replace(SPEC, max_batch=1), t_ns=T0, plan=server.plan)
    server.arrive(Arrival(1, T0, 100, 10))
    server.run_until(T0 + 2 * NS)
    server.arrive(Arrival(2, server.t_ns, 100, 10))
    step = server.step(T0 + 100 * NS)
    assert step is not None
    assert (step.t_ns - T0, step.admitted) == (20 * NS, (2,))


def test_a_clamp_keeps_in_mind_what_was_asked_for():
    plan = FaultPlan([parse_fault("clamp_max_batch=3")])
    assert SimulatedServer(replace(SPEC, asked_max_batch=64), t_ns=T0, plan=plan).spec.asked_max_batch == 64


def test_every_running_request_is_in_a_slot_whatever_ran_before():
    spec = replace(SPEC, max_batch=2, policy=Policy(counts_at_finish=True))
    server = SimulatedServer(spec, t_ns=T0, plan=FaultPlan([parse_fault("limit_ignored")]))
    for number in range(6):
        server.arrive(Arrival(number, T0, 50, 10 if number < 5 else 100))
    server.run_until(T0 + NS // 2)
    view = server.snapshot()
    assert [slot.task_id for slot in view.slots if slot.is_processing] == [5]
    assert view.running == 1


def test_the_truth_tells_a_fault_before_the_restart_that_it_came_before():
    text = serve("crash=1s,start=5s", "step_slowdown=2,start=5.5s", "frozen_gauges,start=6s", seconds=10, traffic=None)[
        1
    ]
    told = [json.loads(line) for line in text.splitlines()]
    moments = [(line.get("event") or line["start"])[0] - T0 for line in told]
    assert moments == [0, 5 * NS, 5 * NS + NS // 2, 6 * NS, 6 * NS]
    assert report(text).problems == {}
