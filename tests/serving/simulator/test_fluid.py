import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import NS
from serving.simulator import fluid
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.fluid import FluidServer
from serving.simulator.roofline import Affine
from serving.simulator.spec import Finish, MemoryPlan, OnFull, Policy, ServerSpec
from serving.simulator.traffic import Traffic

START_NS = 1_790_000_000 * NS
HOUR = 3600
MIB = 2**20
GIB = 2**30

SPEC = ServerSpec(
    "vllm",
    "0.10.0",
    "small",
    max_batch=32,
    context_tokens=8192,
    token_budget=2048,
    block_tokens=16,
    kv_blocks=6000,
    cost=Affine(0.012, prefill_token_seconds=50e-6, decode_sequence_seconds=300e-6),
    memory=MemoryPlan(
        weights_bytes=14 * GIB, kv_cache_bytes=20 * GIB, workspace_bytes=2 * GIB, host_base_bytes=3 * GIB
    ),
)
TRAFFIC = Traffic(2.0, prompt_tokens=300, output_tokens=150, prompt_spread=0.5, output_spread=0.5)
EDGES = {
    "time_to_first_token_seconds": (0.02, 0.05, 0.1, 0.5, 1.0, 5.0),
    "inter_token_latency_seconds": (0.01, 0.012, 0.015, 0.02, 0.05, 0.1),
    "request_duration_seconds": (0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
    "request_queue_seconds": (0.01, 0.1, 1.0, 10.0),
}


def make(*faults, spec=SPEC, traffic=TRAFFIC, seed=0, **more):
    plan = FaultPlan([parse_fault(fault) for fault in faults], seed=seed)
    return FluidServer(spec, traffic=traffic, edges=EDGES, t_ns=START_NS, seed=seed, plan=plan, **more)


def at(server, seconds):
    return server.snapshot(START_NS + round(seconds * NS))


def watch(server, from_s, to_s, every=15):
    return [at(server, second) for second in range(from_s, to_s + 1, every)]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def deviation(values):
    values = list(values)
    centre = mean(values)
    return math.sqrt(mean((value - centre) ** 2 for value in values))


class TestPhysics:
    def test_without_customers_nothing_happens(self):
        first, last = at(server := make(traffic=None), 15), at(server, 24 * HOUR)
        assert (last.running, last.waiting, last.kv_blocks_used, last.generated_tokens, last.steps) == (0, 0, 0, 0, 0)
        assert (last.gpus, last.process) == (first.gpus, first.process)
        assert last.gpus[0].utilization_ratio == 0

    @pytest.mark.parametrize("every", [1, 5, 15, 60])
    def test_steps_that_cost_the_same_make_an_infinite_server_queue(self, every):
        """M/G/infinity: Poisson with rate x residence, however often one looks."""
        spec = replace(SPEC, max_batch=1000, cost=Affine(0.02))
        seen = watch(make(spec=spec), HOUR, HOUR + 10_000 * every, every=every)
        residence = 0.02 * 150
        assert mean(one.running for one in seen) == pytest.approx(2.0 * residence, rel=0.03)
        assert deviation([one.running for one in seen]) == pytest.approx(math.sqrt(2.0 * residence), rel=0.05)

    def test_the_batch_remembers_for_a_residence(self):
        spec = replace(SPEC, max_batch=1000, cost=Affine(0.02))
        running = [one.running for one in watch(make(spec=spec), HOUR, 8 * HOUR, every=3)]
        centre = mean(running)
        variance = deviation(running) ** 2
        lagged = mean((a - centre) * (b - centre) for a, b in itertools.pairwise(running)) / variance
        assert lagged == pytest.approx(math.exp(-1), abs=0.05)

    def test_a_full_batch_gives_what_its_step_gives(self):
        seen = watch(make(traffic=replace(TRAFFIC, per_second=30.0), spec=replace(SPEC, queue_limit=50)), 600, 5 * HOUR)
        assert {one.running for one in seen} == {32}
        # Each step has one token for each of 32 and their share of prompts.
        step = (0.012 + 32 * 300e-6) / (1 - 32 / 150 * 300 * 50e-6 / (0.012 + 32 * 300e-6 + 32 / 150 * 300 * 50e-6))
        speed = (seen[-1].generated_tokens - seen[0].generated_tokens) / (5 * HOUR - 600)
        assert speed == pytest.approx(32 / step, rel=0.03)
        assert seen[-1].histograms["inter_token_latency_seconds"].sum / seen[-1].generated_tokens == pytest.approx(
            step, rel=0.03
        )

    def test_a_queue_grows_by_what_is_too_much_and_drains_afterwards(self):
        burst = replace(TRAFFIC, per_second=6.0, diurnal_ratio=1.0, peak_hour=START_NS / NS % 86400 / 3600)
        server = make(traffic=burst)
        seen = watch(server, 15, 12 * HOUR)
        peak = max(one.waiting for one in seen)
        assert peak > 1000
        assert seen[-1].waiting < 5
        full = [one for one in seen if one.waiting > 100]
        assert {one.running for one in full} == {32}
        before, after = full[0], full[40]
        came = after.http["/v1/completions", 200] - before.http["/v1/completions", 200]
        ended = after.finished[Finish.STOP] - before.finished[Finish.STOP]
        assert after.waiting - before.waiting == pytest.approx(came - ended, abs=3)

    def test_the_kv_cache_can_be_what_binds(self):
        spec = replace(SPEC, kv_blocks=300, queue_limit=40)
        seen = watch(make(spec=spec, traffic=replace(TRAFFIC, per_second=10.0)), 600, 3 * HOUR)
        assert 8 < mean(one.running for one in seen) < 14
        assert mean(one.kv_blocks_used for one in seen) > 280
        assert max(one.kv_blocks_used for one in seen) <= 300
        assert seen[-1].preemptions > seen[0].preemptions > 0

    def test_a_reserve_for_outputs_prevents_preemption(self):
        policy = Policy(prefill_first=True, reserved_output_ratio=0.7)
        spec = replace(SPEC, kv_blocks=300, queue_limit=40, policy=policy)
        seen = watch(make(spec=spec, traffic=replace(TRAFFIC, per_second=10.0)), 600, 3 * HOUR)
        assert seen[-1].preemptions == 0
        assert mean(one.kv_blocks_used for one in seen) < 270

    def test_a_full_shared_cache_fails_everything_where_the_engine_does_so(self):
        policy = Policy(on_full=OnFull.FAIL, counts_at_finish=True)
        spec = replace(SPEC, kv_blocks=500, max_batch=32, queue_limit=40, policy=policy)
        seen = watch(make(spec=spec, traffic=replace(TRAFFIC, per_second=12.0)), 600, HOUR)
        assert seen[-1].finished[Finish.KV_FULL] > 0
        assert seen[-1].preemptions == 0

    def test_a_common_prefix_saves_prompts_and_blocks(self):
        apart = at(make(traffic=replace(TRAFFIC, prompt_tokens=800)), 5 * HOUR)
        server = make(traffic=replace(TRAFFIC, prompt_tokens=800, shared_prefix_share=1.0, shared_prefix_tokens=512))
        together = at(server, 5 * HOUR)
        assert apart.cached_tokens == 0
        assert 0.4 < together.cached_tokens / together.prompt_tokens < 0.7
        assert together.step_tokens < 0.7 * apart.step_tokens
        without = at(make(spec=replace(SPEC, prefix_cache=False), traffic=server.traffic), 5 * HOUR)
        assert without.cached_tokens == 0

    def test_requests_that_do_not_fit_the_context_are_refused(self):
        seen = at(make(spec=replace(SPEC, context_tokens=64)), 2 * HOUR)
        assert seen.finished[Finish.REJECTED] == seen.http["/v1/completions", 503] > 13_000
        assert seen.generated_tokens < 1000

    def test_the_day_is_in_the_series(self):
        traffic = replace(TRAFFIC, per_second=3.0, diurnal_ratio=0.8, peak_hour=12.0, since_ns=START_NS)
        seen = watch(make(traffic=traffic), 0, 2 * 24 * HOUR, every=60)
        by_hour = {}
        for one in seen:
            by_hour.setdefault(one.t_ns // (HOUR * NS) % 24, []).append(one.running)
        levels = {hour: mean(values) for hour, values in by_hour.items()}
        assert levels[11] + levels[12] > 4 * (levels[23] + levels[0])

    def test_clients_that_go_away_cost_half_an_answer(self):
        stays, goes = (at(make(traffic=replace(TRAFFIC, disconnect_share=d)), 20 * HOUR) for d in (0.0, 0.5))
        assert goes.finished[Finish.CANCELLED] == pytest.approx(goes.finished[Finish.STOP], rel=0.03)
        assert goes.generated_tokens == pytest.approx(0.75 * stays.generated_tokens, rel=0.02)

    def test_tokens_of_an_engine_that_counts_at_the_end_add_up_to_the_same(self):
        policy = Policy(counts_at_finish=True)
        early, late = (at(make(spec=replace(SPEC, policy=p)), 20 * HOUR) for p in (Policy(), policy))
        assert late.generated_tokens == pytest.approx(early.generated_tokens, rel=0.01)

    def test_histograms_have_the_mean_and_the_spread_of_what_happened(self):
        seen = at(make(), 10 * HOUR)
        duration = seen.histograms["request_duration_seconds"]
        assert duration.count == pytest.approx(seen.finished[Finish.STOP])
        # 150 steps of 12.3 ms and more, log-normal with a spread of 0.5.
        centre = duration.sum / duration.count
        assert 2.0 < centre < 3.2
        below = duration.cumulative[duration.edges.index(2.0)] / duration.count
        expected = 0.5 * math.erfc((math.log(centre) - 0.125 - math.log(2.0)) / 0.5 / math.sqrt(2))
        assert below == pytest.approx(expected, abs=0.06)
        gaps = seen.histograms["inter_token_latency_seconds"]
        assert gaps.count == pytest.approx(seen.generated_tokens - seen.finished[Finish.STOP], rel=0.02)
        first = seen.histograms["time_to_first_token_seconds"]
        assert first.count == pytest.approx(seen.finished[Finish.STOP] + seen.running, abs=1)


class TestSeries:
    @settings(max_examples=40, deadline=None)
    @given(
        rate=st.floats(0.05, 15.0),
        max_batch=st.integers(1, 40),
        kv_blocks=st.integers(100, 3000),
        queue_limit=st.sampled_from([None, 0, 5, 50]),
        spans=st.lists(st.floats(0.001, 400.0), min_size=1, max_size=12),
        policy=st.sampled_from(
            [Policy(), Policy(prefill_first=True, reserved_output_ratio=0.5), Policy(on_full=OnFull.FAIL)]
        ),
        faults=st.sampled_from(
            [
                (),
                ("stuck_request=2%",),
                ("kv_leak_per_disconnect=3", "zombie=50%"),
                ("crash=20,start=100s,every=300s",),
                ("decode_slows_per_hour=2", "noisy_neighbour=3"),
            ]
        ),
        seed=st.integers(0, 3),
    )
    def test_limits_hold_counters_only_grow_and_no_request_is_lost(
        self, rate, max_batch, kv_blocks, queue_limit, spans, policy, faults, seed
    ):
        spec = replace(SPEC, max_batch=max_batch, kv_blocks=kv_blocks, queue_limit=queue_limit, policy=policy)
        traffic = replace(TRAFFIC, per_second=rate, disconnect_share=0.2)
        server = make(*faults, spec=spec, traffic=traffic, seed=seed)
        second, before = 0.0, None
        for span in spans:
            second += span
            seen = at(server, second)
            if seen is None:
                assert not server.alive
                continue
            assert seen.t_ns == START_NS + round(second * NS)
            assert 0 <= seen.running <= max_batch
            assert 0 <= seen.waiting <= (math.inf if queue_limit is None else queue_limit)
            assert 0 <= seen.kv_blocks_used <= kv_blocks
            inside = server._running + server._waiting + server._stuck
            ended = sum(seen.finished.values()) - seen.finished[Finish.REJECTED]
            assert seen.http["/v1/completions", 200] == ended + inside
            assert seen.http["/v1/completions", 503] == seen.finished[Finish.REJECTED]
            for histogram in seen.histograms.values():
                assert list(histogram.cumulative) == sorted(histogram.cumulative)
                assert len(histogram.cumulative) == len(histogram.edges)
                assert math.isfinite(histogram.sum)
            if before is not None and before.started_ns == seen.started_ns:
                for counter in ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"):
                    assert getattr(seen, counter) >= getattr(before, counter)
                for counter in ("step_tokens", "prefill_seconds", "decode_seconds", "longest_tokens"):
                    assert getattr(seen, counter) >= getattr(before, counter)
                assert all(seen.http[answer] >= count for answer, count in before.http.items())
                assert all(seen.finished[why] >= count for why, count in before.finished.items())
                for signal, histogram in seen.histograms.items():
                    old = before.histograms[signal].cumulative
                    assert all(a <= b + 1e-6 for a, b in zip(old, histogram.cumulative, strict=True))
            before = seen

    def test_the_same_seed_gives_the_same_and_another_seed_another(self):
        def series(seed):
            return watch(make("noisy_neighbour=2", seed=seed), 15, HOUR)

        assert series(1) == series(1)
        assert [one.running for one in series(1)] != [one.running for one in series(2)]

    def test_to_look_changes_nothing(self):
        looked, other = make(), make()
        for second in range(15, HOUR, 15):
            server_time = START_NS + second * NS
            looked.run_until(server_time)
            assert looked.snapshot() == looked.snapshot()
            other.run_until(server_time)
        assert looked.snapshot() == other.snapshot()

    def test_time_does_not_go_back(self):
        server = make()
        seen = at(server, 100)
        assert at(server, 50) == seen


class TestMemory:
    def test_of_the_card_is_flat_for_a_week_when_nothing_leaks(self):
        seen = watch(make(traffic=replace(TRAFFIC, diurnal_ratio=0.6)), HOUR, 7 * 24 * HOUR, every=HOUR)
        assert {one.gpus[0].memory_used_bytes for one in seen} == {36 * GIB}
        assert min(one.process.anonymous_memory_bytes for one in seen) >= 3 * GIB

    @pytest.mark.parametrize(
        ("fault", "growth"),
        [
            ("gpu_leak_per_hour=10MiB", lambda a, b: (b.gpus[0].memory_used_bytes - a.gpus[0].memory_used_bytes) / MIB),
            ("host_leak_per_hour=10MiB", lambda a, b: (_host(b) - _host(a)) / MIB),
            ("fd_leak_per_hour=10", lambda a, b: (b.process.open_fds - b.running) - (a.process.open_fds - a.running)),
            (
                "shm_leak_per_hour=10MiB",
                lambda a, b: (b.process.shared_memory_bytes - a.process.shared_memory_bytes) / MIB,
            ),
        ],
    )
    def test_leaks_by_the_hour_at_the_rate_of_the_fault(self, fault, growth):
        before, after = watch(make(fault), HOUR, 25 * HOUR, every=24 * HOUR)
        assert growth(before, after) == pytest.approx(240, abs=2)

    def test_leaks_with_each_request_and_each_token(self):
        server = make("gpu_leak_per_request=4KiB", "host_leak_per_token=100")
        seen = at(server, 10 * HOUR)
        leaked = seen.gpus[0].memory_used_bytes - 36 * GIB
        assert leaked == pytest.approx(4096 * seen.finished[Finish.STOP], rel=0.001)
        host = seen.process.anonymous_memory_bytes - 3 * GIB - 2 * MIB * seen.running
        assert host == pytest.approx(100 * seen.generated_tokens, rel=0.001)

    def test_a_bounded_cache_fills_and_stops(self):
        seen = watch(make("cache_fill_per_hour=100MiB,cap=300MiB"), HOUR, 10 * HOUR, every=HOUR)
        filled = [(one.process.anonymous_memory_bytes - 3 * GIB) / MIB - 2 * one.running for one in seen]
        assert filled == pytest.approx([100, 200, *[300] * 8], abs=1)

    def test_high_water_keeps_what_the_busiest_moment_took(self):
        seen = watch(make("high_water"), 15, 5 * HOUR)
        host = [one.process.anonymous_memory_bytes for one in seen]
        assert host == sorted(host)
        assert host[-1] >= 3 * GIB + 2 * MIB * max(one.running for one in seen)

    def test_the_server_dies_when_it_needs_more_than_there_is(self):
        server = make("gpu_leak_per_hour=1GiB", "oom_at_bytes=40GiB")
        assert at(server, 3.9 * HOUR) is not None
        assert at(server, 4.1 * HOUR) is None
        assert (server.died, server.alive, server.ready) == (Trouble.OUT_OF_MEMORY, False, False)
        assert at(server, 400 * HOUR) is None


def _host(seen):
    return seen.process.anonymous_memory_bytes - 2 * MIB * seen.running


class TestLife:
    def test_a_cold_start_takes_its_time(self):
        server = make(cold=True)
        assert at(server, 29).ready is False
        assert at(server, 29).running == 0
        assert at(server, 31).ready is True
        assert at(server, 60).running > 0

    def test_a_crash_shows_nothing_until_it_is_over_and_begins_again(self):
        server = make("crash=120,start=2h", "host_leak_per_hour=100MiB")
        before = at(server, 2 * HOUR - 15)
        assert at(server, 2 * HOUR + 60) is None
        after = at(server, 2 * HOUR + 135)
        assert after.started_ns == START_NS + (2 * HOUR + 120) * NS
        assert after.generated_tokens < before.generated_tokens / 100
        assert _host(after) - 3 * GIB < 1 * MIB
        assert (server.start_number, server.alive, server.ready) == (2, True, True)

    def test_what_leaked_may_outlive_a_crash(self):
        server = make("crash=10,start=10h,keeps_leaks", "host_leak_per_hour=100MiB", "shm_leak_per_hour=1MiB")
        seen = at(server, 11 * HOUR)
        assert _host(seen) - 3 * GIB == pytest.approx(1100 * MIB, rel=0.01)
        assert seen.process.shared_memory_bytes == pytest.approx(11 * MIB, rel=0.01)

    def test_shared_memory_outlives_every_crash(self):
        seen = at(make("crash=10,start=10h", "shm_leak_per_hour=1MiB"), 11 * HOUR)
        assert seen.process.shared_memory_bytes == pytest.approx(11 * MIB, rel=0.01)

    def test_crashes_repeat(self):
        server = make("crash=5,start=1h,every=1h")
        watch(server, 0, 10 * HOUR + 60)
        assert server.start_number == 11

    def test_a_new_release_needs_more_and_is_faster(self):
        server = make("deploy=30,start=10h,memory=512MiB,speed=0.25")
        old = watch(server, HOUR, 9 * HOUR)
        new = watch(server, 11 * HOUR, 19 * HOUR)
        assert _host(new[-1]) - _host(old[-1]) == pytest.approx(512 * MIB, abs=MIB)
        assert mean(one.running for one in new) < 0.85 * mean(one.running for one in old)

    def test_luck_of_a_start_stays_until_the_next(self):
        server = make("crash=5,start=10h,every=10h,spawn_lottery=0.3", seed=3)
        speeds = []
        for life in range(4):
            first, last = (at(server, life * 10 * HOUR + 600), at(server, (life + 1) * 10 * HOUR - 600))
            histograms = [one.histograms["inter_token_latency_seconds"] for one in (first, last)]
            speeds.append((histograms[1].sum - histograms[0].sum) / (histograms[1].count - histograms[0].count))
        assert max(speeds) / min(speeds) > 1.05


class TestFaults:
    def test_decoding_that_slows_shows_in_the_time_between_tokens(self):
        server = make("decode_slows_per_hour=1%")
        seen = watch(server, 0, 100 * HOUR, every=HOUR)

        def gap(index):
            a, b = (seen[i].histograms["inter_token_latency_seconds"] for i in (index, index + 5))
            return (b.sum - a.sum) / (b.count - a.count)

        # Slower steps keep more in the batch, which makes them slower still.
        assert 1.85 < gap(95) / gap(0) < 2.6

    def test_slow_steps_lengthen_everything(self):
        plain, slow = (at(make(*faults), 10 * HOUR) for faults in ((), ("step_slowdown=1.5",)))
        ratio = [one.histograms["request_duration_seconds"].sum for one in (slow, plain)]
        assert 1.5 < ratio[0] / ratio[1] < 2.0

    def test_a_clamp_shows_in_the_spec_that_runs(self):
        server = make("clamp_max_batch=8", traffic=replace(TRAFFIC, per_second=20.0))
        assert (server.spec.max_batch, server.spec.asked_max_batch) == (8, 32)
        assert {one.running for one in watch(server, 60, HOUR)} == {8}

    def test_a_limit_without_effect_lets_more_run(self):
        server = make("limit_ignored", spec=replace(SPEC, max_batch=4))
        assert max(one.running for one in watch(server, 60, HOUR)) > 8

    def test_blocks_that_disconnects_leak_are_never_given_back(self):
        server = make("kv_leak_per_disconnect=2", traffic=replace(TRAFFIC, disconnect_share=0.1))
        first, last = watch(server, HOUR, 3 * HOUR, every=2 * HOUR)
        gone = last.finished[Finish.CANCELLED]
        each = last.kv_blocks_used - 2 * gone
        assert 0 <= each < 600
        assert last.kv_blocks_used - first.kv_blocks_used > 2000

    def test_stuck_requests_fill_the_batch_for_ever(self):
        server = make("stuck_request=0.1%", spec=replace(SPEC, queue_limit=20))
        seen = at(server, 10 * HOUR)
        assert server._stuck == 32
        assert (seen.running, seen.waiting) == (32, 20)
        later = at(server, 11 * HOUR)
        assert later.generated_tokens == pytest.approx(seen.generated_tokens, rel=0.001)

    def test_zombies_cost_what_nobody_reads(self):
        traffic = replace(TRAFFIC, disconnect_share=0.5)
        polite, undead = (at(make(*faults, traffic=traffic), 20 * HOUR) for faults in ((), ("zombie",)))
        assert undead.generated_tokens == pytest.approx(polite.generated_tokens / 0.75, rel=0.02)

    def test_frozen_gauges_stand_still_while_counters_go_on(self):
        server = make("frozen_gauges,start=1h,end=2h")
        seen = watch(server, HOUR + 15, 2 * HOUR - 15)
        assert len({(one.running, one.waiting, one.kv_blocks_used) for one in seen}) == 1
        assert seen[-1].generated_tokens > seen[0].generated_tokens
        later = watch(server, 2 * HOUR + 15, 3 * HOUR)
        assert len({one.kv_blocks_used for one in later}) > 50


class TestDraws:
    @pytest.mark.parametrize("expected", [0.3, 5.0, 11.9, 12.1, 400.0])
    def test_poisson(self, expected):
        rng = random.Random(1)
        draws = [fluid._poisson(rng, expected) for _ in range(20_000)]
        assert mean(draws) == pytest.approx(expected, rel=0.03)
        assert deviation(draws) == pytest.approx(math.sqrt(expected), rel=0.03)

    @pytest.mark.parametrize(("count", "odds"), [(3, 0.4), (15, 0.9), (40, 0.5), (40, 0.02), (40, 0.98), (900, 0.3)])
    def test_binomial(self, count, odds):
        rng = random.Random(2)
        draws = [fluid._binomial(rng, count, odds) for _ in range(20_000)]
        assert 0 <= min(draws) <= max(draws) <= count
        assert mean(draws) == pytest.approx(count * odds, rel=0.03)
        assert deviation(draws) == pytest.approx(math.sqrt(count * odds * (1 - odds)), rel=0.05)

    @pytest.mark.parametrize(("expected", "dispersion"), [(0.5, 2.0), (8.0, 1.5), (8.0, 3.0), (200.0, 2.0), (5.0, 1.0)])
    def test_negative_binomial(self, expected, dispersion):
        rng = random.Random(3)
        draws = [fluid._dispersed(rng, expected, dispersion) for _ in range(20_000)]
        assert mean(draws) == pytest.approx(expected, rel=0.03)
        assert deviation(draws) == pytest.approx(math.sqrt(expected * dispersion), rel=0.04)

    @pytest.mark.parametrize(("count", "variation"), [(1, 0.5), (4, 1.0), (100, 0.6)])
    def test_sums_of_lengths(self, count, variation):
        rng = random.Random(4)
        draws = [fluid._gamma(rng, 100.0 * count, count, variation) for _ in range(20_000)]
        assert min(draws) > 0
        assert mean(draws) == pytest.approx(100.0 * count, rel=0.02)
        assert deviation(draws) == pytest.approx(100.0 * variation * math.sqrt(count), rel=0.04)

    @pytest.mark.parametrize(("expected", "most"), [(0.2, 10.0), (3.0, 10.0), (9.0, 40.0), (0.4, 1.3)])
    def test_chunks_that_meet_have_the_mean_asked_for(self, expected, most):
        odds = fluid._odds(expected, most, 1.0)
        assert sum(share for _, share in odds) == pytest.approx(1.0)
        assert sum(count * share for count, share in odds) == pytest.approx(expected, rel=0.01)

    def test_lengths_are_those_that_traffic_sends(self):
        traffic = Traffic(
            20.0,
            prompt_tokens=600,
            output_tokens=200,
            context_tokens=1500,
            disconnect_share=0.3,
            shared_prefix_share=0.4,
        )
        lengths = fluid._lengths(traffic, replace(SPEC, context_tokens=1200))
        sent = list(traffic.arrivals(START_NS, START_NS + HOUR * NS, block_tokens=16))
        kept = [one for one in sent if one.prompt_tokens + one.output_tokens <= 1200]
        assert lengths.accepted_share == pytest.approx(len(kept) / len(sent), abs=0.01)
        assert lengths.prompt_tokens == pytest.approx(mean(one.prompt_tokens for one in kept), rel=0.01)
        assert lengths.output_tokens == pytest.approx(mean(one.output_tokens for one in kept), rel=0.01)
        gone = mean(one.finish is Finish.CANCELLED for one in kept)
        assert lengths.cancelled_share == pytest.approx(gone, abs=0.01)
        contexts = [
            (one.prompt_tokens * (one.output_tokens - 1) + one.output_tokens * (one.output_tokens - 1) / 2)
            for one in kept
        ]
        tokens = sum(one.output_tokens - 1 for one in kept)
        assert lengths.decode_context == pytest.approx(sum(contexts) / tokens, rel=0.01)
