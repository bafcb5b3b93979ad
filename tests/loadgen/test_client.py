"""The gevent transport against a scripted server: every fault has its outcome, and nothing is sent twice unseen."""

import contextlib
import errno
import socket
import ssl
import subprocess
import threading
import time

import gevent
import pytest

from loadgen import client as module
from loadgen.client import Connection, Endpoint, RequestSpec
from loadgen.protocol import TimeLimits
from serving.clock import NS, SystemClock
from serving.conversation import HttpRequest, converse
from serving.errors import ConfigError
from serving.records import Outcome

CLOCK = SystemClock()
LIMITS = TimeLimits(connect_seconds=10.0, first_byte_seconds=20.0, request_seconds=30.0)
QUICK = TimeLimits(connect_seconds=10.0, first_byte_seconds=0.2, request_seconds=0.4)


def spec(number=0, tokens=3, **fields) -> RequestSpec:
    body = b'{"stream": true, "max_tokens": %d, "messages": [{"content": "a b"}]}' % tokens
    values = {"request_id": number, "stage": "8", "user": 2, "t_plan_ns": CLOCK.now_ns(), "body": body, "api": "chat"}
    values |= {"planned_prompt_tokens": 9, "planned_output_tokens": tokens, "ignore_eos": True}
    return RequestSpec(**(values | fields))


@pytest.fixture
def connect():
    """Makes connections to a URL and closes them after the test."""
    made = []

    def make(url, **options) -> Connection:
        made.append(Connection(Endpoint(url, **({"limits": LIMITS, "clock": CLOCK} | options))))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def connection(fake_server, connect):
    return connect(fake_server.url)


@pytest.fixture
def closed_url():
    """A port that nobody listens on, and nobody else can take meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


OUTCOMES = [
    ("ok", "ok", 3, 200, None),
    ("late headers", "ok", 3, 200, None),
    ("no done", "ok", 3, 200, None),
    ("no usage", "ok", 3, 200, None),
    ("close after", "ok", 3, 200, None),
    ("short", "short", 2, 200, None),
    ("500", "http_error", 0, 500, "refused by script 500"),
    ("503", "http_error", 0, 503, "refused by script 503"),
    ("429", "http_error", 0, 429, "HTTP 429"),
    ("page", "stream_error", 0, 200, "text/html"),
    ("cut", "truncated", 1, 200, "closed the connection"),
    ("clean cut", "truncated", 3, 200, "without a finish reason"),
    ("reset", "truncated", 1, 200, "reset"),
    ("error event", "stream_error", 1, 200, "the engine is dead"),
    ("error only", "stream_error", 0, 200, "the engine is dead"),
    ("empty", "truncated", 0, 200, "without any text"),
    ("garbage", "stream_error", 1, 200, "not JSON"),
    ("reset before", "http_error", 0, None, "reset"),
    ("close before", "http_error", 0, None, "closed the connection"),
]


@pytest.mark.parametrize(("behaviour", "outcome", "frames", "status", "message"), OUTCOMES)
def test_every_way_an_answer_can_end_has_its_outcome(
    fake_server, connection, behaviour, outcome, frames, status, message
):
    fake_server.behaviour = lambda number: behaviour
    record = connection.issue(spec())
    assert (record.outcome, record.frames, record.http_status) == (outcome, frames, status)
    assert message in (record.error or "") if message else record.error is None
    assert len(fake_server.bodies) == 1
    assert record.t_plan_ns <= (record.t_send_ns or 0) <= record.t_end_ns


@pytest.mark.parametrize(
    ("behaviour", "frames", "status", "message"),
    [("hang", 1, 200, "the answer did not end in time"), ("silent", 0, None, "no answer in time")],
)
def test_an_answer_that_does_not_come_in_time_is_a_timeout(fake_server, connect, behaviour, frames, status, message):
    fake_server.behaviour = lambda number: behaviour
    record = connect(fake_server.url, limits=QUICK).issue(spec())
    assert (record.outcome, record.frames, record.http_status) == ("timeout", frames, status)
    assert record.error == message


def test_a_record_holds_the_times_in_order_and_the_servers_counts(fake_server, connection):
    fake_server.token_seconds = 0.002
    record = connection.issue(spec(7, tokens=5))
    assert (record.request_id, record.stage, record.user) == (7, "8", 2)
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (9, 5, "length")
    assert record.t_send_ns < record.t_headers_ns <= record.t_first_ns <= record.t_last_ns <= record.t_end_ns
    assert sum(record.frame_gaps_us) == pytest.approx((record.t_last_ns - record.t_first_ns) / 1000, abs=5)


def test_a_connection_is_kept_for_the_next_request(fake_server, connection):
    for number in range(5):
        assert connection.issue(spec(number)).outcome is Outcome.OK
    assert fake_server.connections == 1


@pytest.mark.parametrize("behaviour", ["429", "500", "error event", "clean cut"])
def test_a_failed_but_whole_answer_keeps_the_connection(fake_server, connection, behaviour):
    fake_server.behaviour = lambda number: behaviour
    connection.issue(spec())
    connection.issue(spec())
    assert fake_server.connections == 1


def test_a_connection_that_the_server_closed_while_idle_costs_no_request(fake_server, connection):
    connection.issue(spec())
    fake_server.hang_up_idle()
    gevent.sleep(0.05)
    assert connection.issue(spec()).outcome is Outcome.OK
    assert fake_server.connections == 2


def test_a_close_that_crosses_our_request_is_retried_once_when_the_connection_had_been_idle(
    fake_server, connection, monkeypatch
):
    monkeypatch.setattr(module, "_STALE_AFTER_SECONDS", 0.0)
    connection.issue(spec())
    fake_server.behaviour = lambda number: "close before" if number == 1 else "ok"
    assert connection.issue(spec()).outcome is Outcome.OK
    fake_server.behaviour = lambda number: "close before"
    assert connection.issue(spec()).outcome is Outcome.HTTP_ERROR
    assert len(fake_server.bodies) == 5


def test_a_close_right_after_our_request_on_a_used_connection_is_retried_once(fake_server, connection):
    connection.issue(spec())
    fake_server.behaviour = lambda number: "close before" if number == 1 else "ok"
    assert connection.issue(spec()).outcome is Outcome.OK
    fake_server.behaviour = lambda number: "close before"
    assert connection.issue(spec()).outcome is Outcome.HTTP_ERROR
    assert len(fake_server.bodies) == 5


def test_a_close_after_a_while_on_a_busy_connection_is_the_servers_failure(fake_server, connection, monkeypatch):
    monkeypatch.setattr(module, "_CROSSING_SECONDS", 0.0)
    connection.issue(spec())
    fake_server.behaviour = lambda number: "close before"
    assert connection.issue(spec()).outcome is Outcome.HTTP_ERROR
    assert len(fake_server.bodies) == 2


def test_a_body_that_never_ends_after_its_last_frame_is_let_go(fake_server, connection, monkeypatch):
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.05)
    fake_server.behaviour = lambda number: "no end"
    assert connection.issue(spec()).outcome is Outcome.OK
    connection.issue(spec())
    assert fake_server.connections == 2


def test_nobody_listening_is_the_targets_failure(connect, closed_url):
    record = connect(closed_url).issue(spec())
    assert (record.outcome, record.http_status, record.t_send_ns) == ("http_error", None, None)
    assert "connection refused" in (record.error or "")


def test_a_name_that_does_not_resolve_is_ours(connect):
    record = connect("http://nowhere.invalid:80").issue(spec())
    assert record.outcome is Outcome.CLIENT_ERROR
    assert "cannot resolve nowhere.invalid" in (record.error or "")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_a_shortage_on_our_side_is_ours_with_a_hint(fake_server, connection, monkeypatch, code):
    def fail(*_):
        raise OSError(code, "short")

    monkeypatch.setattr(connection, "_open_address", fail)
    record = connection.issue(spec())
    assert record.outcome is Outcome.CLIENT_ERROR
    assert "left" in (record.error or "")
    assert not fake_server.bodies


def test_a_server_that_rejects_before_it_has_read_everything_is_heard(connect):
    """The request is larger than the socket buffers, and the server answers and closes after the head."""

    def serve(listener):
        one, _ = listener.accept()
        one.recv(100)
        one.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        one.shutdown(socket.SHUT_WR)
        gone.wait(5)
        one.close()

    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        record = connect(f"http://127.0.0.1:{listener.getsockname()[1]}").issue(spec(body=b"x" * 20_000_000))
        gone.set()
        thread.join()
    assert (record.outcome, record.http_status) == ("http_error", 413)


def test_an_abort_ends_the_request_in_flight_with_the_given_outcome(fake_server, connection):
    fake_server.behaviour = lambda number: "hang"
    running = gevent.spawn(connection.issue, spec())
    gevent.spawn_later(0.05, connection.abort, Outcome.UNFINISHED)
    record = running.get(timeout=2)
    assert (record.outcome, record.frames) == ("unfinished", 1)
    assert connection.issue(spec()).outcome is Outcome.UNFINISHED
    assert len(fake_server.bodies) == 1


def test_a_killed_greenlet_closes_its_connection(fake_server, connection):
    fake_server.behaviour = lambda number: "hang"
    running = gevent.spawn(connection.issue, spec())
    gevent.sleep(0.05)
    running.kill()
    assert connection._socket is None


def test_retry_after_is_passed_on(fake_server, connection):
    fake_server.behaviour = lambda number: "429" if number == 0 else "ok"
    connection.issue(spec())
    assert connection.retry_after_seconds == 1.0
    connection.issue(spec())
    assert connection.retry_after_seconds is None


def test_the_api_key_is_sent_and_never_repeated(fake_server, connect):
    fake_server.behaviour = lambda number: "echo key"
    record = connect(fake_server.url, api_key="sk-secret").issue(spec())
    assert b"Authorization: Bearer sk-secret" in fake_server.headers[0]
    assert record.error == "HTTP 401 Nope: bad key ***"


@pytest.mark.parametrize("key", ["a\r\nX: y", "schlüssel", "a\tb"])
def test_a_key_that_cannot_be_a_header_is_refused_without_showing_it(key):
    with pytest.raises(ConfigError) as caught:
        Endpoint("http://h", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://h", "http://", "http://h:99999", "http://[::1", "http://h:x"]
)
def test_what_is_not_a_server_url_is_refused(url):
    with pytest.raises(ConfigError, match="not a URL"):
        Endpoint(url)


def test_a_password_in_the_url_is_refused_without_showing_it():
    with pytest.raises(ConfigError) as caught:
        Endpoint("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


@pytest.mark.skipif("sys.platform != 'linux'", reason="SO_TIMESTAMPING is Linux's")
def test_stamps_are_the_kernels_and_a_late_reader_keeps_them_and_owns_its_lateness(fake_server, connection):
    """The hub is held until the server has sent everything, and 10 ms more."""
    connection.issue(spec())
    fake_server.behaviour = lambda number: "paced"
    running = gevent.spawn(connection.issue, spec())
    while connection._answer is None or not connection._answer.result().frames:
        gevent.sleep(0.001)
    fake_server.pause.set()
    while fake_server.active:
        time.sleep(0.001)
    time.sleep(0.01)
    t_free_ns = CLOCK.now_ns()
    record = running.get()
    if record.arrival_source == "read":
        pytest.skip("this kernel gave no receive stamps")
    assert record.frames == 3
    assert t_free_ns - record.t_last_ns > 0.009 * NS
    assert record.arrival_lag_us > 9_000


def test_without_kernel_stamps_the_time_of_reading_is_used_and_said(fake_server, connect, monkeypatch):
    monkeypatch.setattr(module, "_RX_SOFTWARE_STAMPS", 0)
    record = connect(fake_server.url).issue(spec())
    assert (record.outcome, record.arrival_source, record.arrival_lag_us) == ("ok", "read", None)


def test_a_conversation_runs_over_a_connection(fake_server, connection):
    def ask():
        models = yield HttpRequest("/v1/models")
        reply = yield HttpRequest("/v1/completions", {"prompt": "a b", "max_tokens": 1})
        return models.json(), reply.json()["usage"]["prompt_tokens"]

    assert converse(ask(), connection.answer) == ({"data": []}, 9)
    assert fake_server.connections == 1


def test_a_question_that_gets_no_answer_says_why(fake_server, connect, connection, closed_url):
    assert connect(closed_url).answer(HttpRequest("/")).error == "refused"
    fake_server.behaviour = lambda number: "silent"
    late = connection.answer(HttpRequest("/v1/completions", {"stream": True}, timeout_s=0.05))
    assert (late.status, late.error) == (0, "timeout")
    assert connect("http://nowhere.invalid").answer(HttpRequest("/")).error == "dns"


@pytest.fixture
def tls_server(tmp_path, fake_server):
    """TLS in front of the scripted server, with a certificate made on the spot."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, "-keyout", key, "-out", certificate],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl made no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve():
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                inner = context.wrap_socket(plain, server_side=True)
                outer = socket.create_connection(("127.0.0.1", fake_server.port))
                opened.extend([inner, outer])
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    opened: list = []
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://localhost:{listener.getsockname()[1]}", certificate
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
    for one in opened:
        one.close()


def test_https_uses_the_same_path_with_a_verified_certificate(tls_server, fake_server, connect):
    url, certificate = tls_server
    untrusted = connect(url).issue(spec())
    assert untrusted.outcome is Outcome.HTTP_ERROR
    assert "certificate" in (untrusted.error or "")
    trusted = connect(url)
    trusted._endpoint.tls.load_verify_locations(certificate)
    records = [trusted.issue(spec()), trusted.issue(spec())]
    assert [record.outcome for record in records] == ["ok", "ok"]
    assert fake_server.connections == 1
    assert trusted.answer(HttpRequest("/v1/models")).status == 200
