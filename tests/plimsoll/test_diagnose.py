"""`plimsoll diagnose`: what a person reads, what a program reads, and the exit code."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.cli import main

SAMPLES = Path(__file__).parents[1] / "samples"
FAILURES = SAMPLES / "logs" / "failures"
TOO_LONG = FAILURES / "vllm_0.15_kv_below_request_pp.log"


def run(capsys, *words):
    code = main(["diagnose", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_person_reads_the_cause_its_line_the_next_step_and_what_to_leave_alone(capsys):
    code, out, err = run(capsys, TOO_LONG)
    assert (code, err) == (0, "")
    first, place, *_ = out.splitlines()
    assert first.startswith("the KV cache is smaller than one request: one request of 262,144 tokens needs 24.00 GiB")
    assert place.strip() == f"--> {TOO_LONG}:7"
    assert "7 |>" in out
    assert "= next step: set max_model_len to 34736 at most" in out
    assert "= leave alone: max_num_seqs: one request alone does not fit" in out
    assert "= confidence: high" in out


def test_a_program_reads_one_document(capsys):
    code, out, _ = run(capsys, TOO_LONG, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "plimsoll.diagnose/1"
    assert (document["engine"], document["state"], document["lines"], document["starts"]) == ("vllm", "dead", 8, 1)
    found = document["diagnosis"]
    assert found["class"] == "kv_cache_below_request"
    assert found["figures"]["fits_tokens"] == 34736
    assert found["cause_line"] == 7
    assert found["confidence"] == "high"
    assert {"title", "cause", "next_step", "leave_alone", "doubts", "evidence", "ranks", "phase"} <= set(found)


def test_a_healthy_log_has_no_cause_and_says_what_state_it_ends_in(capsys):
    log = SAMPLES / "vllm" / "startup.log"
    code, out, _ = run(capsys, log)
    assert code == 3
    assert out.startswith("no cause found: the server was asked to stop at line 218, after 87 requests answered")
    code, out, _ = run(capsys, log, "--json")
    document = json.loads(out)
    assert code == 3
    assert (document["diagnosis"], document["state"]) == (None, "stopped")
    assert document["refused"] == {"bad field": 7}


def test_an_unknown_error_is_shown_without_being_called_the_cause(capsys, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("vLLM API server version 0.9\nFrobnicationError: the frob is out\n")
    code, out, _ = run(capsys, log)
    assert code == 3
    assert "of no known class" in out
    assert "2 |>FrobnicationError: the frob is out" in out


def test_standard_input_is_read(capsys, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(TOO_LONG.read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin)
    code, out, _ = run(capsys, "-")
    assert code == 0
    assert "--> <stdin>:7" in out


def test_earlier_starts_are_told_beside_the_last(capsys):
    _, out, _ = run(capsys, FAILURES / "vllm_three_starts.log")
    assert out.startswith("a setting is refused: 64 attention heads cannot be split over 3 cards")
    assert "this is the last of 3 starts in this log" in out
    assert "lines 1 to 4: one request of 40,960 tokens needs 10.00 GiB" in out


def test_words_of_the_log_are_no_markup_and_no_terminal_commands(capsys, tmp_path):
    log = tmp_path / "[bold]x.log"
    log.write_bytes(b"Starting to load model m\nERROR [red]CUDA out of memory[/red] \x1b]0;title\x07 \x9b31m [/]\n")
    code, out, _ = run(capsys, log)
    assert code == 0
    assert "[red]CUDA out of memory[/red]" in out
    assert "\x1b" not in out
    assert "\x9b" not in out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "a directory, not a log"),
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_bytes(b"GGUF\x03\x00\x00\x00"), "a GGUF model"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08\x00"), "zcat"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(capsys, tmp_path, make, words):
    path = tmp_path / "log"
    make(path)
    code, out, err = run(capsys, path)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_an_engine_that_nobody_knows_is_refused(capsys):
    code, _, err = run(capsys, TOO_LONG, "--engine", "triton")
    assert code == 2
    assert "tgi" in err


def test_an_empty_log_is_no_error(capsys, tmp_path):
    log = tmp_path / "empty.log"
    log.write_bytes(b"")
    code, out, _ = run(capsys, log)
    assert code == 3
    assert "no line of an inference server" in out


def test_the_command_starts_without_what_it_does_not_need():
    code = "import sys, plimsoll.diagnose; print(sorted({'locust', 'gevent', 'numpy', 'aiohttp', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
