"""The engine tables read what each recorded release really exposes, and probing says what is wrong with the rest."""

import json
import math
import re
from pathlib import Path

import pytest

from serving.conversation import HttpAnswer, converse
from serving.engines import (
    ENGINES,
    Complaint,
    Reading,
    ScrapeFailure,
    Source,
    TargetFacts,
    probe,
    scrape,
)
from serving.errors import TargetError
from serving.exposition import Histogram, parse
from serving.signals import SIGNALS, Kind, Scope
from serving.startup import logged_limits

SAMPLES = Path(__file__).parent.parent / "samples"
VLLM, SGLANG, LLAMACPP = ENGINES["vllm"], ENGINES["sglang"], ENGINES["llamacpp"]
NOT_FOUND = HttpAnswer(404, {"content-type": "application/json"}, b'{"detail":"Not Found"}', 0.001)


def recorded(name):
    """A captured answer: whole HTTP where headers were kept, else its body alone."""
    data = (SAMPLES / name).read_bytes()
    if not data.startswith(b"HTTP/"):
        return HttpAnswer(200, {}, data, 0.01)
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return HttpAnswer(int(status.split()[1]), headers, body, 0.01)


def page(body, status=200, **headers):
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return HttpAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, data, 0.01)


def server(**pages):
    """Answers by path (`_` for `/`); what is not there is 404. `asked` collects the paths."""
    table = {"/" + path.removeprefix("root").replace("__", "/"): answer for path, answer in pages.items()}

    def answer(request):
        answer.asked.append(request.path)
        return table.get(request.path, NOT_FOUND)

    answer.asked = []
    return answer


def llamacpp_server(**changes):
    pages = {
        "v1__models": recorded("llamacpp/b11434/models.txt"),
        "metrics": recorded("llamacpp/b11434/metrics_idle.txt"),
        "props": recorded("llamacpp/b11434/get_props.txt"),
        "slots": recorded("llamacpp/b11434/get_slots.txt"),
    }
    return server(**{**pages, **changes})


def vllm_server(**changes):
    pages = {
        "v1__models": recorded("vllm/models.txt"),
        "metrics": recorded("vllm/metrics_idle.txt"),
        "version": recorded("vllm/get_version.txt"),
    }
    return server(**{**pages, **changes})


def sglang_server(**changes):
    pages = {
        "v1__models": page({"data": [{"id": "glm", "owned_by": "sglang", "max_model_len": 131072}]}),
        "metrics": recorded("sglang/metrics_0.5.23_composed.txt"),
        "server_info": recorded("sglang/server_info_0.5.23_composed.json"),
    }
    return server(**{**pages, **changes})


# The tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_tables_speak_of_known_target_signals_only(engine):
    assert {SIGNALS[name].scope for name in engine.sources} == {Scope.TARGET}
    assert engine.side_page is None or {SIGNALS[name].scope for name in engine.side_page.signals} == {Scope.TARGET}
    for name, sources in engine.sources.items():
        for source in sources:
            assert SIGNALS[name].kind is Kind.COUNTER or not source.at_finish
            assert SIGNALS[name].kind is not Kind.HISTOGRAM or len(source.names) == 1


def test_no_other_module_asks_which_engine_it_talks_to():
    root = Path(__file__).parent.parent.parent
    code = [
        path
        for package in ("serving", "monitor", "loadgen", "alerts", "plimsoll")
        for path in (root / package).rglob("*.py")
    ]
    own = root / "serving" / "engines"
    asking = re.compile(r"""\bengine(?:\.name|_name)?\s*(?:==|!=)\s*["']""")
    assert [str(path) for path in code if own not in path.parents and asking.search(path.read_text())] == []


def test_every_source_is_documented():
    text = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    missing = [
        (engine.name, signal, name)
        for engine in ENGINES.values()
        for signal, sources in engine.sources.items()
        for source in sources
        for name in source.names
        if not any(row.startswith(f"| `{signal}`") and name in row for row in rows)
    ]
    assert missing == []


# What each release yields ---------------------------------------------------------------------------------------------

LLAMACPP_SOURCES = {
    "requests_running": "llamacpp:requests_processing",
    "requests_waiting": "llamacpp:requests_deferred",
    "prompt_tokens_total": "llamacpp:prompt_tokens_total+llamacpp:prompt_tokens_cached_total",
    "prompt_tokens_cached_total": "llamacpp:prompt_tokens_cached_total",
    "generation_tokens_total": "llamacpp:tokens_predicted_total",
    "engine_progress_total": "llamacpp:n_decode_total",
}
VLLM_SOURCES = {
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "kv_cache_capacity_tokens": "vllm:cache_config_info[kv_cache_size_tokens]",
    "request_preemptions_total": "vllm:num_preemptions_total",
    "prompt_tokens_total": "vllm:prompt_tokens_total",
    "prompt_tokens_cached_total": "vllm:prompt_tokens_cached_total",
    "generation_tokens_total": "vllm:generation_tokens_total",
    "requests_finished_total": "vllm:request_success_total",
    "request_errors_total": "vllm:request_success_total{finished_reason=error}",
    "engine_progress_total": "vllm:iteration_tokens_total_count",
    "engine_start_timestamp_seconds": "process_start_time_seconds",
}
VLLM_HISTOGRAM_SOURCES = {
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "request_queue_seconds": "vllm:request_queue_time_seconds",
}


def in_order(names, values):
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("sample", "values"),
    [
        ("llamacpp/metrics_idle_b10434.txt", [0, 0, 0, 0, 0, 0]),
        ("llamacpp/metrics_idle_xllamacpp_b11549.txt", [0, 0, 0, 0, 0, 0]),
        ("llamacpp/metrics_under_load.txt", [4, 6, 501, 22, 448, 128]),
        ("llamacpp/metrics_under_load_http64.txt", [4, 12, 494, 12, 256, 126]),
        ("llamacpp/metrics_after_load.txt", [0, 0, 1967, 98, 2048, 513]),
        ("llamacpp/b11434/metrics_idle.txt", [0, 0, 0, 0, 0, 0]),
        ("llamacpp/b11434/metrics_under_load.txt", [8, 40, 2694, 187, 5518, 2849]),
    ],
)
def test_llamacpp_releases_yield_exactly(sample, values):
    reading = LLAMACPP.read(parse(recorded(sample).body))
    assert reading.values == in_order(LLAMACPP_SOURCES, values)
    assert reading.sources == LLAMACPP_SOURCES
    assert reading.histograms == {}
    assert reading.at_finish == {"generation_tokens_total"}
    assert reading.bad_lines == 0


@pytest.mark.parametrize(
    ("sample", "values", "counts"),
    [
        ("vllm/metrics_idle.txt", [0, 0, 0, 2097152, 0, 143, 0, 548, 16, 0, 545, 1795966798.69], [16, 532, 16, 16]),
        (
            "vllm/metrics_under_load.txt",
            [0, 0, 0, 2097152, 0, 4096, 0, 6433, 80, 0, 1314, 1795966798.69],
            [80, 6353, 80, 80],
        ),
        (
            "vllm/metrics_after_load.txt",
            [0, 0, 0, 2097152, 0, 4066, 0, 6024, 75, 0, 1197, 1795965046.26],
            [75, 5949, 75, 75],
        ),
        (
            "vllm/metrics_kv_pressure.txt",
            [3, 9, 28 / 33, 1088, 21, 861, 0, 3275, 8, 0, 722, 1795966072.63],
            [14, 3261, 8, 8],
        ),
    ],
)
def test_vllm_0_32_yields_exactly(sample, values, counts):
    reading = VLLM.read(parse(recorded(sample).body))
    assert reading.values == in_order(VLLM_SOURCES, values)
    assert reading.sources == VLLM_SOURCES | VLLM_HISTOGRAM_SOURCES
    assert {name: histogram.count for name, histogram in reading.histograms.items()} == in_order(
        VLLM_HISTOGRAM_SOURCES, counts
    )
    assert reading.at_finish == frozenset()
    assert not any(map(reading.is_proxy, reading.sources))


def test_sglang_0_5_23_yields_exactly():
    reading = SGLANG.read(parse(recorded("sglang/metrics_0.5.23_composed.txt").body))
    assert reading.values == {
        "requests_running": 21.0,
        "requests_waiting": 4.0,
        "kv_cache_usage_ratio": 0.87,
        "kv_cache_capacity_tokens": 1_000_000.0,
        "request_preemptions_total": 6.0,
        "prompt_tokens_total": 3300.0,
        "prompt_tokens_cached_total": 300.0,
        "generation_tokens_total": 1100.0,
        "requests_finished_total": 42.0,
        "request_errors_total": 0.0,
        "engine_progress_total": 4400.0,
        "config_context_tokens": 131072.0,
    }
    assert reading.histograms == {
        "time_to_first_token_seconds": Histogram((0.1, 1.0, math.inf), (10.0, 39.0, 42.0), 12.5),
        "request_queue_seconds": Histogram((0.1, 1.0, math.inf), (9.0, 13.0, 15.0), 4.0),
    }
    assert reading.sources["generation_tokens_total"] == "sglang:realtime_tokens_total{mode=decode}"
    assert reading.sources["prompt_tokens_total"] == "sglang:realtime_tokens_total{mode=prefill_compute|prefill_cache}"
    assert reading.at_finish == frozenset()
    assert [name for name in reading.sources if reading.is_proxy(name)] == ["engine_progress_total"]


def test_sglang_0_4_9_yields_exactly():
    reading = SGLANG.read(parse(recorded("sglang/metrics_0.4.9_composed.txt").body))
    assert reading.values == {
        "requests_running": 5.0,
        "requests_waiting": 2.0,
        "kv_cache_usage_ratio": 0.25,
        "request_preemptions_total": 1.0,
        "prompt_tokens_total": 2500.0,
        "prompt_tokens_cached_total": 400.0,
        "generation_tokens_total": 950.0,
        "requests_finished_total": 40.0,
    }
    assert list(reading.histograms) == ["time_to_first_token_seconds"]
    assert reading.at_finish == {"prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"}


@pytest.mark.parametrize(
    ("engine", "text", "signal", "value", "source"),
    [
        (
            VLLM,
            'vllm:gpu_cache_usage_perc{model_name="m"} 0.5',
            "kv_cache_usage_ratio",
            0.5,
            "vllm:gpu_cache_usage_perc",
        ),
        (
            VLLM,
            'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.7',
            "kv_cache_usage_ratio",
            0.7,
            "vllm:kv_cache_usage_perc",
        ),
        (
            VLLM,
            'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3',
            "requests_running",
            5.0,
            "vllm:num_requests_running",
        ),
        (
            VLLM,
            'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_running{engine="1"} 3',
            "requests_running",
            3.0,
            "vllm:num_requests_running",
        ),
        (VLLM, 'vllm:num_requests_running{engine="0"} NaN', "requests_running", None, None),
        (
            VLLM,
            (
                'vllm:cache_config_info{engine="0",kv_cache_size_tokens="None",num_gpu_blocks="100",block_size="16"} 1\n'
                'vllm:cache_config_info{engine="1",kv_cache_size_tokens="None",num_gpu_blocks="100",block_size="16"} 1'
            ),
            "kv_cache_capacity_tokens",
            1600.0,
            "proxy:vllm:cache_config_info[num_gpu_blocks*block_size]",
        ),
        (
            VLLM,
            'vllm:cache_config_info{engine="0",kv_cache_size_tokens="800"} 1\nvllm:cache_config_info{engine="1",kv_cache_size_tokens="800"} 1',
            "kv_cache_capacity_tokens",
            1600.0,
            "vllm:cache_config_info[kv_cache_size_tokens]",
        ),
        (
            VLLM,
            'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1',
            "kv_cache_capacity_tokens",
            None,
            None,
        ),
        (VLLM, 'vllm:request_success_total{finished_reason="stop"} 3', "request_errors_total", None, None),
        (
            VLLM,
            'vllm:request_success_total{finished_reason="stop"} 3\nhttp_requests_total{handler="/v1/completions",status="2xx"} 3',
            "request_errors_total",
            0.0,
            "http_requests_total{status=5xx,handler=/v1/chat/completions|/v1/completions}",
        ),
        (
            VLLM,
            "vllm:generation_tokens_created 1.7e9",
            "engine_start_timestamp_seconds",
            1.7e9,
            "proxy:vllm:generation_tokens_created",
        ),
        (SGLANG, "sglang:full_token_usage 0.5", "kv_cache_usage_ratio", 0.5, "sglang:full_token_usage"),
        (
            SGLANG,
            'sglang:http_responses_total{endpoint="/generate",status_code="500"} 2\nsglang:http_responses_total{endpoint="/health",status_code="503"} 7',
            "request_errors_total",
            2.0,
            "sglang:http_responses_total{status_code=500|502|503|504,endpoint=/v1/chat/completions|/v1/completions|/generate}",
        ),
        (LLAMACPP, "llamacpp:prompt_tokens_total 7", "prompt_tokens_total", 7.0, "llamacpp:prompt_tokens_total"),
        (LLAMACPP, "llamacpp:kv_cache_usage_ratio 0.3", "kv_cache_usage_ratio", 0.3, "llamacpp:kv_cache_usage_ratio"),
    ],
)
def test_aliases_ranks_and_absences(engine, text, signal, value, source):
    reading = engine.read(parse(text))
    assert reading.values.get(signal) == value
    assert reading.sources.get(signal) == source


def test_a_renamed_histogram_is_the_same_signal():
    reading = VLLM.read(parse('vllm:time_per_output_token_seconds_bucket{le="+Inf"} 3'))
    assert reading.histograms["inter_token_latency_seconds"].count == 3.0
    assert reading.sources["inter_token_latency_seconds"] == "vllm:time_per_output_token_seconds"


def test_a_source_scales_and_adds_only_when_all_its_names_are_there():
    engine = type(VLLM)(name="x", sources={"requests_running": (Source(("a", "b"), scale=0.5),)}, dialect=VLLM.dialect)
    assert engine.read(parse("a 3\nb 5")).values == {"requests_running": 4.0}
    assert engine.read(parse("a 3")).values == {}


# Scraping -------------------------------------------------------------------------------------------------------------


def test_scraping_vllm_takes_one_request():
    answer = vllm_server()
    reading = converse(scrape(VLLM), answer)
    assert answer.asked == ["/metrics"]
    assert reading.values["kv_cache_capacity_tokens"] == 2097152
    assert reading.seconds == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("slots", "held", "count"),
    [
        ("llamacpp/slots_under_load.json", 69 + 70 + 69 + 71, 4),
        ("llamacpp/b11434/slots_under_load.json", 132 + 107 + 131 + 81 + 82 + 79 + 121 + 73, 8),
        ("llamacpp/b11434/get_slots.txt", 0, 8),
    ],
)
def test_llamacpp_kv_use_comes_from_the_slots_page_as_a_proxy(slots, held, count):
    answer = llamacpp_server(metrics=recorded("llamacpp/metrics_under_load.txt"), slots=recorded(slots))
    reading = converse(scrape(LLAMACPP), answer)
    assert answer.asked == ["/metrics", "/slots"]
    assert reading.values["kv_cache_usage_ratio"] == held / (count * 2048)
    assert reading.is_proxy("kv_cache_usage_ratio")
    assert "assuming that slots do not share" in reading.sources["kv_cache_usage_ratio"]
    assert reading.values["config_max_running_requests"] == count
    assert reading.values["config_context_tokens"] == 2048
    assert reading.values["requests_running"] == 4.0
    assert reading.seconds == pytest.approx(0.02)


def test_a_known_capacity_replaces_the_assumption_about_slots():
    answer = llamacpp_server(slots=recorded("llamacpp/slots_under_load.json"))
    reading = converse(scrape(LLAMACPP, kv_cache_capacity_tokens=2048), answer)
    assert reading.values["kv_cache_usage_ratio"] == 279 / 2048
    assert reading.sources["kv_cache_usage_ratio"] == "proxy:/slots tokens of busy slots / capacity"


@pytest.mark.parametrize(
    ("slot", "held"),
    [
        # While the prompt is processed, n_prompt_tokens is its full length: only what is done is held.
        (
            {
                "n_prompt_tokens": 900,
                "n_prompt_tokens_processed": 0,
                "n_prompt_tokens_cache": 0,
                "next_token": [{"n_decoded": 0}],
            },
            0,
        ),
        (
            {
                "n_prompt_tokens": 900,
                "n_prompt_tokens_processed": 512,
                "n_prompt_tokens_cache": 3,
                "next_token": [{"n_decoded": 0}],
            },
            515,
        ),
        (
            {
                "n_prompt_tokens": 910,
                "n_prompt_tokens_processed": 897,
                "n_prompt_tokens_cache": 3,
                "next_token": {"n_decoded": 10},
            },
            910,
        ),
        # Context shift: decoded more than fits.
        (
            {
                "n_prompt_tokens": 900,
                "n_prompt_tokens_processed": 900,
                "n_prompt_tokens_cache": 0,
                "next_token": [{"n_decoded": 5000}],
            },
            1000,
        ),
        ({"n_prompt_tokens": 900}, 900),
    ],
)
def test_tokens_that_a_busy_slot_holds(slot, held):
    slots = [
        {"id": 0, "n_ctx": 1000, "is_processing": True, **slot},
        {"id": 1, "n_ctx": 1000, "is_processing": False, "n_prompt_tokens": 777},
    ]
    reading = converse(scrape(LLAMACPP), llamacpp_server(slots=page(slots)))
    assert reading.values["kv_cache_usage_ratio"] == held / 2000


@pytest.mark.parametrize(
    "slots",
    [
        recorded("llamacpp/err_slots_disabled.txt"),
        HttpAnswer(0, error="timeout"),
        page("no json"),
        page({"a": 1}),
        page([]),
        page([1, 2]),
        page("[" * 100_000),
        page([{"id": 0, "is_processing": True, "n_prompt_tokens": 5}]),
        page([{"id": 0, "n_ctx": "many", "is_processing": True}]),
        page([{"id": 0, "n_ctx": True, "is_processing": True}]),
    ],
)
def test_a_side_page_that_fails_costs_its_own_signals_only(slots):
    reading = converse(scrape(LLAMACPP), llamacpp_server(slots=slots))
    assert set(reading.values) == set(LLAMACPP_SOURCES)


def test_a_build_whose_slots_do_not_tell_tokens_gives_no_kv_use():
    old = [{"id": 0, "n_ctx": 4096, "is_processing": True, "next_token": {"n_decoded": 7}}]
    reading = converse(scrape(LLAMACPP), llamacpp_server(slots=page(old)))
    assert "kv_cache_usage_ratio" not in reading.values
    assert reading.values["config_max_running_requests"] == 1


def test_a_fork_that_still_has_the_kv_metric_is_believed():
    metrics = page("llamacpp:kv_cache_usage_ratio 0.42\n")
    reading = converse(scrape(LLAMACPP), llamacpp_server(metrics=metrics))
    assert reading.values["kv_cache_usage_ratio"] == 0.42
    assert not reading.is_proxy("kv_cache_usage_ratio")


def test_a_restart_shows_in_the_start_mark():
    reading = converse(scrape(LLAMACPP), llamacpp_server())
    assert reading.start_mark == "2641469094"
    assert converse(scrape(VLLM), vllm_server()).start_mark is None


@pytest.mark.parametrize(
    ("engine", "metrics", "reason", "says"),
    [
        (LLAMACPP, recorded("llamacpp/err_metrics_disabled.txt"), "http_501", "start llama-server with --metrics"),
        (LLAMACPP, recorded("llamacpp/err_no_key.txt"), "http_401", "PLIMSOLL_API_KEY"),
        (LLAMACPP, HttpAnswer(0, error="timeout", seconds=10.0), "timeout", "--threads-http"),
        (VLLM, HttpAnswer(0, error="refused"), "refused", "nothing listens"),
        (VLLM, HttpAnswer(0, error="timeout"), "timeout", "no answer in time"),
        (VLLM, HttpAnswer(0, error="Server disconnected"), "connection", "Server disconnected"),
        (SGLANG, NOT_FOUND, "http_404", "--enable-metrics"),
        (VLLM, page("broken", 500), "http_500", "broken"),
        (VLLM, page("<html><title>Sign in</title></html>"), "not_metrics", "Sign in"),
        (VLLM, page(""), "not_metrics", "an empty body"),
        (VLLM, page("[]"), "not_metrics", "--disable-log-stats"),
        (VLLM, page("python_info 1\nprocess_start_time_seconds 1.7e9\n"), "no_engine_metrics", "--disable-log-stats"),
    ],
)
def test_a_failed_scrape_is_a_reason_not_an_exception(engine, metrics, reason, says):
    failure = converse(scrape(engine), server(metrics=metrics))
    assert isinstance(failure, ScrapeFailure)
    assert failure.reason == reason
    assert says in failure.detail
    assert failure.seconds == metrics.seconds


def test_a_huge_metrics_page_is_a_failed_scrape(monkeypatch):
    monkeypatch.setattr("serving.exposition.MAX_BODY_BYTES", 100)
    assert converse(scrape(VLLM), vllm_server()).reason == "too_large"


# Probing --------------------------------------------------------------------------------------------------------------


def test_probing_llamacpp():
    facts = converse(probe(), llamacpp_server())
    assert facts.engine == "llamacpp"
    assert facts.version is None  # this build says b0-unknown
    assert facts.model == "tiny"
    assert facts.context_tokens == 2048
    assert (facts.max_running_requests, facts.max_running_source) == (8, "/props total_slots")
    assert facts.kv_cache_capacity_tokens is None
    assert "does not tell whether its 8 slots share" in facts.notes[0]
    assert facts.metrics_supported


def test_one_llamacpp_slot_has_the_whole_cache():
    props = page({"total_slots": 1, "default_generation_settings": {"n_ctx": 4096}, "build_info": "b10434-7e4c0a9"})
    facts = converse(
        probe(), llamacpp_server(props=props, slots=page([{"id": 0, "n_ctx": 4096, "is_processing": False}]))
    )
    assert facts.kv_cache_capacity_tokens == 4096
    assert facts.version == "b10434-7e4c0a9"
    assert facts.notes == ()


def test_llamacpp_without_props_and_slots_still_tells_its_context():
    disabled = recorded("llamacpp/err_slots_disabled.txt")
    facts = converse(probe(), llamacpp_server(props=NOT_FOUND, slots=disabled))
    assert facts.context_tokens == 2048
    assert facts.max_running_requests is None
    assert facts.max_running_source is None
    assert "--no-slots" in facts.notes[0]


def test_probing_vllm():
    assert converse(probe("tiny"), vllm_server()) == TargetFacts(
        engine="vllm",
        version="0.32.0",
        model="tiny",
        context_tokens=2048,
        kv_cache_capacity_tokens=2097152,
        kv_cache_capacity_source="vllm:cache_config_info[kv_cache_size_tokens]",
        notes=converse(probe(), vllm_server()).notes,
    )


def test_vllm_does_not_tell_its_batch_limit_and_the_note_says_where_it_is():
    facts = converse(probe(), vllm_server())
    assert facts.max_running_requests is None
    assert "max_num_seqs" in facts.notes[0]


def test_probing_sglang_sums_over_data_parallel_ranks():
    facts = converse(probe(), sglang_server())
    assert facts == TargetFacts(
        engine="sglang",
        version="0.5.23",
        model="glm",
        context_tokens=131072,
        max_running_requests=48,
        max_running_source="server_info internal_states",
        kv_cache_capacity_tokens=1_000_000,
        kv_cache_capacity_source="server_info token_capacity",
    )
    assert "sk-must-not-appear" not in repr(facts)


def test_older_sglang_answers_under_the_older_path_and_with_fewer_fields():
    info = page({"version": "0.4.3", "max_running_requests": 32, "max_total_num_tokens": 9000, "context_length": 4096})
    models = page({"data": [{"id": "glm", "owned_by": "sglang"}]})
    metrics = page("sglang:num_running_reqs 0\n")
    facts = converse(
        probe(), sglang_server(v1__models=models, metrics=metrics, server_info=NOT_FOUND, get_server_info=info)
    )
    assert (facts.max_running_requests, facts.max_running_source) == (
        32,
        "server_info max_running_requests, as launched",
    )
    assert (facts.kv_cache_capacity_tokens, facts.context_tokens) == (9000, 4096)


@pytest.mark.parametrize(
    "info", [NOT_FOUND, page("[]"), page({"internal_states": [None, 3, {"memory_usage": 1}]}), page("<html>")]
)
def test_sglang_without_server_info_leaves_limits_absent(info):
    facts = converse(probe(), sglang_server(server_info=info))
    assert facts.max_running_requests is None
    assert facts.kv_cache_capacity_tokens == 1_000_000
    assert facts.kv_cache_capacity_source == "sglang:max_total_num_tokens"


def test_metric_names_outweigh_what_a_proxy_writes_into_the_model_list():
    models = page({"data": [{"id": "m", "owned_by": "my-gateway"}]}, server="envoy")
    assert converse(probe(), vllm_server(v1__models=models)).engine == "vllm"


def test_an_engine_without_metrics_is_recognised_when_metrics_are_not_asked_for():
    facts = converse(
        probe(require_metrics=False), llamacpp_server(metrics=recorded("llamacpp/err_metrics_disabled.txt"))
    )
    assert facts.engine == "llamacpp"
    assert not facts.metrics_supported


def test_an_alias_of_a_model_is_a_model():
    models = page({"data": [{"id": "a", "aliases": ["b"], "owned_by": "llamacpp"}]})
    assert converse(probe("b"), llamacpp_server(v1__models=models)).model == "b"


GO_404 = page("404 page not found\n", 404, content_type="text/plain; charset=utf-8")
NGINX = b"<html><head><title>Welcome to nginx!</title></head></html>"
NGINX_404 = b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<center>nginx/1.22</center></html>"


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"v1__models": HttpAnswer(0, error="refused")}, ["http://t:1 cannot be reached", "nothing listens there"]),
        ({"v1__models": HttpAnswer(0, error="dns")}, ["host name cannot be resolved"]),
        ({"v1__models": HttpAnswer(0, error="timeout")}, ["no answer in time"]),
        ({"v1__models": HttpAnswer(0, error="tls")}, ["TLS", "https://"]),
        ({"v1__models": HttpAnswer(0, error="Connection reset by peer")}, ["Connection reset by peer"]),
        ({"v1__models": recorded("llamacpp/err_no_key.txt")}, ["wants an API key (HTTP 401)", "PLIMSOLL_API_KEY"]),
        ({"v1__models": page("", 403)}, ["wants an API key (HTTP 403)"]),
        ({"v1__models": recorded("llamacpp/err_loading_503_health.txt")}, ["not ready", "Loading model", "wait"]),
        ({"v1__models": page(NGINX_404, 502, server="nginx")}, ["fails (HTTP 502", "proxy"]),
        (
            {
                "v1__models": page(NGINX_404, 404, server="nginx/1.22", content_type="text/html"),
                "root": page(NGINX, content_type="text/html"),
            },
            [
                "not as an inference API",
                "Welcome to nginx!",
                "nginx/1.22",
                "vllm 8000",
                "sglang 30000",
                "llamacpp 8080",
            ],
        ),
        ({"v1__models": page(NGINX)}, ["HTTP 200", "a web page", "Welcome to nginx!"]),
        (
            {"v1__models": GO_404, "metrics": page('prometheus_build_info{version="2.42"} 1\n')},
            ["those of prometheus", "404 page not found"],
        ),
        (
            {
                "v1__models": page('<a href="/login">Found</a>', 302, location="/login"),
                "root": page("<title>Grafana</title>"),
            },
            ["redirects to '/login'", "Grafana"],
        ),
        (
            {"v1__models": GO_404, "metrics": recorded("vllm/metrics_idle.txt")},
            ["its metrics are vllm's", "metrics port"],
        ),
        ({"v1__models": NOT_FOUND}, ["HTTP 404", "Not Found", "without /v1"]),
        ({"v1__models": page({"data": []})}, ["not as an inference API"]),
        ({"v1__models": page({"data": [{"name": "x"}]})}, ["not as an inference API"]),
        ({"v1__models": page("")}, ["an empty body"]),
        (
            {
                "v1__models": page({"data": [{"id": "m", "owned_by": "lmdeploy"}]}),
                "metrics": page("lmdeploy:num_requests_running 1\n"),
            },
            ["no engine that Plimsoll knows", "lmdeploy:", "'lmdeploy'"],
        ),
        (
            {"v1__models": page({"data": [{"id": "m", "owned_by": "library"}]})},
            ["no engine that Plimsoll knows", "its /metrics gave HTTP 404"],
        ),
        (
            {"v1__models": recorded("llamacpp/models.txt"), "metrics": recorded("llamacpp/err_metrics_disabled.txt")},
            ["runs llamacpp, but gives no metrics", "--metrics"],
        ),
        (
            {"v1__models": recorded("llamacpp/models.txt"), "metrics": recorded("llamacpp/err_no_key.txt")},
            ["runs llamacpp, but gives no metrics", "PLIMSOLL_API_KEY"],
        ),
        ({"v1__models": page({"data": [{"id": "m", "owned_by": "sglang"}]})}, ["runs sglang", "--enable-metrics"]),
        (
            {"v1__models": recorded("vllm/models.txt"), "metrics": page("python_info 1\n")},
            ["runs vllm", "--disable-log-stats"],
        ),
        (
            {"v1__models": recorded("vllm/models.txt"), "metrics": recorded("vllm/metrics_idle.txt")},
            ["does not serve the model 'wanted'", "it serves: tiny"],
        ),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_with_what_where_and_what_to_do(pages, says):
    with pytest.raises(TargetError) as error:
        converse(probe("wanted", where="http://t:1"), server(**pages))
    message = str(error.value)
    assert message.startswith("http://t:1 ")
    assert [part for part in says if part not in message] == []


def test_a_long_list_of_models_is_cut():
    models = page({"data": [{"id": f"m{i}", "owned_by": "vllm"} for i in range(40)]})
    with pytest.raises(TargetError, match=r"m9 and 30 more$"):
        converse(probe("x"), vllm_server(v1__models=models))


# Messages and logs ----------------------------------------------------------------------------------------------------


def message_of(name):
    return recorded(name).json()["error"]["message"]


@pytest.mark.parametrize(
    ("engine", "message", "complaint"),
    [
        (LLAMACPP, message_of("llamacpp/nonstream_kv_full.txt"), Complaint.KV_CACHE_FULL),
        (
            LLAMACPP,
            "failed to find free space in the KV cache, retrying with smaller batch size",
            Complaint.KV_CACHE_FULL,
        ),
        (LLAMACPP, message_of("llamacpp/err_prompt_too_long_stream.txt"), Complaint.PROMPT_TOO_LONG),
        (LLAMACPP, "allocating 9.50 MiB on device 0: cudaMalloc failed: out of memory", Complaint.OUT_OF_MEMORY),
        (
            LLAMACPP,
            "Input prompt is too big compared to KV size. Please try increasing KV size.",
            Complaint.KV_CACHE_FULL,
        ),
        (LLAMACPP, "ggml_aligned_malloc: insufficient memory (attempted to allocate 9.5 MB)", Complaint.OUT_OF_MEMORY),
        (LLAMACPP, message_of("llamacpp/err_bad_json.txt"), None),
        (VLLM, message_of("vllm/err_prompt_too_long_stream.txt"), Complaint.PROMPT_TOO_LONG),
        (VLLM, message_of("vllm/max_tokens_over_context.txt"), Complaint.PROMPT_TOO_LONG),
        (VLLM, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Complaint.OUT_OF_MEMORY),
        (
            VLLM,
            "(4.2 GiB KV cache is needed, which is larger than the available KV cache memory (1 GiB).",
            Complaint.KV_CACHE_FULL,
        ),
        (VLLM, message_of("vllm/err_bad_model.txt"), None),
        (SGLANG, "Prefill out of memory. Try to lower your batch size.", Complaint.KV_CACHE_FULL),
        (SGLANG, "KV cache pool is full. Retract requests. #retracted_reqs: 2", Complaint.KV_CACHE_FULL),
        (
            SGLANG,
            "The input (691793 tokens) is longer than the model's context length (540000 tokens).",
            Complaint.PROMPT_TOO_LONG,
        ),
        (SGLANG, "CUDA out of memory. Tried to allocate 20.00 MiB", Complaint.OUT_OF_MEMORY),
        (SGLANG, "", None),
    ],
)
def test_what_an_engine_means_by_its_error_messages(engine, message, complaint):
    assert engine.complaint(message) is complaint


SGLANG_LOG = (
    "[2026-11-29 10:00:00 TP0] server_args=ServerArgs(max_running_requests=None, context_length=None)\n"
    "[2026-11-29 10:01:00 TP0] max_total_num_tokens=500000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
    "max_running_requests=24, context_len=131072, available_gpu_mem=9.85 GB\n"
)


@pytest.mark.parametrize(
    ("engine", "log", "facts"),
    [
        (VLLM, "vllm/startup.log", (8, 2097152, 2048)),
        (VLLM, "vllm/startup_moe_smallkv.log", (8, 1088, 1024)),
        (LLAMACPP, "llamacpp/startup.log", (8, 16384, 2048)),
        (LLAMACPP, "llamacpp/startup_b10434.log", (8, 16384, 2048)),
        (LLAMACPP, "llamacpp/b11434/startup.log", (8, 16384, 2048)),
        (LLAMACPP, "llamacpp/log_kv_full.log", (8, 1024, 1024)),  # started with --kv-unified
    ],
)
def test_limits_in_recorded_startup_logs(engine, log, facts):
    names = ("max_running_requests", "kv_cache_capacity_tokens", "context_tokens")
    assert logged_limits(engine, (SAMPLES / log).read_text(errors="replace")) == in_order(names, facts)


@pytest.mark.parametrize(
    ("engine", "log", "facts"),
    [
        (
            SGLANG,
            SGLANG_LOG,
            {"max_running_requests": 24, "kv_cache_capacity_tokens": 500000, "context_tokens": 131072},
        ),
        (
            SGLANG,
            "max_total_num_tokens=9, max_running_requests=4\n",
            {"max_running_requests": 4, "kv_cache_capacity_tokens": 9},
        ),
        (VLLM, "GPU KV cache size: 900 tokens\nGPU KV cache size: 800 tokens\n", {"kv_cache_capacity_tokens": 800}),
        (VLLM, "Using max model len 32768", {"context_tokens": 32768}),
        (
            VLLM,
            "max_seq_len=262144,\nAuto-fit max_model_len: reduced from 262144 to 34736 to fit in available memory\n",
            {"context_tokens": 34736},
        ),
        (
            LLAMACPP,
            (
                "srv load_model: capping per-slot context (4096) to --kv-unified-per-slot (512)\n"
                "srv load_model: initializing, n_slots = 8, n_ctx_slot = 512, kv_unified = 'true'\n"
            ),
            {"max_running_requests": 8, "kv_cache_capacity_tokens": 4096, "context_tokens": 512},
        ),
        (
            LLAMACPP,
            (
                "srv load_model: the slot context (80128) exceeds the training context of the model (32768) - capping\n"
                "srv load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'true'\n"
            ),
            {"max_running_requests": 4, "kv_cache_capacity_tokens": 80128, "context_tokens": 32768},
        ),
        (
            LLAMACPP,
            "llama_context: n_ctx         = 8192\nsrv load_model: initializing slots, n_slots = 2\n",
            {"max_running_requests": 2, "kv_cache_capacity_tokens": 8192},
        ),
        (VLLM, "nothing of the kind", {}),
        (SGLANG, "", {}),
        (LLAMACPP, "", {}),
    ],
)
def test_limits_in_composed_startup_logs(engine, log, facts):
    assert logged_limits(engine, log) == facts


def test_a_reading_marks_proxies_by_their_source():
    reading = Reading(values={"a": 1.0, "b": 2.0}, sources={"a": "proxy:/slots", "b": "x"})
    assert [reading.is_proxy(name) for name in ("a", "b", "c")] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "facts", "live"),
    [
        (
            "batch_slots",
            {"max_running_requests": 8, "context_tokens": 2048},
            {"requests_running": 8, "requests_waiting": 2, "request_preemptions_total": 0},
        ),
        (
            "kv_cache",
            {"max_running_requests": 8, "context_tokens": 1024, "kv_cache_capacity_tokens": 34 * 32},
            {"requests_running": 5, "requests_waiting": 5, "request_preemptions_total": 9},
        ),
    ],
)
def test_vllm_of_eight_sequences_as_recorded_under_ten_streams(name, facts, live):
    """The log says how it was started; the page, taken under load, shows what bound."""
    folder = SAMPLES / "vllm" / "small_moe"
    told = logged_limits(VLLM, (folder / f"startup_{name}.log").read_text(encoding="utf-8"))
    assert facts.items() <= told.items()
    seen = VLLM.read(parse((folder / f"metrics_{name}.txt").read_bytes())).values
    assert live.items() <= seen.items()
    assert (seen["kv_cache_usage_ratio"] > 0.9) is (name == "kv_cache")
