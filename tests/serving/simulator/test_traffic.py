import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import NS
from serving.errors import ConfigError
from serving.simulator.spec import Finish
from serving.simulator.traffic import Traffic, parse_traffic

HOUR_NS = 3600 * NS
DAY_NS = 24 * HOUR_NS
MONDAY_NS = (20_454 + 4) * DAY_NS
"""The first Monday of 2026, whose first day, 20 454 days after the epoch, was a Thursday."""
SATURDAY_NS = MONDAY_NS + 5 * DAY_NS

PLAIN = Traffic(2.0)
FULL = Traffic(
    0.5,
    diurnal_ratio=0.7,
    weekend_ratio=0.4,
    bursts_per_day=24.0,
    burst_ratio=5.0,
    burst_seconds=400.0,
    growth_ratio_per_week=0.1,
    since_ns=MONDAY_NS,
    disconnect_share=0.1,
    shared_prefix_share=0.3,
    seed=7,
)


def count(traffic, start_ns, end_ns):
    return sum(1 for _ in traffic.arrivals(start_ns, end_ns))


def expected(traffic, start_ns, end_ns, pieces=1000):
    step_ns = (end_ns - start_ns) // pieces
    return sum(traffic.rate(start_ns + step_ns // 2 + i * step_ns) for i in range(pieces)) * step_ns / NS


class TestRate:
    def test_is_flat_unless_asked_otherwise(self):
        assert {PLAIN.rate(MONDAY_NS + hour * HOUR_NS) for hour in range(7 * 24)} == {2.0}

    def test_is_highest_at_the_peak_hour_and_lowest_twelve_hours_away(self):
        traffic = Traffic(2.0, diurnal_ratio=0.6, peak_hour=14.0)
        rates = [traffic.rate(MONDAY_NS + hour * HOUR_NS) for hour in range(24)]
        assert (rates.index(max(rates)), rates.index(min(rates))) == (14, 2)
        assert (max(rates), min(rates)) == (pytest.approx(3.2), pytest.approx(0.8))

    def test_of_a_working_day_averages_to_what_was_asked(self):
        traffic = Traffic(2.0, diurnal_ratio=0.9, peak_hour=3.3)
        assert expected(traffic, MONDAY_NS, MONDAY_NS + DAY_NS) == pytest.approx(2.0 * 86400)

    def test_falls_on_saturday_and_sunday_only(self):
        traffic = Traffic(2.0, weekend_ratio=0.25)
        assert [traffic.rate(MONDAY_NS + day * DAY_NS + HOUR_NS) for day in range(7)] == [2.0] * 5 + [0.5] * 2

    def test_grows_by_the_ratio_each_week(self):
        traffic = Traffic(2.0, growth_ratio_per_week=0.05, since_ns=MONDAY_NS)
        assert [traffic.rate(MONDAY_NS + week * 7 * DAY_NS) for week in (0, 1, 4)] == pytest.approx(
            [2.0, 2.1, 2 * 1.05**4]
        )

    def test_is_multiplied_in_bursts_for_about_the_time_asked(self):
        traffic = Traffic(1.0, bursts_per_day=4.0, burst_ratio=3.0, burst_seconds=600.0, seed=3)
        rates = [traffic.rate(MONDAY_NS + minute * 60 * NS) for minute in range(30 * 1440)]
        assert set(rates) == {1.0, 3.0}
        # 120 bursts of 10 minutes are awaited in 30 days, 11 more or fewer by chance.
        assert rates.count(3.0) / 10 == pytest.approx(120, abs=35)

    def test_a_burst_goes_on_over_midnight(self):
        traffic = Traffic(1.0, bursts_per_day=2.0, burst_ratio=2.0, burst_seconds=43_200.0, seed=1)
        rates = [traffic.rate(MONDAY_NS + minute * 60 * NS) for minute in range(20 * 1440)]
        lengths = [len(list(run)) for rate, run in itertools.groupby(rates) if rate == 2.0]
        assert min(lengths[1:-1]) >= 720
        assert any(rates[day * 1440 - 1] == rates[day * 1440] == 2.0 for day in range(1, 20))


class TestArrivals:
    def test_are_as_many_as_the_rate_says(self):
        found = count(PLAIN, MONDAY_NS, MONDAY_NS + 6 * HOUR_NS)
        assert found == pytest.approx(43_200, abs=4 * math.sqrt(43_200))

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_follow_day_week_growth_and_bursts(self, seed):
        traffic = replace(FULL, seed=seed)
        for start_ns, end_ns in itertools.pairwise(
            SATURDAY_NS - DAY_NS + quarter * DAY_NS // 4 for quarter in range(17)
        ):
            mean = expected(traffic, start_ns, end_ns)
            assert count(traffic, start_ns, end_ns) == pytest.approx(mean, abs=4.5 * math.sqrt(mean) + 5)

    def test_have_the_gaps_of_a_poisson_process(self):
        times = [arrival.t_ns / NS for arrival in PLAIN.arrivals(MONDAY_NS, MONDAY_NS + 6 * HOUR_NS)]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert deviation / mean == pytest.approx(1.0, abs=0.03)
        assert sum(gap > 2 * mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.01)

    @settings(max_examples=40, deadline=None)
    @given(
        cuts=st.lists(st.integers(0, 30 * 60 * NS), min_size=1, max_size=6),
        seed=st.integers(0, 5),
        offset=st.integers(0, DAY_NS),
    )
    def test_do_not_depend_on_how_time_is_cut(self, cuts, seed, offset):
        traffic = replace(FULL, seed=seed)
        start_ns = SATURDAY_NS - offset
        edges = [start_ns, *sorted(start_ns + cut for cut in cuts), start_ns + 30 * 60 * NS]
        pieces = [arrival for a, b in itertools.pairwise(edges) for arrival in traffic.arrivals(a, b)]
        assert pieces == list(traffic.arrivals(edges[0], edges[-1]))

    def test_come_in_order_with_ids_of_their_own(self):
        found = list(FULL.arrivals(MONDAY_NS, MONDAY_NS + DAY_NS))
        assert [arrival.t_ns for arrival in found] == sorted(arrival.t_ns for arrival in found)
        ids = [arrival.id for arrival in found]
        assert ids == sorted(set(ids))
        assert ids[0] > 2**40

    def test_the_same_seed_gives_the_same_and_another_seed_others(self):
        def found(seed):
            return list(replace(FULL, seed=seed).arrivals(MONDAY_NS, MONDAY_NS + HOUR_NS))

        assert found(1) == found(1)
        assert {arrival.t_ns for arrival in found(1)}.isdisjoint(arrival.t_ns for arrival in found(2))

    def test_none_come_where_the_rate_is_nothing(self):
        assert list(Traffic(0.0).arrivals(0, DAY_NS)) == []
        assert list(PLAIN.arrivals(MONDAY_NS, MONDAY_NS)) == []

    def test_lengths_have_the_mean_and_spread_asked_for(self):
        traffic = Traffic(5.0, prompt_tokens=800, output_tokens=150, prompt_spread=0.5, output_spread=0.8)
        found = list(traffic.arrivals(MONDAY_NS, MONDAY_NS + 3 * HOUR_NS))
        for lengths, mean, spread in (
            ([arrival.prompt_tokens for arrival in found], 800, 0.5),
            ([arrival.output_tokens for arrival in found], 150, 0.8),
        ):
            assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
            logs = [math.log(length) for length in lengths]
            centre = sum(logs) / len(logs)
            assert math.sqrt(sum((x - centre) ** 2 for x in logs) / len(logs)) == pytest.approx(spread, rel=0.03)

    def test_lengths_fit_the_context(self):
        traffic = Traffic(5.0, prompt_tokens=700, output_tokens=300, output_spread=1.0, context_tokens=1000)
        found = list(traffic.arrivals(MONDAY_NS, MONDAY_NS + HOUR_NS))
        assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in found) == 1000
        assert min(arrival.prompt_tokens for arrival in found) >= 1

    def test_the_share_asked_for_goes_away_somewhere_in_the_answer(self):
        stays = Traffic(5.0, output_spread=0.0, output_tokens=100)
        found = list(replace(stays, disconnect_share=0.2).arrivals(MONDAY_NS, MONDAY_NS + 3 * HOUR_NS))
        gone = [arrival.output_tokens for arrival in found if arrival.finish is Finish.CANCELLED]
        assert len(gone) / len(found) == pytest.approx(0.2, abs=0.01)
        assert (min(gone), max(gone), sum(gone) / len(gone)) == (1, 100, pytest.approx(50.5, abs=2))
        assert {arrival.output_tokens for arrival in found if arrival.finish is Finish.STOP} == {100}
        assert {arrival.finish for arrival in stays.arrivals(MONDAY_NS, MONDAY_NS + HOUR_NS)} == {Finish.STOP}

    def test_the_common_prefix_is_shared_and_nothing_else_is(self):
        traffic = replace(PLAIN, shared_prefix_share=0.5, shared_prefix_tokens=160)
        found = list(traffic.arrivals(MONDAY_NS, MONDAY_NS + HOUR_NS, block_tokens=16))
        hashed = [arrival for arrival in found if arrival.prefix]
        assert len(hashed) / len(found) == pytest.approx(0.5, abs=0.03)
        assert all(len(arrival.prefix) == arrival.prompt_tokens // 16 for arrival in hashed)
        assert {arrival.prefix[:10] for arrival in hashed if len(arrival.prefix) >= 10} == {tuple(range(1, 11))}
        rest = [content for arrival in hashed for content in arrival.prefix[10:]]
        assert len(set(rest)) == len(rest)
        assert not set(rest) & set(range(1, 11))


class TestParse:
    def test_a_rate_alone_is_enough(self):
        assert parse_traffic("2/s", since_ns=MONDAY_NS) == Traffic(2.0, since_ns=MONDAY_NS)

    @pytest.mark.parametrize(
        ("text", "rate"), [("120/min", 2.0), ("1800/h", 0.5), ("86400/day", 1.0), (" 0.5 / s ", 0.5)]
    )
    def test_rates_may_be_per_other_times(self, text, rate):
        assert parse_traffic(text, since_ns=0).per_second == pytest.approx(rate)

    def test_every_figure_has_a_key(self):
        text = (
            "3/s, prompt=800, output=100, prompt_spread=0.4, output_spread=0.5, context=8192, diurnal=60%, peak=9.5, "
            "weekend=0.3, bursts=4, burst-size=2.5, burst-seconds=120, growth=5%, disconnect=2%, prefix=0.5, "
            "prefix_tokens=512, seed=9"
        )
        assert parse_traffic(text, since_ns=5, seed=1) == Traffic(
            3.0,
            prompt_tokens=800.0,
            output_tokens=100.0,
            prompt_spread=0.4,
            output_spread=0.5,
            context_tokens=8192,
            diurnal_ratio=0.6,
            peak_hour=9.5,
            weekend_ratio=0.3,
            bursts_per_day=4.0,
            burst_ratio=2.5,
            burst_seconds=120.0,
            growth_ratio_per_week=0.05,
            since_ns=5,
            disconnect_share=0.02,
            shared_prefix_share=0.5,
            shared_prefix_tokens=512,
            seed=9,
        )

    def test_the_seed_is_the_callers_unless_the_text_has_one(self):
        assert parse_traffic("1/s", since_ns=0, seed=4).seed == 4

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "begin with a rate"),
            ("2", "begin with a rate"),
            ("prompt=5", "begin with a rate"),
            ("2/fortnight", "begin with a rate"),
            ("x/s", "no number"),
            ("nan/s", "no number"),
            ("-1/s", "per_second must be between"),
            ("2/s,prompt", "is none of"),
            ("2/s,colour=5", "is none of"),
            ("2/s,prompt=", "no number"),
            ("2/s,prompt=1_000", "no number"),
            ("2/s,prompt=inf", "no number"),
            ("2/s,prompt=0", "prompt_tokens must be at least 1"),
            ("2/s,prompt=5,prompt=6", "given twice"),
            ("2/s,diurnal=1.5", "diurnal_ratio must be between"),
            ("2/s,context=10.5", "whole number"),
            ("2/s,disconnect=120%", "disconnect_share must be between"),
            ("2/s,growth=-1", "growth_ratio_per_week must be between"),
            ("2/s,burst_seconds=1e6", "burst_seconds must be between"),
        ],
    )
    def test_nonsense_is_refused_and_named(self, text, says):
        with pytest.raises(ConfigError, match=says):
            parse_traffic(text, since_ns=0)

    def test_figures_that_are_no_numbers_are_refused_in_python_too(self):
        with pytest.raises(ConfigError, match="finite"):
            Traffic(math.nan)
