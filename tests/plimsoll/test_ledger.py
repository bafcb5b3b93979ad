"""The ledger keeps whole lines whatever happens, and says what is worse only when it is."""

import errno
import fcntl
import json
import os
import random
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.figures import Comparison, Figure, Judgement, compare, figure_of, theil_sen
from plimsoll.ledger import (
    Change,
    Conclusion,
    LedgerPage,
    Record,
    add_arguments,
    append,
    find,
    ledger_path,
    new_id,
    read_ledger,
    regress,
)
from plimsoll.ledger import run as run_ledger
from serving.clock import NS
from serving.errors import ConfigError, RecordError

T_NS = 1_750_000_000 * NS
DAY_NS = 86_400 * NS
TARGET = {"model": "hy3", "engine": "vllm", "url": "http://127.0.0.1:8000"}
LOAD = {"seed": 1, "prompt_tokens": 512}


def fig(value, spread=0.0):
    return Figure(value, value * (1 - spread), value * (1 + spread), 12)


def record(number=0, *, decode=50.0, spread=0.01, **changed):
    values = {
        "id": f"r{number:03}",
        "t_ns": T_NS + number * DAY_NS,
        "kind": "set",
        "conclusion": Conclusion.KEPT,
        "reason": "all checks passed",
        "by": "ann@host",
        "changes": (Change("max_batch_size", 4, 8),),
        "settings": {"max_batch_size": 8},
        "target": TARGET,
        "split": {"tensor_parallel_size": 8},
        "load": LOAD,
        "before": {"decode_tokens_per_second@8": fig(decode * 1.3, spread)},
        "after": {"decode_tokens_per_second@8": fig(decode, spread), "failures": fig(0.0)},
    }
    return Record(**(values | changed))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "hy3-serving.ledger.jsonl"


def filled(path, records):
    for item in records:
        append(path, item)
    return read_ledger(path)


@pytest.fixture
def command(capsys):
    """Run `plimsoll ledger ... --json`: exit code and document."""
    import argparse

    def start(*words):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        code = run_ledger(parser.parse_args([*map(str, words), "--json"]))
        return code, json.loads(capsys.readouterr().out)

    return start


# ---- the file


def test_a_ledger_lies_beside_its_settings(tmp_path):
    assert ledger_path(tmp_path / "hy3-serving.yaml") == tmp_path / "hy3-serving.ledger.jsonl"
    assert ledger_path(tmp_path / "x.ledger.jsonl") == tmp_path / "x.ledger.jsonl"


def test_what_is_written_is_what_is_read(path):
    written = record(3, warnings=("swap grew",), startup={"max_batch_size": 8}, detail={"quality": {"drift": 0.1}})
    page = filled(path, [written])
    assert page.records == (replace(written, line=1),)
    assert page.notes == ()


def test_a_record_is_one_line_with_its_schema(path):
    append(path, record())
    append(path, record(1))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["schema"] for line in lines] == ["plimsoll.ledger/1"] * 2


def test_fields_of_a_newer_plimsoll_survive_and_are_shown(path, command):
    document = record().document() | {"schema": "plimsoll.ledger/2", "watts": 700}
    path.write_text(json.dumps(document) + "\n")
    assert read_ledger(path).records[0].extra == {"watts": 700}
    _, shown = command("show", path, "last")
    assert shown["records"][0]["watts"] == 700


def test_a_line_cut_off_by_a_crash_costs_only_itself(path):
    append(path, record(0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    page = read_ledger(path)
    assert [item.id for item in page.records] == ["r000"]
    assert page.notes == (f"{path}:2: cut off in the middle, by a crash or a full disk",)
    append(path, record(1))
    page = read_ledger(path)
    assert [item.id for item in page.records] == ["r000", "r001"]
    assert page.notes == (f"{path}:2: not a record; passed over",)


@given(st.integers(min_value=0))
@settings(max_examples=30, deadline=None)
def test_a_ledger_cut_anywhere_gives_the_records_before_the_cut_and_takes_new_ones(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "a.ledger.jsonl"
    filled(path, [record(0), record(1)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    cut %= len(whole)
    path.write_bytes(whole[:cut])
    append(path, record(2))
    found = [item.id for item in read_ledger(path).records]
    # Cut just before its line feed a record is still whole.
    assert found == (["r000"] if cut >= first - 1 else []) + (["r001"] if cut == len(whole) - 1 else []) + ["r002"]


def test_many_writers_at_once_lose_no_record(path):
    def write(writer):
        for turn in range(20):
            append(path, record(writer * 100 + turn))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    page = read_ledger(path)
    assert len({item.id for item in page.records}) == 120
    assert page.notes == ()


def test_a_writer_waits_for_the_one_before_it(path):
    append(path, record(0))
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=append, args=(path, record(1)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(10)
    assert len(read_ledger(path).records) == 2


def test_a_write_that_was_cut_short_is_taken_back(path, monkeypatch):
    append(path, record(0))
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(RecordError, match="only 10 of"):
        append(path, record(1))
    assert path.read_bytes() == before


def test_a_full_disk_is_an_error_and_not_a_traceback(path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match="No space left"):
        append(path, record(1))


def test_a_figure_that_is_no_number_is_refused(path):
    with pytest.raises(RecordError, match="finite"):
        append(path, record(after={"failures": fig(float("nan"))}))
    assert not path.exists()


def test_a_line_that_a_merge_brought_twice_is_one_record(path):
    append(path, record(0))
    path.write_bytes(path.read_bytes() * 2)
    assert len(read_ledger(path).records) == 1


@pytest.mark.parametrize(
    "content", [b"\x00\xff\x00", b"max_batch_size: 8\n", b"[1, 2]\n", b'{"schema": 5}\n', b"[" * 100_000], ids=repr
)
def test_what_is_no_ledger_is_refused(tmp_path, content):
    path = tmp_path / "no.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no line of it is a record"):
        read_ledger(path)


def test_a_folder_is_no_ledger(tmp_path):
    with pytest.raises(ConfigError, match="not a regular file"):
        read_ledger(tmp_path)


def test_nonsense_in_known_fields_is_passed_over(path):
    document = record().document() | {
        "figures": {"after": {"failures": {"value": "many"}, "ttft_seconds@1": 7}},
        "changes": ["x"],
        "settings": [],
        "warnings": None,
        "conclusion": 3,
    }
    path.write_text(json.dumps(document) + "\n")
    read = read_ledger(path).records[0]
    assert (read.after, read.changes, read.settings, read.warnings) == ({}, (), {}, ())


def test_ids_sort_by_time_and_differ():
    ids = [new_id(T_NS + turn * NS) for turn in range(5)]
    assert ids == sorted(ids)
    assert new_id(T_NS) != new_id(T_NS)


# ---- names of records


@pytest.mark.parametrize(("name", "found"), [("1", "r000"), ("3", "r002"), ("last", "r002"), ("r001", "r001")])
def test_a_record_is_found_by_number_id_or_last(path, name, found):
    assert find(filled(path, map(record, range(3))), name).id == found


@pytest.mark.parametrize(
    ("name", "message"), [("0", "has 1 to 3"), ("4", "has 1 to 3"), ("r00", "more than one"), ("zz", "no record")]
)
def test_a_name_that_is_not_one_record_is_refused(path, name, message):
    with pytest.raises(ConfigError, match=message):
        find(filled(path, map(record, range(3))), name)


# ---- regress


def test_a_slower_record_is_worse_than_the_best_comparable_one(path):
    page = filled(path, [record(0, decode=60.0), record(1, decode=50.0), record(2, decode=52.0)])
    found = regress(page)
    assert (found.verdict, found.baseline.id) == ("fail", "r000")
    assert found.reason == "decode at 8 got worse: 60 -> 52 (-13.3%)"


def test_a_record_within_what_is_allowed_passes(path):
    assert regress(filled(path, [record(0, decode=51.0), record(1, decode=50.0)])).verdict == "pass"


def test_rounds_that_overlap_are_no_difference(path):
    page = filled(path, [record(0, decode=60.0, spread=0.2), record(1, decode=50.0, spread=0.2)])
    assert regress(page).verdict == "pass"


def test_one_more_failure_is_worse_whatever_is_allowed(path):
    failing = {"decode_tokens_per_second@8": fig(50.0), "failures": fig(1.0)}
    found = regress(filled(path, [record(0), record(1, after=failing)]), allowed_ratio=5.0)
    assert (found.verdict, found.reason) == ("fail", "failures got worse: 0 -> 1")


@pytest.mark.parametrize(
    "other",
    [
        {"target": TARGET | {"model": "else"}},
        {"target": TARGET | {"engine": "sglang"}},
        {"split": {"tensor_parallel_size": 4}},
        {"load": LOAD | {"seed": 2}},
        {"settings": {"max_batch_size": 8, "kv_cache_dtype": "fp8"}},
        {"settings": {"max_batch_size": 8, "quantization": "int4"}},
        {"kind": "sweep", "conclusion": Conclusion.MEASURED},
    ],
    ids=lambda other: str(next(iter(other))),
)
def test_records_that_do_not_compare_are_no_baseline(path, other):
    found = regress(filled(path, [record(0, decode=90.0, **other), record(1)]))
    assert (found.verdict, found.baseline) == ("inconclusive", None)


def test_a_batch_size_that_differs_still_compares(path):
    found = regress(filled(path, [record(0, decode=90.0, settings={"max_batch_size": 32}), record(1)]))
    assert found.verdict == "fail"


def test_of_a_rolled_back_change_the_figures_before_count(path):
    rolled = record(1, decode=10.0, conclusion=Conclusion.ROLLED_BACK)
    assert rolled.served() == ({"max_batch_size": 4}, {"decode_tokens_per_second@8": fig(13.0, 0.01)})
    page = filled(path, [record(0, decode=14.0), rolled])
    assert regress(page).comparisons[0].after.value == 13.0


def test_a_rolled_back_change_of_precision_compares_with_the_old_precision(path):
    rolled = record(
        1,
        conclusion=Conclusion.ROLLED_BACK,
        changes=(Change("kv_cache_dtype", None, "fp8"),),
        settings={"max_batch_size": 8, "kv_cache_dtype": "fp8"},
    )
    assert regress(filled(path, [record(0), rolled])).baseline.id == "r000"


def test_a_ledger_without_figures_cannot_be_judged(path):
    with pytest.raises(ConfigError, match="no record with figures"):
        regress(filled(path, [record(before={}, after={})]))


def decline(path, per_day, *, count=16, noise=0.01, seed=1, spread=0.3):
    rng = random.Random(seed)
    values = [100.0 * (1 + per_day * day) * (1 + rng.gauss(0, noise)) for day in range(count)]
    # Rounds as wide as these let no single pair differ: only many records together can show it.
    return regress(filled(path, [record(day, decode=value, spread=spread) for day, value in enumerate(values)]))


def test_slow_decline_over_many_records_is_flagged(path):
    found = decline(path, -0.005)
    assert [item.flagged for item in found.declines] == [True]
    assert found.verdict == "fail"
    assert -0.10 < found.declines[0].change_ratio < -0.05
    assert "over 15.0 days and 16 records" in found.reason


def test_decline_survives_wild_records(path):
    rng = random.Random(5)
    values = [100.0 * (1 - 0.005 * day) + rng.gauss(0, 0.5) for day in range(20)]
    values[4], values[11], values[15] = 5.0, 300.0, 250.0
    page = filled(path, [record(day, decode=value, spread=0.9) for day, value in enumerate(values)])
    assert [item.flagged for item in regress(page).declines] == [True]


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_no_decline(path, seed):
    found = decline(path, 0.0, seed=seed, noise=0.02)
    assert [item.flagged for item in found.declines] == [False]


def test_growth_is_no_decline(path):
    assert [item.flagged for item in decline(path, +0.005).declines] == [False]


def test_too_few_records_for_a_trend_are_said(path):
    found = decline(path, -0.02, count=7)
    assert found.declines == ()
    assert found.notes == ("slow decline is judged from 8 comparable records on; there are 7",)


# ---- figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=30, unique=True), st.floats(-100, 100), st.floats(-1e3, 1e3))
def test_a_straight_line_has_its_own_slope(xs, slope, level):
    if min(b - a for a, b in zip(sorted(xs), sorted(xs)[1:], strict=False)) < 1e-3:
        return
    trend = theil_sen([(x, level + slope * x) for x in sorted(xs)])
    assert trend.slope == pytest.approx(slope, abs=1e-3, rel=1e-3)
    assert trend.low <= trend.slope <= trend.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = random.Random(3)
    held = 0
    for _ in range(300):
        trend = theil_sen([(x, 0.1 * x + rng.gauss(0, 1)) for x in range(12)], confidence=0.95)
        held += trend.low <= 0.1 <= trend.high
    assert held >= 300 * 0.92


def test_points_of_one_moment_have_no_trend():
    assert theil_sen([(1.0, 2.0), (1.0, 3.0)]) is None
    assert theil_sen([]) is None


def test_equal_values_have_no_slope():
    trend = theil_sen([(x, 5.0) for x in range(10)])
    assert (trend.slope, trend.low, trend.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "before", "after", "judgement"),
    [
        ("decode_tokens_per_second@1", 100, 89, Judgement.WORSE),
        ("decode_tokens_per_second@1", 100, 91, Judgement.SAME),
        ("decode_tokens_per_second@1", 100, 115, Judgement.BETTER),
        ("ttft_seconds@1", 1.0, 1.2, Judgement.WORSE),
        ("ttft_seconds@1", 1.0, 0.5, Judgement.BETTER),
        ("failures", 0, 1, Judgement.WORSE),
        ("failures", 2, 1, Judgement.BETTER),
        ("gpu_memory_peak_bytes", 100, 120, Judgement.WORSE),
    ],
)
def test_each_figure_knows_which_way_is_worse(name, before, after, judgement):
    found = compare({name: fig(before)}, {name: fig(after)}, allowed_ratio=0.1)
    assert [item.judgement for item in found] == [judgement]
    assert found[0].judged is not name.startswith("gpu_memory")


def test_a_few_milliseconds_to_the_first_token_are_no_difference_nor_is_the_prefill_speed_from_them():
    def state(ttft):
        return {"ttft_seconds@1": fig(ttft), "prefill_tokens_per_second@1": fig(100 / ttft)}

    quick = compare(state(0.006), state(0.009), allowed_ratio=0.1)
    slow = compare(state(0.06), state(0.09), allowed_ratio=0.1)
    assert {item.judgement for item in quick} == {Judgement.SAME}
    assert {item.judgement for item in slow} == {Judgement.WORSE}


def test_figures_that_one_side_lacks_are_not_compared():
    assert compare({"ttft_seconds@1": fig(1)}, {"ttft_seconds@8": fig(1)}, allowed_ratio=0.1) == []
    assert compare({"unheard_of": fig(1)}, {"unheard_of": fig(2)}, allowed_ratio=0.1) == []


def test_a_baseline_of_zero_has_no_ratio():
    found = compare({"failures": fig(0)}, {"failures": fig(2)}, allowed_ratio=0.1)
    assert isinstance(found[0], Comparison)
    assert found[0].change_ratio is None


def test_a_figure_is_the_median_of_its_rounds():
    assert figure_of([3.0, 1.0, 2.0], 30) == Figure(2.0, 1.0, 3.0, 30)
    assert figure_of([]) is None


# ---- the command


def test_show_gives_the_last_records_as_one_document(path, command):
    filled(path, map(record, range(5)))
    code, shown = command("show", path, "--last", "2")
    assert (code, [item["number"] for item in shown["records"]]) == (0, [4, 5])


def test_show_says_which_line_is_torn(path, command):
    filled(path, [record()])
    with path.open("ab") as file:
        file.write(b'{"schema": "plimsoll.led')
    assert "cut off" in command("show", path)[1]["notes"][0]


def test_add_by_hand_keeps_what_was_said(tmp_path, command):
    (tmp_path / "s.yaml").write_text("max_batch_size: 8\n")
    command(
        *("add", tmp_path / "s.yaml", "--note", "new driver", "--by", "ann", "--changed", "driver=570:580"),
        *("--figure", "decode_tokens_per_second@1=52.1"),
    )
    added = read_ledger(tmp_path / "s.ledger.jsonl").records[0]
    assert (added.reason, added.by, added.kind) == ("new driver", "ann", "by hand")
    assert added.changes == (Change("driver", "570", "580"),)
    assert added.after == {"decode_tokens_per_second@1": Figure(52.1, 52.1, 52.1)}


@pytest.mark.parametrize("text", ["speed=3", "decode_tokens_per_second@1", "failures=many", "failures=nan"])
def test_add_refuses_figures_nobody_knows(path, command, text):
    filled(path, [record()])
    with pytest.raises(ConfigError, match="--figure"):
        command("add", path, "--note", "x", "--figure", text)


def test_add_takes_the_figures_of_the_largest_stage_that_held(path, tmp_path, command):
    stages = [
        {"offered": offered, "held": held, "decode_tokens_per_second": 100.0 / offered, "ttft_seconds": {"p50": None}}
        for offered, held in ((2, True), (4, True), (8, False))
    ]
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"schema": "plimsoll.stress/1", "stages": stages, "target": TARGET, "run": "a.db"}))
    filled(path, [record()])
    command("add", path, "--note", "stress", "--run", run)
    assert read_ledger(path).records[1].after == {"decode_tokens_per_second@4": Figure(25.0, 25.0, 25.0)}


@pytest.mark.parametrize("content", ["", "{}", "\x00", '{"schema": "plimsoll.stress/1", "stages": []}'], ids=repr)
def test_add_refuses_what_is_no_run(path, tmp_path, command, content):
    (tmp_path / "run.json").write_text(content)
    filled(path, [record()])
    with pytest.raises(ConfigError, match="--run"):
        command("add", path, "--note", "x", "--run", tmp_path / "run.json")


def test_diff_gives_settings_and_figures_that_differ(path, command):
    other = record(1, decode=60.0, settings={"max_batch_size": 16}, startup={"max_batch_size": 16})
    filled(path, [record(0), other])
    _, document = command("diff", path, "1", "2")
    assert document["settings"] == [{"key": "max_batch_size", "first": 8, "second": 16}]
    assert document["startup"] == [{"key": "max_batch_size", "first": None, "second": 16}]
    assert document["figures"][0]["change_ratio"] == pytest.approx(0.2)
    assert document["comparable"] is True


@pytest.mark.parametrize(("decodes", "code"), [((60, 50), 1), ((50, 50), 0), ((50,), 3)])
def test_regress_has_the_exit_codes_of_the_contract(path, command, decodes, code):
    filled(path, [record(number, decode=decode) for number, decode in enumerate(decodes)])
    assert command("regress", path)[0] == code


def test_a_settings_file_that_is_not_there_is_the_callers_mistake(tmp_path, command):
    with pytest.raises(ConfigError, match="no such file"):
        command("show", tmp_path / "no.yaml")


def test_people_get_tables(path, capsys):
    import argparse

    filled(path, [record(0, decode=60.0), record(1)])
    for words in (["show", path], ["show", path, "last"], ["diff", path, "1", "2"], ["regress", path]):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        run_ledger(parser.parse_args([*map(str, words)]))
    shown = capsys.readouterr().out
    assert "rolled back" not in shown
    assert "all checks" in shown
    assert "decode at 8 got worse" in shown


def test_the_ledger_is_light_to_import():
    import subprocess
    import sys

    code = "import plimsoll.ledger, sys; print({'numpy', 'locust', 'gevent', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def noisy(path, rng, levels, noise, rounds=3):
    """A ledger whose records are rounds of normal noise about these levels."""
    records = []
    for day, level in enumerate(levels):
        values = sorted(level * (1 + rng.gauss(0, noise)) for _ in range(rounds))
        base = record(day, decode=values[1])
        figure = Figure(values[1], values[0], values[-1], rounds)
        named = {f"decode_tokens_per_second@{level}": figure for level in (1, 8)}
        records.append(replace(base, after=named, line=day + 1))
    return LedgerPage(path, tuple(records))


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("count", [2, 10, 30])
def test_noise_alone_is_hardly_ever_called_a_regression(path, noise, count):
    verdicts = [regress(noisy(path, random.Random(seed), [50.0] * count, noise)).verdict for seed in range(200)]
    assert verdicts.count("fail") <= 4


@pytest.mark.parametrize("levels", [[50.0] * 9 + [42.5], [50.0 * (1 - 0.1 * day / 29) for day in range(30)]])
def test_a_jump_and_a_slow_decline_are_found_through_that_noise(path, levels):
    verdicts = [regress(noisy(path, random.Random(seed), levels, 0.02)).verdict for seed in range(100)]
    assert verdicts.count("fail") >= 97


def test_with_few_records_it_is_said_that_their_own_scatter_is_unknown(path):
    page = noisy(path, random.Random(1), [50.0] * 3, 0.01)
    assert any("how much records differ by themselves" in note for note in regress(page).notes)
    page = noisy(path, random.Random(1), [50.0] * 9, 0.01)
    assert not any("differ by themselves" in note for note in regress(page).notes)


@pytest.mark.parametrize(
    ("part", "is_kept"),
    [
        ('"settings": {"a": NaN}', False),
        ('"detail": {"a": -Infinity}', False),
        ('"later": 1e999', False),
        (
            f'"figures": {{"after": {{"decode_tokens_per_second@1": {{"value": 1{"0" * 400}, "low": 1, "high": 1}}}}}}',
            True,
        ),
    ],
)
def test_numbers_that_json_or_a_float_cannot_hold_spoil_no_answer(path, command, part, is_kept):
    append(path, record(0))
    with path.open("a") as ledger:
        ledger.write(f'{{"schema": "plimsoll.ledger/1", "id": "odd", "t_ns": {T_NS}, {part}}}\n')
    append(path, record(1))
    for words in (["show"], ["regress"]):
        code, document = command(*words, str(path))
        assert code in (0, 1, 3)
        json.dumps(document, allow_nan=False)
    assert ("odd" in [item.id for item in read_ledger(path).records]) is is_kept


@pytest.mark.parametrize(
    ("low", "judgement"), [(0.205, Judgement.SAME), (0.2101, Judgement.WORSE), (0.195, Judgement.SAME)]
)
def test_times_that_rise_are_worse_only_when_their_rounds_lie_apart(low, judgement):
    before = {"ttft_seconds@8": Figure(0.2, 0.19, 0.21, 3)}
    after = {"ttft_seconds@8": Figure(0.25, low, 0.26, 3)}
    assert [item.judgement for item in compare(before, after, allowed_ratio=0.05)] == [judgement]
