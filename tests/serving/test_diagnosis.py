"""What logs are said to mean: every sample, every failure that the simulator can write, and reports of real failures."""

import io
import itertools
import math
import random
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.diagnosis import Confidence, Failure, LogReader, Phase, State, diagnose, reader
from serving.diagnosis.redaction import TEXT_LIMIT, presentable
from serving.diagnosis.signs import FACTS, FIGURES, SIGNS, Role
from serving.errors import ConfigError
from serving.log_lines import Block, read_blocks
from serving.simulator.dialects.base import StartFailure, Trouble
from serving.simulator.dialects.llamacpp import LLAMACPP_DIALECT
from serving.simulator.dialects.sglang import SGLANG_DIALECT
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.launch import launch

SAMPLES = Path(__file__).parents[1] / "samples"
FAILURES = SAMPLES / "logs" / "failures"
INDEX = yaml.safe_load((FAILURES / "index.yaml").read_text("utf-8"))
T_NS = 1_790_000_000 * 10**9
READY = "INFO:     Application startup complete.\n"
ANSWER = 'INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.02 GiB is free.\n"
)
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"


def read(text, **options):
    return diagnose(io.BytesIO(text.encode() if isinstance(text, str) else text), **options)


def failure_of(text, **options):
    found = read(text, **options).diagnosis
    return found and found.failure


# ---- reports of real failures


def test_every_log_of_a_failure_is_in_the_index_and_says_where_it_is_from():
    assert {path.name for path in FAILURES.glob("*.log")} == set(INDEX)
    assert {entry["kind"] for entry in INDEX.values()} <= {"captured", "report", "synthetic"}
    assert sum(entry["kind"] == "report" for entry in INDEX.values()) >= 24
    assert all(entry["source"] and entry["release"] for entry in INDEX.values())


@pytest.mark.parametrize("name", INDEX)
def test_a_reported_failure_is_told_with_its_figures_and_the_next_step(name):
    expected = INDEX[name]
    log = diagnose(FAILURES / name)
    assert log.engine == expected["engine"]
    found = log.diagnosis
    if expected["class"] == "none":
        assert found is None
        assert log.state.value == expected["state"]
        return
    assert found is not None
    assert found.failure.value == expected["class"]
    assert log.state.value == expected.get("state", "dead")
    for key, figure in expected.get("figures", {}).items():
        if isinstance(figure, int) and abs(figure) > 10**9:
            assert math.isclose(found.figures[key], figure, rel_tol=0.001), key
        else:
            assert found.figures[key] == figure, key
    assert expected["next_step"] in found.next_step
    assert expected["leave_alone"] in " / ".join(found.leave_alone)
    assert list(found.ranks) == expected.get("ranks", list(found.ranks))
    assert found.requests_before == expected.get("requests_before")
    assert found.confidence.value == expected.get("confidence", found.confidence.value)
    assert [start.failure for start in log.earlier] == expected.get("earlier", [])
    lines = (FAILURES / name).read_text("utf-8").splitlines()
    assert found.cause_line in [evidence.line for evidence in found.evidence]
    for evidence in found.evidence:
        assert 1 <= evidence.line <= len(lines)
        assert len(evidence.text) <= TEXT_LIMIT


@pytest.mark.parametrize("name", INDEX)
def test_prefixes_colours_and_carriage_returns_of_others_change_nothing(name):
    text = (FAILURES / name).read_text("utf-8")
    plain = failure_of(text)
    if "json" in name or name.startswith(("docker", "kernel")):
        return
    coloured = "".join(f"\x1b[1;36mvllm-1  | \x1b[0m{line}\r\n" for line in text.splitlines())
    assert failure_of(coloured) == plain
    journal = "".join(f"Nov 29 15:40:13 host unit[12]: {line}\n" for line in text.splitlines())
    assert failure_of(journal) == plain


# ---- captured logs of healthy servers, and of one that was killed

HEALTHY = sorted(
    str(path.relative_to(SAMPLES))
    for folder in ("vllm", "llamacpp", "transformers")
    for path in (SAMPLES / folder).rglob("*.log")
    if path.name not in ("engine_dead.log", "log_kv_full.log")
)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_server_that_was_stopped_in_good_health_has_no_cause_of_death(name):
    found = diagnose(SAMPLES / name)
    assert found.diagnosis is None
    assert found.state is State.STOPPED
    assert found.last_error is None


def test_the_run_samples_hold_no_logs_to_be_diagnosed():
    assert not list((SAMPLES / "runs").rglob("*.log"))


def test_refused_requests_of_a_healthy_server_are_counted_and_no_cause():
    found = diagnose(SAMPLES / "llamacpp" / "startup.log")
    assert found.diagnosis is None
    assert found.refused == {"bad field": 2, "too long": 1}


def test_a_worker_that_vanished_is_the_cause_and_the_dead_engine_only_follows():
    found = diagnose(SAMPLES / "vllm" / "engine_dead.log").diagnosis
    assert (found.failure, found.confidence, found.cause_line) == (Failure.KILLED, Confidence.LOW, 100)
    assert found.phase is Phase.SERVING


def test_requests_that_llamacpp_lost_for_want_of_cache_are_told_with_slots_and_context():
    found = diagnose(SAMPLES / "llamacpp" / "log_kv_full.log").diagnosis
    assert found.failure is Failure.KV_CACHE_EXHAUSTED
    assert "8 slots share 1,024 tokens" in found.cause
    assert "--parallel from 8 to 4" in found.next_step


# ---- the simulator's words

SPECS = (
    (VLLM_DIALECT, launch("vllm", model="hy3", card="h200", cards=8, max_batch=48)),
    (VLLM_DIALECT, launch("vllm", model="llama-3.1-8b", card="l40s", kv_blocks=1024, context_tokens=4096)),
    (SGLANG_DIALECT, launch("sglang", model="llama-3.1-8b", card="rtx 4090", max_batch=8, context_tokens=8192)),
    (
        SGLANG_DIALECT,
        replace(
            launch("sglang", model="llama-3.1-8b", card="rtx 4090", max_batch=8, context_tokens=8192), card_parallel=4
        ),
    ),
    (LLAMACPP_DIALECT, launch("llamacpp", model="qwen2.5-7b", card="rtx 4090", max_batch=8, weight_bits=4.85)),
)
RELEASES = [
    pytest.param(dialect, replace(spec, release=release), id=f"{dialect.name}-{release}-{number}")
    for number, (dialect, spec) in enumerate(SPECS)
    for release in dialect.releases
]
OF_START = {
    StartFailure.WEIGHTS_MISSING: Failure.WEIGHTS_UNREADABLE,
    StartFailure.WEIGHTS_OUT_OF_MEMORY: Failure.WEIGHTS_OUT_OF_MEMORY,
    StartFailure.NO_KV_CACHE: Failure.KV_CACHE_UNALLOCATED,
    StartFailure.KV_BELOW_ONE_REQUEST: Failure.KV_CACHE_BELOW_REQUEST,
    StartFailure.WARMUP_OUT_OF_MEMORY: Failure.WARM_UP,
}
OF_DEATH = {
    ("vllm", Trouble.OUT_OF_MEMORY): Failure.RUNTIME_OUT_OF_MEMORY,
    ("vllm", Trouble.ENGINE_DEAD): Failure.KILLED,
    ("sglang", Trouble.OUT_OF_MEMORY): Failure.RUNTIME_OUT_OF_MEMORY,
    ("sglang", Trouble.KV_FULL): Failure.KV_CACHE_EXHAUSTED,
    ("sglang", Trouble.ENGINE_DEAD): Failure.HANG,
    ("llamacpp", Trouble.OUT_OF_MEMORY): Failure.RUNTIME_OUT_OF_MEMORY,
    ("llamacpp", Trouble.KV_FULL): Failure.KV_CACHE_EXHAUSTED,
    ("llamacpp", Trouble.ENGINE_DEAD): Failure.DRIVER,
}


def said(lines):
    return "\n".join(line.text for line in lines) + "\n"


@pytest.mark.parametrize(("dialect", "spec"), RELEASES)
def test_a_simulated_start_that_goes_well_ends_serving_without_a_cause(dialect, spec):
    found = read(said(dialect.startup_log(spec, T_NS)))
    assert (found.diagnosis, found.state, found.engine, found.starts) == (None, State.SERVING, dialect.name, 1)


@pytest.mark.parametrize("failure", StartFailure)
@pytest.mark.parametrize(("dialect", "spec"), RELEASES)
def test_every_failure_of_a_start_is_recognised_in_every_release_of_every_engine(dialect, spec, failure):
    text = said(dialect.startup_log(spec, T_NS, failure))
    expected = OF_START[failure]
    if failure is StartFailure.KV_BELOW_ONE_REQUEST and dialect.name == "llamacpp" and "fit_params" not in text:
        # Builds that do not fit the context themselves say the same of both.
        expected = Failure.KV_CACHE_UNALLOCATED
    found = read(text)
    assert found.diagnosis.failure is expected
    assert found.diagnosis.confidence is Confidence.HIGH
    assert (found.state, found.engine) == (State.DEAD, dialect.name)
    assert found.diagnosis.requests_before is None


@pytest.mark.parametrize("trouble", [Trouble.OUT_OF_MEMORY, Trouble.KV_FULL, Trouble.ENGINE_DEAD])
@pytest.mark.parametrize(("dialect", "spec"), RELEASES)
def test_every_death_is_recognised_with_the_requests_answered_before(dialect, spec, trouble):
    expected = OF_DEATH.get((dialect.name, trouble))
    if expected is None:
        return
    # llama.cpp writes one such line a request, the others an access line.
    answer = (
        "slot print_timing: id 0 | task 1 | total time = 1.00 ms / 2 tokens\n" if dialect.name == "llamacpp" else ANSWER
    )
    text = said(dialect.startup_log(spec, T_NS)) + answer * 5 + said(dialect.death_log(trouble, spec, T_NS))
    found = read(text).diagnosis
    assert (found.failure, found.requests_before, found.phase) == (expected, 5, Phase.SERVING)


@pytest.mark.parametrize(("dialect", "spec"), RELEASES[:1])
def test_what_was_asked_for_and_what_there_is_are_figures(dialect, spec):
    found = read(said(dialect.startup_log(spec, T_NS, StartFailure.WEIGHTS_OUT_OF_MEMORY))).diagnosis
    assert found.figures["asked_bytes"] == 512 << 20
    assert found.figures["gpu"] == 0


# ---- order: what is a cause, and what only stands near one


def test_what_a_start_survived_is_no_cause():
    assert failure_of("vLLM API server version 0.9\n" + OUT_OF_MEMORY + READY + ANSWER) is None


def test_memory_that_runs_out_is_told_by_what_was_being_done():
    begin = "INFO 01-01 00:00:00 [a.py:1] vLLM API server version 0.9\n"
    weights = begin + "INFO 01-01 00:00:01 [a.py:1] Starting to load model m...\n"
    profile = weights + "INFO 01-01 00:00:02 [a.py:1] Model loading took 10.00 GiB and 3.1 seconds\n"
    cache = profile + "INFO 01-01 00:00:03 [a.py:1] Available KV cache memory: 4.00 GiB\n"
    graphs = cache + "INFO 01-01 00:00:04 [a.py:1] GPU KV cache size: 40,000 tokens\n"
    told = [failure_of(text + OUT_OF_MEMORY) for text in (weights, profile, cache, graphs, graphs + READY + ANSWER)]
    assert told == [
        Failure.WEIGHTS_OUT_OF_MEMORY,
        Failure.WARM_UP,
        Failure.KV_CACHE_UNALLOCATED,
        Failure.WARM_UP,
        Failure.RUNTIME_OUT_OF_MEMORY,
    ]


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("load_model", Failure.WEIGHTS_OUT_OF_MEMORY),
        ("profile_run", Failure.WARM_UP),
        ("initialize_kv_cache", Failure.KV_CACHE_UNALLOCATED),
        ("capture_model", Failure.WARM_UP),
        ("run_busy_loop", Failure.RUNTIME_OUT_OF_MEMORY),
    ],
)
def test_where_the_log_begins_late_the_traceback_tells_what_was_being_done(frame, expected):
    text = f'Traceback (most recent call last):\n  File "vllm/x.py", line 3, in {frame}\n' + OUT_OF_MEMORY
    assert failure_of(text) is expected


def test_memory_without_any_sign_of_the_phase_is_told_with_low_confidence():
    found = read(OUT_OF_MEMORY).diagnosis
    assert found.confidence is Confidence.LOW
    assert found.doubts


def test_the_consequence_before_the_cause_does_not_hide_it():
    text = READY + ANSWER + "EngineCore encountered a fatal error.\n" + OUT_OF_MEMORY + DEAD
    found = read(text).diagnosis
    assert (found.failure, found.cause_line) == (Failure.RUNTIME_OUT_OF_MEMORY, 4)


def test_a_lost_connection_beside_a_rank_without_memory_is_the_consequence():
    nccl = "[rank1]: RuntimeError: NCCL error: remote process exited or there was a network error\n"
    memory = "[rank0]: " + OUT_OF_MEMORY
    for lines in itertools.permutations((nccl, memory, DEAD)):
        assert failure_of(READY + ANSWER + "".join(lines)) is Failure.RUNTIME_OUT_OF_MEMORY


def test_a_survived_failure_days_before_is_not_what_killed_the_server():
    nccl = "[rank1]: RuntimeError: NCCL error: unhandled system error\n"
    assert failure_of(READY + ANSWER + OUT_OF_MEMORY + ANSWER * 100 + nccl + DEAD) is Failure.COMMUNICATION


def test_a_failure_with_nothing_after_it_counts_though_no_line_says_that_the_server_died():
    found = read(READY + ANSWER * 3 + OUT_OF_MEMORY).diagnosis
    assert found.failure is Failure.RUNTIME_OUT_OF_MEMORY
    assert found.confidence is Confidence.MEDIUM


def test_what_follows_a_stop_is_no_cause():
    found = read(READY + ANSWER + "[shutdown] API server: shutdown triggered\n" + DEAD + OUT_OF_MEMORY)
    assert (found.diagnosis, found.state) == (None, State.STOPPED)


def test_a_warning_is_a_cause_only_where_nothing_else_is():
    warned = (
        "WARNING 10-03 20:16:19 [a.py:1] ImportError('libcuda.so.1: cannot open shared object file: No such file')\n"
    )
    full = "ERROR 10-03 20:16:20 [a.py:1] OSError: [Errno 28] No space left on device\n"
    assert failure_of(warned + full) is Failure.DISK_FULL
    assert failure_of(warned) is Failure.DRIVER


def test_retracted_requests_are_how_sglang_works():
    line = "[2026-01-01 00:00:00 TP0] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.1 -> 0.2\n"
    assert failure_of("server_args=ServerArgs(x=1)\nThe server is fired up and ready to roll!\n" + line * 50) is None


def test_a_process_that_ended_by_itself_with_an_error_is_not_called_killed():
    assert failure_of("python exited with code 1\n") is None
    assert failure_of("python exited with code 137\n") is Failure.KILLED
    assert failure_of("python exited with code 139\n") is Failure.CRASHED


def test_main_memory_that_ray_watches_is_not_the_memory_of_a_card():
    line = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    found = read(line).diagnosis
    assert (found.failure, found.next_step[:13]) == (Failure.KILLED, "give the node")


def test_other_programs_that_the_kernel_killed_are_not_the_server():
    line = "Out of memory: Killed process 123 (firefox) total-vm:1kB, anon-rss:1kB\n"
    assert failure_of(line) is None
    assert failure_of(line.replace("firefox", "vllm")) is Failure.KILLED


def test_an_error_that_no_class_knows_is_shown_and_no_cause():
    found = read("vLLM API server version 0.9\nERROR 01-01 00:00:00 [a.py:1] FrobnicationError: the frob is out\n")
    assert found.diagnosis is None
    assert "the frob is out" in found.last_error.text
    assert found.last_error.line == 2


def test_a_start_that_ends_without_a_word_says_how_far_it_came_and_where_to_look():
    found = read("vLLM API server version 0.9\nINFO 01-01 00:00:00 [a.py:1] Starting to load model m...\n")
    assert (found.diagnosis, found.state) == (None, State.STARTING)
    assert "weights were being loaded" in found.state_text
    assert "dmesg" in found.state_text


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "\x00" * 4096, "a" * 300_000])
def test_a_log_of_no_server_says_so(text):
    found = read(text)
    assert (found.diagnosis, found.state, found.engine, found.starts) == (None, State.UNKNOWN, None, 0)


def test_of_several_starts_the_last_is_diagnosed_and_the_others_are_told():
    dialect, spec = SPECS[1]
    first = said(dialect.startup_log(spec, T_NS, StartFailure.NO_KV_CACHE))
    second = (
        said(dialect.startup_log(spec, T_NS)) + ANSWER * 3 + said(dialect.death_log(Trouble.OUT_OF_MEMORY, spec, T_NS))
    )
    third = said(dialect.startup_log(spec, T_NS, StartFailure.WEIGHTS_MISSING))
    found = read(first + second + third)
    assert found.starts == 3
    assert found.diagnosis.failure is Failure.WEIGHTS_UNREADABLE
    assert [start.failure for start in found.earlier] == [Failure.KV_CACHE_UNALLOCATED, Failure.RUNTIME_OUT_OF_MEMORY]
    assert found.earlier[1].first_line == first.count("\n") + 1
    assert found.earlier[1].last_line == (first + second).count("\n")


def test_the_engine_given_by_the_caller_limits_what_is_looked_for():
    text = "Memory pool size is too small\n"
    assert failure_of(text, engine="sglang") is Failure.KV_CACHE_BELOW_REQUEST
    assert failure_of(text, engine="llamacpp") is None


# ---- many ranks


def test_an_error_of_many_ranks_is_told_once_with_all_of_them():
    lines = [f"(Worker_TP{rank} pid={rank}) ERROR 01-01 00:00:00 [a.py:1] {OUT_OF_MEMORY}" for rank in range(16)]
    found = read("Starting to load model m...\n" + "".join(lines)).diagnosis
    assert found.ranks == tuple(f"tp{rank}" for rank in range(16))
    assert [evidence.times for evidence in found.evidence] == [16]


MANY_RANKS = [name for name in INDEX if "tp2" in name or "tp4" in name or "pp" in name]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_how_the_ranks_are_interleaved_does_not_change_the_class(data):
    dialect, spec = SPECS[3]
    name = data.draw(st.sampled_from([*MANY_RANKS, "simulated"]))
    failure = data.draw(st.sampled_from([StartFailure.WEIGHTS_OUT_OF_MEMORY, StartFailure.NO_KV_CACHE]))
    text = (
        said(dialect.startup_log(spec, T_NS, failure)) if name == "simulated" else (FAILURES / name).read_text("utf-8")
    )
    # What came before readiness came before it for all of them.
    head, ready, rest = text.rpartition("Application startup complete.")
    queues: dict[str, list[str]] = {}
    for line in rest.splitlines(keepends=True):
        rank = re.search(r"rank\W?\d|TP\d|PP\d", line)
        queues.setdefault(rank[0] if rank else "", []).append(line)
    # Lines of the first process keep their places beside one another; those of ranks fall anywhere.
    rnd = random.Random(data.draw(st.integers(0, 2**32)))
    shuffled = []
    while queues:
        key = rnd.choice(sorted(queues))
        shuffled.append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
    assert failure_of(head + ready + "\n" + "".join(shuffled)) is failure_of(text)


# ---- secrets


@pytest.mark.parametrize(
    "secret",
    [
        "api_key='sk-abcdefghijklmnop'",
        "api_key=['first-key-1', 'second-key-2']",
        "--api-key plain-words-key",
        '"password": "plain-words-key"',
        "HF_TOKEN=hf_abcdefghijklmnop",
        "Authorization: Bearer plain-words-key",
        "token hf_abcdefghijklmnop",
        "https://user:plain-words-key@host/v1",
        "AWS_SECRET_ACCESS_KEY=plain/words+key",
        "https://host/x?X-Amz-Signature=plain-words-key&X-Amz-Date=1",
        "https://plain-words-key@host/v1",
        "redis://:plain-words-key@host",
        "--hf_token plain-words-key",
        "HF_TOKEN plain-words-key1",
        "X-Auth-Token plain-words-key1",
        "pwd=plain-words-key",
        "cookie: session=plain-words-key",
        "AIzaSyabcdefghijklmnopqrstuvwxyz123456",
        "nvapi-abcdefghijklmnop",
        "glpat-abcdefghijklmnop",
    ],
)
def test_a_secret_in_a_line_of_evidence_is_not_shown(secret):
    shown = presentable(f"RuntimeError: CUDA out of memory while {secret} and then more words")
    assert not re.search(r"plain|words[-+]key|abcdefgh|first-key|second-key", shown)
    assert "CUDA out of memory" in shown
    log = read(f"Starting to load model m...\nERROR CUDA out of memory {secret} out\n")
    assert not re.search(r"plain|words[-+]key|abcdefgh|first-key|second-key", repr(log))


def test_secrets_of_the_start_command_reach_no_evidence():
    log = diagnose(FAILURES / "vllm_0.8_no_kv_cache.log")
    assert "sk-not-a-real" not in repr(log)


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=8192, eos_token_id=2",
        "#token: 1920, token usage: 0.94",
        "api_key=None, port=1",
        "HF_TOKEN is not set",
        "see https://docs.vllm.ai/en/latest/x",
    ],
)
def test_figures_that_only_sound_like_secrets_stay(text):
    assert presentable(text) == text


@pytest.mark.parametrize(
    "field",
    [
        "prompt: 'the words of a customer'",
        "query: 'a customer'",
        '"arguments": "a customer"',
        "prompt_text='a customer'",
        "\"messages\": [{'role': 'the words of a customer'}]",
    ],
)
def test_words_of_customers_are_left_out(field):
    assert "customer" not in presentable(f"ERROR bad request {field}")


def test_a_long_line_is_cut_around_what_matters():
    shown = presentable("x" * 3000 + " CUDA out of memory " + "y" * 900, "CUDA out of memory")
    assert len(shown) <= TEXT_LIMIT
    assert "CUDA out of memory" in shown


# ---- the table


def test_patterns_do_not_depend_on_which_digits_a_line_has():
    patterns = [sign.pattern.pattern for sign in SIGNS] + [pattern.pattern for _, pattern in FACTS]
    for pattern in patterns + [pattern.pattern for pattern in FIGURES]:
        literal = re.sub(r"\(\?P<\w+>|\{\d+(?:,\d*)?\}|\\\d|\[[^\]]*\]", "", pattern)
        assert not re.search(r"\d", literal), pattern


def test_every_class_has_a_sign_or_follows_from_one():
    named = {sign.failure for sign in SIGNS if sign.failure is not None}
    by_phase = {Failure.RUNTIME_OUT_OF_MEMORY, Failure.CRASHED}
    assert named | by_phase == set(Failure)


def test_the_fragments_that_are_searched_for_find_every_line_that_the_table_knows(monkeypatch):
    texts = [(FAILURES / name).read_text("utf-8") for name in INDEX]
    texts += [path.read_text("utf-8") for path in (SAMPLES / "vllm").rglob("*.log")]
    for dialect, spec in SPECS:
        for release in dialect.releases:
            texts += [
                said(dialect.startup_log(replace(spec, release=release), T_NS, fail)) for fail in (None, *StartFailure)
            ]

    def telling(text):
        log = LogReader()
        for block in read_blocks(io.BytesIO(text.encode())):
            log.take(block)
        return {
            shape for shape, meaning in log._shapes.items() if any(sign.role is not Role.NOTE for sign in meaning.signs)
        }

    with_fragments = [telling(text) for text in texts]
    monkeypatch.setattr(reader, "_ANCHORS", (b"",))
    missed = set().union(*(telling(text) - found for text, found in zip(texts, with_fragments, strict=True)))
    assert not missed


BARE = {
    "terminate called after throwing an instance of 'std::bad_alloc'": Failure.WEIGHTS_OUT_OF_MEMORY,
    "  what():  std::bad_alloc": Failure.WEIGHTS_OUT_OF_MEMORY,
    "python: /lib/libc.so.6: version `GLIBC_2.34' not found (required by python)": Failure.DRIVER,
    "Repository Not Found for url: https://huggingface.co/org/name/resolve/main/config.json": Failure.WEIGHTS_UNREADABLE,
    "fallocate: No space left on device": Failure.DISK_FULL,
    "accept: Too many open files": Failure.LIMITS,
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'": Failure.DRIVER,
    "nvcc fatal   : Unknown option '-x'": Failure.DRIVER,
    "ggml_vulkan: Device memory allocation of size 1024 failed.": Failure.WEIGHTS_OUT_OF_MEMORY,
    "python exited with code 137": Failure.KILLED,
    "vllm.service: Main process exited, code=killed, status=9/KILL": Failure.KILLED,
    "vllm.service: Main process exited, code=dumped, status=11/SEGV": Failure.CRASHED,
    "vllm.service: A process of this unit has been killed by the OOM killer.": Failure.KILLED,
    "kernel: Task in /kubepods/a killed as a result of limit of /kubepods/a": None,
    "Task in /kubepods/a killed as a result of limit of /kubepods/a": Failure.KILLED,
    "      Reason:       OOMKilled": Failure.KILLED,
    '        "OOMKilled": true,': Failure.KILLED,
    '        "OOMKilled": false,': None,
    "OOMKilled=false": None,
    "OOMKilled = false": None,
    "exec /usr/bin/vllm: exec format error": Failure.CRASHED,
    "ModuleNotFoundError: No module named 'flash_attn'": Failure.DRIVER,
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].': Failure.DRIVER,
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update": Failure.DRIVER,
    "RuntimeError: CUDA error: operation not supported": Failure.DRIVER,
    "RuntimeError: CUDA error: out of memory": Failure.WEIGHTS_OUT_OF_MEMORY,
    "Error 802: system not yet initialized": Failure.DRIVER,
    "RuntimeError: FlashAttention only supports Ampere GPUs or newer.": Failure.MODEL_UNSUPPORTED,
    "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": Failure.WEIGHTS_OUT_OF_MEMORY,
}


@pytest.mark.parametrize("line", BARE)
def test_a_line_tells_its_class_without_any_other_word_around_it(line):
    assert failure_of(line + "\n") is BARE[line]


def test_words_of_customers_name_no_engine():
    assert read("RuntimeError: CUDA out of memory for customer abcggmlxyz\n").engine is None


def test_a_warning_of_a_longer_context_is_not_what_a_start_failed_of():
    begin = "[2026-01-01 00:00:00] server_args=ServerArgs(x=1)\n"
    warning = "Warning: User-specified context_length (262144) is greater than the derived context_length (131072).\n"
    assert failure_of(begin + warning + OUT_OF_MEMORY) is Failure.WEIGHTS_OUT_OF_MEMORY
    assert failure_of(begin + warning.replace("Warning", "ValueError")) is Failure.SETTINGS


@pytest.mark.parametrize("name", ["AssertionError", "TimeoutError", "NotImplementedError"])
def test_an_error_without_a_word_is_shown_too(name):
    found = read(f"vLLM API server version 0.9\nERROR 01-01 00:00:00 [core.py:702] {name}\n{DEAD}")
    assert found.diagnosis is None
    assert name in found.last_error.text


# ---- size


def test_many_lines_of_any_kind_need_no_more_memory_than_a_few():
    rnd = random.Random(7)

    def lines(count):
        for number in range(count):
            word = "".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(10))
            yield ANSWER
            yield f"ERROR 01-01 00:00:00 [a.py:{number}] RuntimeError: CUDA out of memory in {word}\n"
            yield f"INFO Added request {word} {number}\n"

    text = (READY + "".join(lines(12_000))).encode()
    read(text[:100_000])
    tracemalloc.start()
    found = read(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000
    assert found.lines == 36_001
    assert found.diagnosis.evidence[0].times == 12_000


def test_lines_that_are_only_counted_are_counted_right():
    errors = "".join(f"(Worker_TP{n % 4} pid=7) ERROR 01-01 00:00:00 [a.py:1] {OUT_OF_MEMORY}" for n in range(30_000))
    found = read(READY + ANSWER * 2 + errors + DEAD).diagnosis
    assert found.failure is Failure.RUNTIME_OUT_OF_MEMORY
    assert found.evidence[0].times == 30_000
    assert found.ranks == ("tp0", "tp1", "tp2", "tp3")
    assert found.requests_before == 2


def test_what_was_said_often_before_readiness_is_heard_again_after_it():
    start = "vLLM API server version 0.9\n" + OUT_OF_MEMORY * 200 + READY + ANSWER
    assert failure_of(start) is None
    assert failure_of(start + OUT_OF_MEMORY + DEAD) is Failure.RUNTIME_OUT_OF_MEMORY


def test_errors_that_are_all_spelt_differently_are_counted_and_the_last_of_them_matters():
    rnd = random.Random(3)
    words = ["".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(12)) for _ in range(30_000)]
    errors = "".join(f"RuntimeError: CUDA out of memory in {word}\n{ANSWER}" for word in words)
    found = read(READY + errors + DEAD).diagnosis
    assert found.failure is Failure.RUNTIME_OUT_OF_MEMORY
    assert found.evidence[0].times == 30_000


def test_a_new_start_in_the_middle_of_a_flood_is_read_from_its_beginning():
    rnd = random.Random(5)

    def flood(count):
        for _ in range(count):
            yield (
                "RuntimeError: CUDA out of memory in "
                + "".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(12))
                + "\n"
            )

    text = (
        READY + "".join(flood(30_000)) + "vLLM API server version 0.9\nStarting to load model m\n" + "".join(flood(1))
    )
    found = read(text)
    assert (found.starts, found.diagnosis.failure) == (1, Failure.WEIGHTS_OUT_OF_MEMORY)
    assert found.diagnosis.cause_line == found.lines


@pytest.mark.parametrize("seed", range(8))
def test_a_flood_that_is_counted_gives_the_answer_of_one_that_is_read(seed, monkeypatch):
    rnd = random.Random(seed)

    def word():
        return "".join(rnd.choice("ghijknopqrstuvwxyz") for _ in range(10))

    kinds = (
        lambda: f"ERROR [x.py:{rnd.randint(1, 9)}] RuntimeError: CUDA out of memory in {word()} for {word()}\n",
        lambda: f"ERROR ValueError: {word()} is {word()}\n",
        lambda: f"KeyError: '{word()}.{word()}'\n",
        lambda: f"ERROR [y] {word()}Error: {word()} exit code 1\n",
        lambda: f"INFO error {word()} memory {word()}\n",
        lambda: ANSWER,
    )
    hidden = (
        *("vLLM API server version 0.9\n", READY, DEAD, "Starting to load model m\n", "FooError: unknown thing\n"),
        *(
            "RuntimeError: NCCL error: unhandled system error\n",
            "KeyError: 'layers.1.weight'\n",
            "python exit code 137\n",
        ),
        *("[shutdown] API server: shutdown triggered\n", "OSError: [Errno 28] No space left on device\n"),
    )
    parts = []
    for _ in range(rnd.randint(1, 3)):
        chosen = rnd.sample(kinds, rnd.randint(1, 3))
        for _ in range(rnd.choice([500, 3000, 6000])):
            parts.append(rnd.choice(chosen)())
            if rnd.random() < 4e-4:
                parts.append(rnd.choice(hidden))
    text = "".join(parts)
    counted = read(text)
    monkeypatch.setattr(reader, "_FLOOD_LINES", 10**9)
    assert counted == read(text)


def test_a_line_that_was_counted_once_in_a_flood_counts_when_it_comes_again():
    rnd = random.Random(4)

    def flood(count):
        words = ("".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(12)) for _ in range(count))
        return "".join(f"RuntimeError: CUDA out of memory in {word}\n" for word in words)

    last = "RuntimeError: CUDA out of memory in the very last place\n"
    log = LogReader()
    line = 1
    for text in (READY + flood(1500), ANSWER + last, ANSWER * 200, last + DEAD):
        log.take(Block(line, text.encode()))
        line += text.count("\n")
    found = log.finish().diagnosis
    assert found.failure is Failure.RUNTIME_OUT_OF_MEMORY
    assert found.evidence[0].times == 1502


def test_of_a_flood_of_unknown_errors_the_last_is_shown_and_none_after_the_stop():
    rnd = random.Random(6)
    names = ["".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(9)) for _ in range(9000)]
    errors = "".join(f"ERROR a.py: {name}Error: the {name} is out\n" for name in names)
    same = "ERROR a.py: FrobError: frob 1 is out\n" * 500 + "ERROR a.py: FrobError: frob 2 is out\n"
    found = read("vLLM API server version 0.9\n" + errors + same)
    assert (found.diagnosis, found.last_error.line) == (None, 9502)
    assert "frob 2" in found.last_error.text
    stopped = read("vLLM API server version 0.9\n" + same + "[shutdown] API server: shutdown triggered\n" + errors)
    assert stopped.last_error.line == 502


def test_of_a_flood_about_a_stop_only_what_came_before_it_counts():
    rnd = random.Random(8)

    def flood(count):
        words = ("".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(12)) for _ in range(count))
        return "".join(f"RuntimeError: CUDA out of memory in {word}\n" for word in words)

    stop = "[shutdown] API server: shutdown triggered\n"
    log = LogReader()
    for line, text in ((1, READY + flood(3000)), (3002, flood(2000) + stop + flood(2000))):
        log.take(Block(line, text.encode()))
    assert log.finish().diagnosis.evidence[0].times == 5000


def test_frames_of_requests_that_failed_do_not_hide_those_of_the_next_start():
    request = 'Traceback (most recent call last):\n  File "a.py", line 3, in load_model\nValueError: no\n' + ANSWER
    start = "vLLM API server version 0.9\n"
    frames = 'Traceback (most recent call last):\n  File "a.py", line 4, in capture_model\n'
    found = read(start + READY + request * 300 + start + frames + OUT_OF_MEMORY + DEAD)
    assert (found.starts, found.diagnosis.phase, found.diagnosis.failure) == (2, Phase.GRAPHS, Failure.WARM_UP)


def test_where_blocks_end_does_not_matter():
    dialect, spec = SPECS[0]
    text = (
        said(dialect.startup_log(spec, T_NS))
        + ANSWER * 300
        + said(dialect.death_log(Trouble.OUT_OF_MEMORY, spec, T_NS))
    )
    whole = read(text)
    for size in (64, 1000, 4096):
        log = LogReader()
        for block in read_blocks(io.BytesIO(text.encode()), block_bytes=size):
            log.take(block)
        assert log.finish() == whole


# ---- anything at all


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_without_a_complaint_of_ours(data):
    try:
        found = read(data)
    except ConfigError:
        return
    assert found.lines >= 0


PIECES = sorted(
    {needle.decode() for sign in SIGNS for needle in sign.needles}
    | {" (1) ", ": ", "-9", "\x1b[0m", "'", "{", "1.5 GiB", "e999"}
)


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(" ".join), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_mixture_of_the_words_of_the_table_is_read(lines):
    found = read("\n".join(lines))
    if found.diagnosis is not None:
        assert found.diagnosis.next_step
        assert found.diagnosis.cause
        assert "{" not in found.diagnosis.next_step
