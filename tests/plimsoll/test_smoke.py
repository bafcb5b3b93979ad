"""What the command says of servers that lie, break off, or are not the one whose metrics are read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plimsoll import smoke
from plimsoll.cli import main

HELLO = {"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": 12, "completion_tokens": 8}}


class _Liar(BaseHTTPRequestHandler):
    """A server in vLLM's words whose answer and counters are the test's."""

    protocol_version = "HTTP/1.1"
    answer: bytes
    counters: tuple[int, int]
    started: tuple[int, int]
    running: int
    asked: bool

    def do_GET(self):
        if self.path == "/v1/models":
            card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
            return self._send(json.dumps({"object": "list", "data": [card]}).encode())
        if self.path != "/metrics":
            return self._send(b"{}", 404)
        after = type(self).asked
        lines = (
            f'vllm:generation_tokens_total{{model_name="m"}} {self.counters[after]}',
            f'vllm:num_requests_running{{model_name="m"}} {self.running}',
            f"process_start_time_seconds {self.started[after]}",
        )
        return self._send(("\n".join(lines) + "\n").encode(), content_type="text/plain")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        type(self).asked = True
        if self.answer is None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            self.close_connection = True
            return
        self._send(self.answer)

    def _send(self, body, status=200, content_type="application/json"):
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def asked(capsys, monkeypatch):
    """Runs the command against such a server: exit code and document."""
    monkeypatch.setattr(smoke, "_TAIL_SECONDS", 0.3)

    def ask(answer=HELLO, counters=(100, 108), started=(1000, 1000), running=0):
        body = answer if answer is None or isinstance(answer, bytes) else json.dumps(answer).encode()
        told = {"answer": body, "counters": counters, "started": started, "running": running, "asked": False}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Liar", (_Liar,), told))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            code = main(["smoke", f"http://127.0.0.1:{server.server_port}", "--gpu", "none", "--json"])
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        document = json.loads(out, parse_constant=pytest.fail)
        assert document["schema"] == "plimsoll.smoke/1"
        layers = {layer["name"]: layer["outcome"] for layer in document["layers"]}
        return code, document["verdict"], document["reason"], layers["reached_the_model"], document

    return ask


def test_an_answer_that_moved_the_servers_counters_passes(asked):
    code, verdict, _, reached, document = asked()
    assert (code, verdict, reached) == (0, "pass", "pass")
    assert document["answer"]["model"] is None
    assert "hello" not in json.dumps(document)


def test_counters_that_stand_still_belong_to_another_server(asked):
    code, verdict, reason, reached, _ = asked(counters=(100, 100))
    assert (code, verdict, reached) == (3, "inconclusive", "fail")
    assert "stood still" in reason


@pytest.mark.parametrize(("counters", "started"), [((100, 8), (1000, 1000)), ((100, 108), (1000, 2000))])
def test_counters_of_a_server_that_was_restarted_meanwhile_prove_nothing(asked, counters, started):
    code, verdict, reason, reached, _ = asked(counters=counters, started=started)
    assert (code, verdict, reached) == (3, "inconclusive", "fail")
    assert "restarted meanwhile" in reason


def test_where_others_ask_too_what_moved_the_counters_is_not_known(asked):
    code, verdict, _, reached, document = asked(running=3)
    assert (code, verdict, reached) == (0, "pass", None)
    assert "other requests ran too" in document["layers"][3]["detail"]


def test_an_answer_that_names_another_model_is_told(asked):
    code, _, _, _, document = asked(HELLO | {"model": "fallback"})
    assert (code, document["answer"]["model"]) == (0, "fallback")
    assert "names its model 'fallback'" in document["layers"][2]["detail"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"object": "error", "message": "boom", "code": 400}, "an error inside: boom"),
        (HELLO | {"choices": [{"message": {"content": " \n"}}]}, "white space"),
        (HELLO | {"usage": {"completion_tokens": 0}}, "no completion tokens"),
        (b'{"a":' * 100_000, "not a JSON object"),
        (b'{"choices":[{"message":{"content":"' + b"x" * 20_000_000 + b'"}}]}', "larger than 16 MiB"),
        (None, "in the middle of its answer"),
    ],
)
def test_an_answer_that_is_none_fails_in_words_that_say_why(asked, answer, says):
    code, verdict, reason, reached, _ = asked(answer)
    assert (code, verdict, reached) == (1, "fail", None)
    assert says in reason
