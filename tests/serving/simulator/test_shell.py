"""Over HTTP the simulated server answers, fails, dies and comes back as its engine would, and its truth says the same."""

import asyncio
import contextlib
import io
import json
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from loadgen.tally import Outcome
from monitor.gpu import DcgmReader
from monitor.http import converse, open_session
from serving.clock import NS
from serving.engines import ENGINES, Reading, probe, scrape
from serving.errors import ConfigError, RecordError
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.server import SimulatedServer
from serving.simulator.shell import DIALECTS, SimulatorShell, _is_local, open_record
from serving.simulator.spec import Finish, MemoryPlan, OnFull, Policy, ServerSpec, Work
from serving.simulator.traffic import parse_traffic
from serving.simulator.truth import TruthWriter, read_truth
from serving.smoke import smoke
from serving.startup import logged_limits
from serving.stream import StreamDecoder

T0 = 1_800_000_000 * NS
GIB = 2**30
POLICIES = {
    "vllm": Policy(),
    "sglang": Policy(prefill_first=True, reserved_output_ratio=0.7),
    "llamacpp": Policy(on_full=OnFull.FAIL, counts_at_finish=True),
}
engines = pytest.mark.parametrize("engine", list(DIALECTS))


class Steady:
    """Ten milliseconds a step."""

    def seconds(self, work: Work) -> float:
        return 0.01 + 1e-6 * work.prefill_tokens


def make_spec(engine="vllm", **changes):
    spec = ServerSpec(
        engine=engine,
        release=DIALECTS[engine].releases[0],
        model="tiny",
        max_batch=8,
        context_tokens=4096,
        token_budget=512,
        block_tokens=16,
        kv_blocks=4096,
        cost=Steady(),
        memory=MemoryPlan(card_total_bytes=80 * GIB, weights_bytes=20 * GIB, kv_cache_bytes=40 * GIB),
        policy=POLICIES[engine],
    )
    return replace(spec, **changes)


@dataclass
class Simulation:
    """A shell with everything around it."""

    shell: SimulatorShell
    truth: io.StringIO
    told: list[str] = field(default_factory=list)

    @property
    def server(self) -> SimulatedServer:
        return self.shell.server

    def report(self):
        return read_truth(self.truth.getvalue().splitlines(keepends=True))


@pytest.fixture
async def simulate():
    """Start a simulated server; faults, and whatever else the shell takes."""
    shells = []

    async def start(spec=None, *faults, speed=50.0, cold=False, **options):
        spec = spec or make_spec()
        truth, told = io.StringIO(), []
        server = SimulatedServer(
            spec,
            t_ns=T0,
            edges=DIALECTS[spec.engine].edges,
            plan=FaultPlan([parse_fault(text) for text in faults]),
            truth=TruthWriter(truth),
            cold=cold,
        )
        shell = SimulatorShell(server, DIALECTS[spec.engine], speed=speed, truth=truth, warn=told.append, **options)
        await shell.start()
        shells.append(shell)
        return Simulation(shell, truth, told)

    yield start
    for client in Client.opened:
        await client.close()
    Client.opened.clear()
    for shell in shells:
        await shell.stop()


class Client:
    """One connection, read byte for byte."""

    opened: ClassVar[list["Client"]] = []

    def __init__(self, shell, reader, writer):
        self.shell, self.reader, self.writer = shell, reader, writer
        self.raw = b""

    @classmethod
    async def open(cls, shell):
        client = cls(shell, *await asyncio.open_connection("127.0.0.1", shell.port))
        cls.opened.append(client)
        return client

    def send(self, method, path, document=None, headers=()):
        body = b"" if document is None else document if isinstance(document, bytes) else json.dumps(document).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    def ask(self, api="chat", tokens=8, *, stream=True, words=12, **more):
        path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        self.send("POST", path, generation(api, tokens, stream=stream, words=words, **more))

    async def decode(self, api="chat"):
        """Follow a stream to its end."""
        decoder = StreamDecoder(api)
        self.raw = b""
        while not decoder.complete:
            try:
                data = await asyncio.wait_for(self.reader.read(65536), 10)
            except ConnectionError as error:
                decoder.close(str(error))
                break
            self.raw += data
            if not data:
                decoder.close()
                break
            decoder.feed(data, time.monotonic_ns())
        return decoder

    async def whole(self):
        """Status, headers and body of an answer that says its length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        first, *rows = head.decode("latin-1").split("\r\n")[:-2]
        headers = dict(row.split(": ", 1) if ": " in row else (row.rstrip(":"), "") for row in rows)
        length = int({name.lower(): value for name, value in headers.items()}["content-length"])
        return int(first.split()[1]), headers, await self.reader.readexactly(length)

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def generation(api="chat", tokens=8, *, stream=True, words=12, **more):
    text = " ".join(f"w{i}" for i in range(words))
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "stream": stream, **more}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | ({"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text})


async def stream_once(simulation, api="chat", tokens=8, **more):
    client = await Client.open(simulation.shell)
    client.ask(api, tokens, **more)
    decoder = await client.decode(api)
    await client.close()
    return decoder.result(tokens, ignore_eos=True)


async def call(simulation, method, path, document=None, headers=()):
    client = await Client.open(simulation.shell)
    client.send(method, path, document, (*headers, "Connection: close"))
    try:
        return await client.whole()
    finally:
        await client.close()


async def control(simulation, method, path, document=None):
    status, _, body = await call(simulation, method, f"/simulator/{path}", document)
    return status, json.loads(body)


async def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)


# ---- answers


@engines
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_stream_has_every_token_its_usage_and_a_proper_end(simulate, engine, api):
    simulation = await simulate(make_spec(engine))
    client = await Client.open(simulation.shell)
    for tokens in (8, 1, 3):
        client.ask(api, tokens)
        decoder = await client.decode(api)
        result = decoder.result(tokens, ignore_eos=True)
        assert result.outcome is Outcome.OK, result.error
        assert (result.completion_tokens, result.finish_reason) == (tokens, "length")
        assert result.prompt_tokens >= 12
        assert decoder.reusable, "the next request goes over the same connection"
    await client.close()
    assert simulation.server.finished[Finish.LENGTH] == 3


@engines
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_an_answer_that_is_not_streamed_has_its_text_and_usage(simulate, engine, api):
    simulation = await simulate(make_spec(engine))
    status, _, body = await call(
        simulation,
        "POST",
        "/v1/chat/completions" if api == "chat" else "/v1/completions",
        generation(api, 5, stream=False),
    )
    document = json.loads(body)
    choice = document["choices"][0]
    text = choice["message"]["content"] if api == "chat" else choice["text"]
    assert (status, len(text.split()), document["usage"]["completion_tokens"]) == (200, 5, 5)
    assert choice["finish_reason"] == "length"


@engines
async def test_a_stream_comes_as_its_tokens_do_and_not_at_its_end(simulate, engine):
    simulation = await simulate(make_spec(engine), speed=2.0)
    client = await Client.open(simulation.shell)
    client.ask(tokens=12)
    decoder = await client.decode()
    result = decoder.result(12)
    assert result.frames == 12
    assert result.t_last_ns - result.t_first_ns >= 0.03 * NS, "eleven steps of 10 ms at twice the speed"
    await client.close()


@engines
async def test_reasoning_comes_first_and_in_its_own_channel(simulate, engine):
    simulation = await simulate(make_spec(engine), speed=5.0, reasoning_tokens=4)
    result = await stream_once(simulation, tokens=8)
    assert result.outcome is Outcome.OK
    assert result.t_first_ns < result.t_first_content_ns
    all_of_it = await stream_once(simulation, tokens=3)
    assert (all_of_it.outcome, all_of_it.completion_tokens, all_of_it.t_first_content_ns) == (Outcome.OK, 3, None)


async def test_an_answer_that_may_end_by_itself_stops_before_its_limit(simulate):
    simulation = await simulate(answer_tokens=20)
    client = await Client.open(simulation.shell)
    client.ask(tokens=3000, ignore_eos=False)
    result = (await client.decode()).result(3000)
    assert (result.outcome, result.finish_reason) == (Outcome.OK, "stop")
    assert 1 <= result.completion_tokens < 200
    await client.close()


@engines
async def test_several_choices_are_all_there(simulate, engine):
    simulation = await simulate(make_spec(engine))
    client = await Client.open(simulation.shell)
    client.ask("completions", 4, n=2)
    result = (await client.decode("completions")).result(4)
    assert result.outcome is Outcome.OK
    await client.close()


async def test_heads_are_the_engines_own_and_not_those_of_the_library(simulate):
    vllm = await simulate(make_spec("vllm"))
    _, headers, _ = await call(vllm, "GET", "/health")
    assert headers["server"] == "uvicorn"
    assert all(name == name.lower() for name in headers if name != "Connection")
    llamacpp = await simulate(make_spec("llamacpp"))
    _, headers, _ = await call(llamacpp, "GET", "/health")
    assert headers["Server"] == "llama.cpp"
    assert "Date" not in headers


async def test_a_client_that_goes_away_frees_its_slot_at_once(simulate):
    simulation = await simulate(make_spec(max_batch=1), speed=1.0)
    first, second = await Client.open(simulation.shell), await Client.open(simulation.shell)
    first.ask(tokens=2000)
    await until(lambda: simulation.server.state.running)
    second.ask(tokens=1)
    await until(lambda: simulation.server.state.waiting)
    await first.close()
    assert (await second.decode()).result(1).outcome is Outcome.OK
    assert not simulation.server.state.running
    assert simulation.server.finished[Finish.CANCELLED] == 1
    assert '"cancelled"]' in simulation.truth.getvalue()
    await second.close()


async def test_a_request_that_waits_can_go_away_too(simulate):
    simulation = await simulate(make_spec(max_batch=1), speed=1.0)
    first, second = await Client.open(simulation.shell), await Client.open(simulation.shell)
    first.ask(tokens=2000)
    second.ask(tokens=5, stream=False)
    await until(lambda: simulation.server.state.waiting)
    await second.close()
    await until(lambda: not simulation.server.state.waiting)
    assert len(simulation.server.state.running) == 1
    await first.close()


async def test_a_reader_that_does_not_read_holds_up_nobody_and_misses_nothing(simulate):
    simulation = await simulate(make_spec(max_batch=2), speed=1000.0)
    slow = await Client.open(simulation.shell)
    # Sixteen choices make frames so large that no socket's buffer holds them all.
    slow.ask("completions", tokens=4000, n=16)
    await until(lambda: simulation.server.steps > 2500, 20)
    assert (await stream_once(simulation, tokens=3)).outcome is Outcome.OK
    result = (await slow.decode("completions")).result(4000, ignore_eos=True)
    assert (result.outcome, result.completion_tokens) == (Outcome.OK, 16 * 4000)
    assert result.frames < 16 * 4000, "what it had not read came in larger frames"
    await slow.close()


async def test_with_few_http_threads_even_a_scrape_waits_its_turn(simulate):
    simulation = await simulate(speed=1.0, max_http_streams=1)
    first = await Client.open(simulation.shell)
    first.ask(tokens=2000)
    await until(lambda: simulation.server.state.running)
    scraper = await Client.open(simulation.shell)
    scraper.send("GET", "/metrics")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scraper.reader.read(1), 0.1)
    await first.close()
    assert (await scraper.whole())[0] == 200
    await scraper.close()


# ---- complaints


@engines
@pytest.mark.parametrize(
    ("method", "path", "document", "statuses"),
    [
        ("GET", "/nowhere", None, {404}),
        ("POST", "/nowhere", {}, {404}),
        ("GET", "/v1/chat/completions", None, {404, 405}),
        ("POST", "/metrics", {}, {404, 405}),
        ("PUT", "/v1/completions", {}, {404, 405}),
        ("POST", "/v1/chat/completions", b"{", {400, 422, 500}),
        ("POST", "/v1/chat/completions", {"model": "tiny"}, {400, 422, 500}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": "w " * 5000, "max_tokens": 1}, {400}),
    ],
)
async def test_what_cannot_be_answered_is_refused_in_the_engines_words(
    simulate, engine, method, path, document, statuses
):
    simulation = await simulate(make_spec(engine))
    status, _, body = await call(simulation, method, path, document)
    assert status in statuses
    assert json.loads(body)
    assert simulation.server.http[path, status] == 1


@pytest.mark.parametrize(
    ("engine", "guarded", "free"),
    [
        ("vllm", ["/v1/models"], ["/health", "/metrics", "/version"]),
        ("sglang", ["/v1/models", "/get_server_info"], ["/health", "/metrics"]),
        ("llamacpp", ["/metrics", "/slots", "/props"], ["/health", "/v1/models"]),
    ],
)
async def test_a_key_is_asked_for_where_the_engine_asks_and_never_repeated(simulate, engine, guarded, free):
    simulation = await simulate(make_spec(engine), api_key="s3cret")
    for path in guarded:
        for headers in ((), ("Authorization: Bearer wrong",), ("Authorization: Bearer s3\u00e9cret",)):
            status, _, body = await call(simulation, "GET", path, headers=headers)
            assert status == 401
            assert b"s3cret" not in body
        assert (await call(simulation, "GET", path, headers=("Authorization: Bearer s3cret",)))[0] == 200
    for path in free:
        assert (await call(simulation, "GET", path))[0] == 200
    assert (await call(simulation, "POST", "/v1/completions", generation("completions", stream=False)))[0] == 401
    assert (await control(simulation, "GET", "state"))[0] == 200


@pytest.mark.parametrize(
    ("engine", "method", "path", "status", "allow"),
    [
        ("vllm", "HEAD", "/health", 405, "GET"),
        ("vllm", "DELETE", "/metrics", 405, "GET"),
        ("vllm", "PUT", "/v1/chat/completions", 405, "POST"),
        ("vllm", "PUT", "/nowhere", 404, None),
        ("sglang", "POST", "/health", 405, "GET"),
        ("llamacpp", "HEAD", "/health", 200, None),
        ("llamacpp", "PUT", "/health", 404, None),
    ],
)
async def test_a_path_under_another_method_says_which_it_has_and_a_head_has_no_body(
    simulate, engine, method, path, status, allow
):
    simulation = await simulate(make_spec(engine))
    client = await Client.open(simulation.shell)
    client.send(method, path, headers=("Connection: close",))
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert (b"\r\nallow: " + (allow or "").encode() in head) == (allow is not None)
    assert (body == b"") == (method == "HEAD")


async def test_what_is_no_http_is_refused_without_a_word_to_people(simulate):
    simulation = await simulate()
    for raw in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n"):
        client = await Client.open(simulation.shell)
        client.writer.write(raw)
        assert b" 400 " in await client.reader.read()
    packed = ("Content-Encoding: gzip",)
    status, headers, _ = await call(simulation, "POST", "/v1/completions", b"no gzip", headers=packed)
    assert (status, headers["server"]) == (400, "uvicorn")
    assert simulation.told == []


async def test_a_fault_of_the_simulator_is_told_in_one_line(simulate, monkeypatch):
    simulation = await simulate()
    monkeypatch.setattr(type(simulation.shell.dialect), "page", lambda *_: 1 / 0)
    assert (await call(simulation, "GET", "/version"))[0] == 500
    assert len(simulation.told) == 1
    assert "ZeroDivisionError at test_shell.py" in simulation.told[0]


async def test_a_long_header_is_taken(simulate):
    simulation = await simulate()
    assert (await call(simulation, "GET", "/health", headers=(f"Cookie: {'x' * 30_000}",)))[0] == 200


async def test_above_the_queue_limit_requests_are_refused(simulate):
    simulation = await simulate(make_spec(max_batch=1, queue_limit=1), speed=1.0)
    for occupied in (lambda: simulation.server.state.running, lambda: simulation.server.state.waiting):
        (await Client.open(simulation.shell)).ask(tokens=2000)
        await until(occupied)
    result = await stream_once(simulation)
    assert (result.outcome, result.status) == (Outcome.HTTP_ERROR, 503)
    assert simulation.server.finished[Finish.REJECTED] == 1


async def test_while_it_loads_llamacpp_says_so_and_vllm_does_not_listen(simulate):
    llamacpp = await simulate(make_spec("llamacpp", start_seconds=30.0), cold=True)
    status, _, body = await call(llamacpp, "GET", "/health")
    assert (status, b"Loading" in body) == (503, True)
    assert (await stream_once(llamacpp)).status == 503
    await until(lambda: llamacpp.server.ready)
    assert (await stream_once(llamacpp)).outcome is Outcome.OK
    vllm = await simulate(make_spec("vllm", start_seconds=30.0), cold=True)
    with pytest.raises(ConnectionRefusedError):
        await Client.open(vllm.shell)
    await until(lambda: vllm.server.ready)
    await asyncio.sleep(0.1)
    assert (await stream_once(vllm)).outcome is Outcome.OK


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(simulate):
    simulation = await simulate()
    client = await Client.open(simulation.shell)
    body = json.dumps(generation(stream=False)).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", "Expect: 100-continue"]
    client.writer.write("\r\n".join([*head, "", ""]).encode())
    assert await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(body)
    assert (await client.whole())[0] == 200


# ---- faults of answers

FAULTS = {
    "http_500": (Outcome.HTTP_ERROR, 500),
    "http_429": (Outcome.HTTP_ERROR, 429),
    "http_503": (Outcome.HTTP_ERROR, 503),
    "stream_error": (Outcome.STREAM_ERROR, 200),
    "cut_reset,after=3": (Outcome.TRUNCATED, 200),
    "cut_clean,after=3": (Outcome.TRUNCATED, 200),
    "no_terminator": (Outcome.OK, 200),
    "empty_answer": (Outcome.SHORT, 200),
    "garbage_frame": (Outcome.STREAM_ERROR, 200),
    "stall=5": (Outcome.OK, 200),
}


@engines
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(("fault", "expected"), FAULTS.items())
async def test_a_fault_of_answers_is_met_by_the_client(simulate, engine, api, fault, expected):
    simulation = await simulate(make_spec(engine), fault)
    result = await stream_once(simulation, api, 8)
    assert (result.outcome, result.status) == expected, result.error
    await until(lambda: not simulation.server.state.inside)
    assert (await stream_once(simulation, api, 8)).outcome is expected[0], "the server goes on"
    assert simulation.report().events[fault.partition(",")[0].partition("=")[0]] == 2, "the truth says whom it hit"


@engines
@pytest.mark.parametrize("fault", ["cut_reset,after=30", "cut_clean,after=30", "stream_error,after=30"])
async def test_an_answer_too_short_for_its_fault_is_broken_at_its_end(simulate, engine, fault):
    simulation = await simulate(make_spec(engine), fault)
    result = await stream_once(simulation, tokens=4)
    assert result.outcome in (Outcome.TRUNCATED, Outcome.STREAM_ERROR)


async def test_a_reset_is_one_and_a_clean_cut_ends_the_body_politely(simulate):
    reset = await simulate(None, "cut_reset,after=2")
    client = await Client.open(reset.shell)
    client.ask(tokens=8)
    with pytest.raises(ConnectionResetError):
        await client.reader.read()
    await client.close()
    clean = await simulate(None, "cut_clean,after=2")
    client = await Client.open(clean.shell)
    client.ask(tokens=8)
    decoder = await client.decode()
    assert decoder.complete
    assert client.raw.endswith(b"0\r\n\r\n")
    assert "finish reason" in decoder.result(8).error
    await client.close()


async def test_a_stream_without_its_terminator_ends_with_the_body(simulate):
    simulation = await simulate(None, "no_terminator")
    client = await Client.open(simulation.shell)
    client.ask(tokens=4)
    decoder = await client.decode()
    assert b"[DONE]" not in client.raw
    assert decoder.result(4, ignore_eos=True).outcome is Outcome.OK
    await client.close()


async def test_a_stall_holds_tokens_back_and_lets_them_all_go(simulate):
    simulation = await simulate(None, "stall=10,after=3")
    result = await stream_once(simulation, tokens=8)
    assert (result.outcome, result.completion_tokens) == (Outcome.OK, 8)
    assert max(result.gaps_us) >= 0.15e6, "ten seconds at fifty times the speed"


@pytest.mark.parametrize(
    ("fault", "status"),
    [("stream_error", 500), ("http_500", 500), ("garbage_frame", 200), ("empty_answer", 200), ("stall=1", 200)],
)
async def test_a_fault_shows_in_answers_that_are_not_streamed(simulate, fault, status):
    simulation = await simulate(None, fault)
    found, _, body = await call(simulation, "POST", "/v1/chat/completions", generation(stream=False))
    assert found == status
    if fault == "garbage_frame":
        with pytest.raises(ValueError):
            json.loads(body)
    elif fault == "empty_answer":
        assert json.loads(body)["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("fault", ["cut_reset", "cut_clean"])
async def test_a_cut_leaves_nothing_of_an_answer_that_is_not_streamed(simulate, fault):
    simulation = await simulate(None, fault)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await call(simulation, "POST", "/v1/chat/completions", generation(stream=False))


async def test_a_full_kv_cache_breaks_llamacpps_answers_with_its_error(simulate):
    spec = make_spec("llamacpp", kv_blocks=8, context_tokens=128, max_batch=4)
    simulation = await simulate(spec)
    results = await asyncio.gather(*(stream_once(simulation, tokens=60, words=10) for _ in range(4)))
    broken = [result for result in results if result.outcome is not Outcome.OK]
    assert broken
    assert all("ontext size has been exceeded" in result.error for result in broken)
    assert simulation.server.finished[Finish.KV_FULL] == len(broken)


async def test_a_slow_metrics_page_is_slow_in_virtual_time(simulate):
    simulation = await simulate(None, "slow_metrics=10")
    began = time.monotonic()
    assert (await call(simulation, "GET", "/metrics"))[0] == 200
    assert time.monotonic() - began >= 0.2


# ---- what monitors see


@engines
async def test_the_engine_is_recognised_proved_and_scraped(simulate, engine):
    simulation = await simulate(make_spec(engine))
    url = simulation.shell.url
    async with open_session() as session:
        facts = await converse(session, url, probe(where=url))
        assert (facts.engine, facts.model, facts.context_tokens) == (engine, "tiny", 4096)
        answer = await converse(session, url, smoke(facts.model))
        assert answer.generated, answer.reason
        assert answer.completion_tokens == 8
        reading = await converse(session, url, scrape(ENGINES[engine], kv_cache_capacity_tokens=65536))
    assert isinstance(reading, Reading)
    assert reading.values["requests_running"] == 0
    assert reading.values["generation_tokens_total"] == 8


@engines
async def test_renamed_metrics_lack_what_is_read_of_them(simulate, engine):
    readings = []
    for faults in ((), ("renamed_metrics",)):
        simulation = await simulate(make_spec(engine), *faults)
        async with open_session() as session:
            readings.append(await converse(session, simulation.shell.url, scrape(ENGINES[engine])))
    before, after = readings
    assert isinstance(before, Reading)
    lost = {"requests_running", "generation_tokens_total"} & (before.values.keys() - after.values.keys())
    assert lost


async def test_gauges_freeze_while_counters_go_on(simulate):
    simulation = await simulate(None, "frozen_gauges")
    client = await Client.open(simulation.shell)
    client.ask(tokens=2000)
    await until(lambda: simulation.server.state.running)
    async with open_session() as session:
        reading = await converse(session, simulation.shell.url, scrape(ENGINES["vllm"]))
    assert reading.values["requests_running"] == 0
    await client.close()


async def test_the_cards_are_read_as_from_a_dcgm_exporter(simulate):
    simulation = await simulate(make_spec(memory=MemoryPlan(cards=2, card_total_bytes=80 * GIB, weights_bytes=GIB)))
    reader = DcgmReader(f"{simulation.shell.url}/dcgm")
    values = await reader.read()
    await reader.close()
    assert len(values) == 2
    for card in values.values():
        assert card["gpu_memory_total_bytes"] == pytest.approx(80 * GIB, rel=0.01)
        assert GIB <= card["gpu_memory_used_bytes"] < 2 * GIB


@engines
async def test_the_log_tells_the_limits_in_the_engines_words(simulate, engine, tmp_path):
    await simulate(make_spec(engine, max_batch=7), log=tmp_path / "engine.log")
    facts = logged_limits(ENGINES[engine], (tmp_path / "engine.log").read_text(encoding="utf-8"))
    assert facts["max_running_requests"] == 7


# ---- truth


@engines
async def test_the_truth_equals_what_clients_counted(simulate, engine):
    simulation = await simulate(make_spec(engine, max_batch=4))
    results = await asyncio.gather(*(stream_once(simulation, tokens=5 + i % 7) for i in range(20)))
    assert {result.outcome for result in results} == {Outcome.OK}
    report = simulation.report()
    assert not report.problems
    assert report.tokens == sum(result.completion_tokens for result in results)
    assert (report.received, report.ended, report.running_max) == (20, {"length": 20}, 4)


async def test_at_its_stop_all_that_ran_is_lost_in_the_truth(simulate):
    simulation = await simulate(speed=1.0)
    client = await Client.open(simulation.shell)
    client.ask(tokens=2000)
    await until(lambda: simulation.server.state.running)
    await simulation.shell.stop()
    report = simulation.report()
    assert (report.inside, report.ended) == (0, {"died": 1})
    assert not report.problems
    await client.close()
    await simulation.shell.stop()


async def test_customers_run_beside_clients(simulate):
    traffic = parse_traffic("20/s,prompt=20,output=5", since_ns=T0)
    simulation = await simulate(make_spec(), traffic=traffic)
    await until(lambda: sum(simulation.server.finished.values()) > 10)
    assert (await stream_once(simulation)).outcome is Outcome.OK
    assert simulation.server.http["/v1/completions", 200] > 10


async def test_a_loop_that_stood_still_is_told_once_and_steps_follow_each_other(simulate):
    simulation = await simulate(make_spec(), speed=50.0)
    client = await Client.open(simulation.shell)
    client.ask(tokens=4000)
    await until(lambda: simulation.server.steps > 10)
    for _ in range(4):
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is to stand still
        await asyncio.sleep(0.01)
    late = simulation.shell.lateness
    assert late.max_seconds >= 0.09
    assert late.slips >= 4
    assert late.slipped_seconds >= 0.36
    assert len(simulation.told) == 1
    assert "too slow" in simulation.told[0]
    _, state = await control(simulation, "GET", "state")
    assert state["lateness"]["slips"] == late.slips
    steps = [json.loads(line)["step"] for line in simulation.truth.getvalue().splitlines() if '{"step"' in line]
    assert all(before[1] <= after[0] for before, after in pairwise(steps))
    assert max(after[0] - before[1] for before, after in pairwise(steps)) >= 4 * NS
    await client.close()


# ---- life and control


async def test_faults_are_switched_on_and_off_at_run_time(simulate):
    simulation = await simulate()
    status, added = await control(simulation, "POST", "faults", {"fault": "http_500"})
    assert (status, added["id"]) == (200, 1)
    assert (await stream_once(simulation)).status == 500
    _, state = await control(simulation, "GET", "state")
    assert [fault["id"] for fault in state["faults"]] == [1]
    assert state["faults"][0]["on"] is True
    assert (await control(simulation, "DELETE", "faults/1"))[0] == 200
    assert (await stream_once(simulation)).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("method", "path", "document", "says"),
    [
        ("POST", "faults", {"fault": "http_5000"}, "http_500"),
        ("POST", "faults", {}, "NAME=VALUE"),
        ("POST", "faults", b"[1]", "object"),
        ("POST", "faults", b"{", "JSON"),
        ("DELETE", "faults/7", None, "7"),
        ("DELETE", "faults/x", None, "'x'"),
        ("POST", "crash", {"down_seconds": -1}, "-1"),
        ("POST", "crash", {"down_seconds": "1"}, "'1'"),
        ("POST", "crash", {"down_seconds": 1e300}, "100 years"),
        ("POST", "crash", {"down_seconds": 10**400}, "100 years"),
        ("POST", "crash", b"[" * 100_000, "JSON"),
        ("POST", "crash", b"9" * 5000, "JSON"),
        ("DELETE", f"faults/{'9' * 5000}", None, "no fault's id"),
        ("GET", "nothing", None, "GET /simulator/state"),
        ("POST", "state", {}, "GET"),
    ],
)
async def test_a_mistake_in_steering_is_explained(simulate, method, path, document, says):
    simulation = await simulate()
    status, answer = await control(simulation, method, path, document)
    assert 400 <= status < 500
    assert says in answer["error"]


@pytest.mark.parametrize(
    ("remote", "local"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), (None, False), ("x", False)],
)
def test_only_its_own_host_steers_it(remote, local):
    assert _is_local(remote) is local


async def test_a_crash_ends_streams_refuses_while_down_and_comes_back_on_the_same_port(simulate, tmp_path):
    simulation = await simulate(log=tmp_path / "log")
    assert (await stream_once(simulation)).outcome is Outcome.OK
    client = await Client.open(simulation.shell)
    client.ask(tokens=4000)
    await until(lambda: simulation.server.generated_tokens > 20)
    idle = await Client.open(simulation.shell)
    assert (await control(simulation, "POST", "crash", {"down_seconds": 20}))[0] == 200
    result = (await client.decode()).result(4000)
    assert result.outcome is Outcome.STREAM_ERROR
    assert await asyncio.wait_for(idle.reader.read(), 5) == b"", "idle connections are closed too"
    with pytest.raises(ConnectionRefusedError):
        await Client.open(simulation.shell)
    await until(lambda: simulation.shell._listener is not None)
    assert simulation.server.start_number == 2
    assert simulation.server.generated_tokens == 0
    assert (await stream_once(simulation)).outcome is Outcome.OK
    for each in (client, idle):
        await each.close()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) > 10
    assert simulation.report().ended["died"] == 1


async def test_llamacpp_dies_without_a_word(simulate):
    simulation = await simulate(make_spec("llamacpp"))
    client = await Client.open(simulation.shell)
    client.ask(tokens=4000)
    await until(lambda: simulation.server.steps > 20)
    await control(simulation, "POST", "crash")
    result = (await client.decode()).result(4000)
    assert result.outcome is Outcome.TRUNCATED
    await client.close()
    await until(lambda: simulation.server.start_number == 2)


async def test_a_planned_crash_comes_by_itself(simulate):
    simulation = await simulate(None, "crash=5,start=5")
    await until(lambda: simulation.server.start_number == 2 and simulation.shell._listener is not None)
    assert (await stream_once(simulation)).outcome is Outcome.OK


@engines
async def test_out_of_memory_ends_the_server_for_good_and_says_why(simulate, engine, tmp_path):
    simulation = await simulate(make_spec(engine), "oom_at_bytes=10GiB", log=tmp_path / "log")
    before = (tmp_path / "log").read_text(encoding="utf-8")
    result = await stream_once(simulation)
    assert result.outcome is not Outcome.OK
    assert await asyncio.wait_for(asyncio.shield(simulation.shell.ended), 5) is Trouble.OUT_OF_MEMORY
    assert len((tmp_path / "log").read_text(encoding="utf-8")) > len(before)
    with pytest.raises(ConnectionRefusedError):
        await Client.open(simulation.shell)
    assert simulation.report().ended == {"died": 1}


async def test_a_dead_server_is_restarted_when_that_was_asked_for(simulate):
    simulation = await simulate(None, "oom_at_bytes=10GiB,end=10", restart_after_seconds=20)
    assert (await stream_once(simulation)).outcome is not Outcome.OK
    await until(lambda: simulation.server.start_number == 2 and simulation.shell._listener is not None)
    assert (await stream_once(simulation)).outcome is Outcome.OK
    assert not simulation.shell.ended.done()


async def test_what_leaks_is_really_held_when_that_was_asked_for(simulate):
    simulation = await simulate(None, "host_leak_per_hour=30GiB", "fd_leak_per_hour=36000", allocate=True)
    await until(lambda: simulation.shell.state()["allocated"]["memory_bytes"] > 4 * 2**20)
    assert simulation.shell.state()["allocated"]["descriptors"] > 0
    await simulation.shell.stop()
    assert simulation.shell.state()["allocated"]["memory_bytes"] == 0


async def test_a_port_that_is_taken_is_refused(simulate):
    simulation = await simulate()
    with pytest.raises(ConfigError, match="another --port"):
        await simulate(port=simulation.shell.port)


async def test_an_address_that_is_none_of_this_hosts_is_refused(simulate):
    for host in ("192.0.2.1", "no.such.host.invalid", "x" * 300):
        with pytest.raises(ConfigError, match="another --host"):
            await simulate(host=host)


async def test_a_full_disk_ends_the_simulation_and_says_what_could_not_be_written(simulate):
    with pytest.raises(RecordError, match="cannot write the log /dev/full"):
        await simulate(log=Path("/dev/full"))
    stream = open_record(Path("/dev/full"), "w", "truth")
    stream.write("x")
    for _ in range(2):
        with pytest.raises(RecordError, match="cannot write the truth /dev/full: No space left"):
            stream.flush()
    with pytest.raises(RecordError):
        stream.close()


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_speed_that_makes_no_sense_is_refused(simulate, speed):
    with pytest.raises(ConfigError, match="speed"):
        await simulate(speed=speed)
