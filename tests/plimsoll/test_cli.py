"""The command line says what is wrong, where, and what to do; and the exit code is the contract's."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from plimsoll.cli import COMMANDS, main
from plimsoll.conclusion import interrupted_document
from plimsoll.stress import finish

MODELS = {"object": "list", "data": [{"id": "hy3", "object": "model", "owned_by": "vllm", "max_model_len": 2048}]}


@pytest.fixture
def serve():
    """Start a server that answers each path with what the table says: (status, content type, body)."""
    servers = []

    def start(pages):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, kind, body = pages.get(self.path, pages.get("*", (404, "application/json", b"{}")))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def closed_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    url = f"http://127.0.0.1:{server.server_port}"
    server.server_close()
    return url


def answer(value, status=200):
    return status, "application/json", json.dumps(value).encode()


def stress(capsys, tmp_path, url, *arguments):
    """Exit code, what people read, and the document."""
    code = main(["stress", url, "--json", "--gpu", "none", "--out", str(tmp_path / "run.db"), *arguments])
    captured = capsys.readouterr()
    return code, captured.err, json.loads(captured.out)


def test_help_lists_every_command_and_exits_with_0(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_the_exit_codes(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"plimsoll {name}" in text
    assert "130 interrupted" in text


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_a_misspelt_command_is_corrected(capsys):
    assert main(["stres"]) == 2
    assert "did you mean 'stress'?" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plimsoll 0.")


def test_importing_the_command_line_does_not_import_the_load_generator():
    script = "import sys, plimsoll.cli; print([m for m in ('locust', 'gevent', 'numpy', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["stress", "demo", "watch", "smoke", "doctor"])
def test_no_command_drags_the_load_generator_into_its_own_process(command):
    script = f"import sys, plimsoll.{command}; print([m for m in ('locust', 'gevent', 'numpy', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nobody_listening(capsys, tmp_path, closed_url):
    code, text, document = stress(capsys, tmp_path, closed_url)
    assert code == 4
    assert document["exit_code"] == 4
    assert "nothing listens there" in text
    assert closed_url in text
    assert not (tmp_path / "run.db").exists()


def test_a_web_page_is_not_an_api(capsys, tmp_path, serve):
    url = serve({"*": (200, "text/html", b"<!doctype html><title>Grafana</title>")})
    code, text, _ = stress(capsys, tmp_path, url)
    assert code == 4
    assert "page" in text


def test_a_server_that_is_still_loading(capsys, tmp_path, serve):
    loading = answer({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503)
    code, text, _ = stress(capsys, tmp_path, serve({"*": loading}))
    assert code == 4
    assert "loading" in text.lower()


def test_an_engine_without_metrics_is_told_the_flag(capsys, tmp_path, serve):
    off = answer({"error": {"code": 501, "message": "no", "type": "not_supported_error"}}, 501)
    models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "llamacpp"}]}
    code, text, _ = stress(capsys, tmp_path, serve({"/v1/models": answer(models), "/metrics": off}))
    assert code == 4
    assert "--metrics" in text


def vllm_pages(**more):
    metrics = (
        b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        b"vllm:generation_tokens_total 0\nvllm:num_preemptions_total 0\n"
    )
    pages = {
        "/v1/models": answer(MODELS),
        "/version": answer({"version": "0.32.0"}),
        "/metrics": (200, "text/plain", metrics),
        "/health": (200, "text/plain", b""),
    }
    return pages | more


def test_a_model_that_the_server_does_not_have(capsys, tmp_path, serve):
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--model", "nope")
    assert code in (2, 4)
    assert "hy3" in text


def test_a_prompt_longer_than_the_context(capsys, tmp_path, serve):
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--prompt-tokens", "4000", "--max-batch", "8")
    assert code == 2
    assert "2048" in text


def test_a_server_that_answers_but_does_not_generate(capsys, tmp_path, serve):
    pages = vllm_pages(**{"/v1/chat/completions": answer({"error": {"message": "engine is dead"}}, 500)})
    code, text, _ = stress(capsys, tmp_path, serve(pages), "--max-batch", "8")
    assert code == 4
    assert "engine is dead" in text
    assert not (tmp_path / "run.db").exists()


@pytest.mark.parametrize("value", ["0", "-3", "eight", "99999999999"])
def test_a_batch_limit_that_cannot_be_meant(capsys, value):
    assert main(["stress", "http://127.0.0.1:1", "--max-batch", value]) == 2
    assert "--max-batch" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["stress", "--json"], ["stress", "http://x", "--json", "--duration", "soon"]])
def test_wrong_usage_is_a_document_too_when_one_was_asked_for(capsys, words):
    assert main(words) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["exit_code"]) == ("plimsoll.stress/1", 2)


def test_a_reader_that_goes_away_does_not_change_the_verdict(monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    monkeypatch.setattr("plimsoll.stress.os.dup2", lambda *_: None)
    assert finish({"exit_code": 1, "schema": "plimsoll.stress/1"}, as_json=True) == 1


@pytest.mark.parametrize("option", [("--pid", "4194000"), ("--gpu", "cuda"), ("--ceiling", "5000")])
def test_what_cannot_be_used_is_refused_before_the_server_is_asked(capsys, tmp_path, closed_url, option):
    code, text, _ = stress(capsys, tmp_path, closed_url, *option)
    assert code == 2
    assert option[1] in text


def test_an_absurd_batch_limit(capsys, tmp_path, serve):
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--max-batch", "100000")
    assert code == 2
    assert "4096" in text


def test_an_unknown_key_in_the_settings_is_named_with_its_line(capsys, tmp_path, serve):
    settings = tmp_path / "serving.yaml"
    settings.write_text("model: hy3\nmax_batch_sise: 48\n")
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--settings", str(settings))
    assert code == 2
    assert f"{settings}:2" in text
    assert "max_batch_size" in text


def test_settings_without_a_limit(capsys, tmp_path, serve):
    settings = tmp_path / "serving.yaml"
    settings.write_text("model: hy3\n")
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--settings", str(settings))
    assert code == 2
    assert "max_batch_size" in text


def test_a_log_that_is_not_one(capsys, tmp_path, serve):
    log = tmp_path / "x.log"
    log.write_text("hello\n")
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--log", str(log))
    assert code == 2
    assert str(log) in text


@pytest.mark.parametrize("argument", [("--workload", "chatty"), ("--plan", "marathon")])
def test_a_choice_that_does_not_exist_lists_those_that_do(capsys, tmp_path, closed_url, argument):
    code, text, _ = stress(capsys, tmp_path, closed_url, *argument)
    assert code == 2
    assert "interactive" in text or "load_line" in text


def test_an_output_that_exists_is_never_overwritten(capsys, tmp_path, closed_url):
    (tmp_path / "run.db").write_bytes(b"precious")
    code, text, _ = stress(capsys, tmp_path, closed_url)
    assert code == 2
    assert "exists" in text
    assert (tmp_path / "run.db").read_bytes() == b"precious"


def test_an_output_that_cannot_be_written_is_refused_before_any_request(capsys, tmp_path, closed_url):
    blocker = tmp_path / "file"
    blocker.write_text("")
    code = main(["stress", closed_url, "--out", str(blocker / "run.db")])
    assert code == 2
    assert "run.db" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://127.0.0.1:99999", "http://u:secret@127.0.0.1:1"])
def test_a_url_that_cannot_be_used(capsys, tmp_path, url):
    code, text, _ = stress(capsys, tmp_path, url)
    assert code == 2
    assert "secret" not in text


SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize("words", [["smoke"], ["stress", "--json"]])
def test_a_key_that_the_server_repeats_is_never_printed(capsys, serve, monkeypatch, words):
    monkeypatch.setenv("PLIMSOLL_API_KEY", SECRET)
    pages = vllm_pages(**{"/v1/chat/completions": answer({"error": {"message": f"bad key Bearer {SECRET} here"}}, 400)})
    assert main([words[0], serve(pages), *words[1:]]) in (1, 4)
    captured = capsys.readouterr()
    assert "bad key" in captured.out + captured.err
    assert SECRET not in captured.out + captured.err


def test_what_a_server_says_cannot_speak_to_the_terminal(capsys, serve):
    nasty = {"error": {"message": "a [/red] b \x1b[31m c\x07\nd \ud800 e"}}
    assert main(["smoke", serve(vllm_pages(**{"/v1/chat/completions": answer(nasty, 500)}))]) == 1
    printed = capsys.readouterr().out
    assert "[/red]" in printed
    assert not set("\x1b\x07") & set(printed)
    assert printed.count("\n") == 5, "one line, and one for each layer"


@pytest.mark.parametrize("option", ["--log", "--settings"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(capsys, tmp_path, closed_url, option):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, text, _ = stress(capsys, tmp_path, closed_url, option, str(pipe))
    assert code == 2
    assert "not a regular file" in text


def test_settings_of_another_engine_are_refused(capsys, tmp_path, serve):
    settings = tmp_path / "serving.yaml"
    settings.write_text("engine: llamacpp\nmax_batch_size: 8\n")
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--settings", str(settings))
    assert code == 2
    assert f"{settings}:1" in text


def test_a_log_with_an_endless_figure_is_no_log(capsys, tmp_path, serve):
    log = tmp_path / "x.log"
    log.write_text(f"'max_num_seqs': {'9' * 5000}\n")
    code, text, _ = stress(capsys, tmp_path, serve(vllm_pages()), "--log", str(log))
    assert code == 2
    assert "right log" in text


def test_an_interrupted_preflight_is_rendered_too(capsys):
    workload = {"name": "interactive", "prompt_tokens": 1, "output_tokens": 1, "seed": 1}
    assert finish(interrupted_document(run="r.db", url="http://x", workload=workload), as_json=False) == 130
    assert "interrupted" in capsys.readouterr().out


def test_a_full_disk_behind_stdout_does_not_change_the_verdict():
    script = "import sys; from plimsoll.stress import finish; sys.exit(finish({'exit_code': 3, 'schema': 'x'}, as_json=True))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert "No space left" in done.stderr


def test_an_error_keeps_its_exit_code_whoever_reads():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "plimsoll", "smoke", "ftp://x", "--json"]
        done = subprocess.run(command, stdout=full, stderr=full, check=False)
    assert done.returncode == 2


def test_smoke_of_nobody(capsys, closed_url):
    assert main(["smoke", closed_url]) == 4
    assert "nothing listens there" in capsys.readouterr().err


def test_doctor_says_what_is_installed_and_fails_for_a_target_it_cannot_use(capsys, closed_url):
    assert main(["doctor", closed_url, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "plimsoll.doctor/1"
    assert set(document["packages"]) == {"serving", "monitor", "loadgen", "alerts", "plimsoll"}
    assert "nothing listens there" in document["targets"][0]["problem"]


def test_a_stale_batch_size_is_said_before_anything_is_measured(capsys, tmp_path, serve):
    settings = tmp_path / "serving.yaml"
    settings.write_text("max_batch_size: 8\ntensor_parallel_size: 4\nderived_from:\n  tensor_parallel_size: 8\n")
    pages = vllm_pages(**{"/v1/chat/completions": answer({"error": {"message": "no"}}, 500)})
    _, text, _ = stress(capsys, tmp_path, serve(pages), "--settings", str(settings))
    assert "max_batch_size 8 is stale: it was derived from tensor_parallel_size 8" in text
