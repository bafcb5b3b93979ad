"""Logs are read in blocks of whole lines, and each line is stripped of what was put in front of it."""

import io
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.log_lines import (
    LINE_LIMIT_BYTES,
    Stamp,
    StampKind,
    parse_line,
    read_blocks,
    read_lines,
    split_block,
    strip_ansi,
)


def lines_of(data, **options):
    return [line for block in read_blocks(io.BytesIO(data), **options) for line in split_block(block)]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n\x00", codec="utf-8"), max_size=40), max_size=30),
    st.integers(1, 64),
)
def test_blocks_of_any_size_give_the_same_lines(lines, block_bytes):
    data = "\n".join(lines).encode()
    if data[:2] in (b"PK", b"BZ"):
        data = b" " + data
        lines = [" " + lines[0], *lines[1:]]
    assert lines_of(data, block_bytes=block_bytes) == [(n, line) for n, line in enumerate(lines, 1) if line]


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_can_be_read(data, block_bytes):
    for number, text in lines_of(b" " + data, block_bytes=block_bytes):
        assert parse_line(number, text).number == number


@pytest.mark.parametrize("block_bytes", [7, 4096, 1 << 20])
def test_an_absurd_line_is_cut_and_the_next_is_whole(block_bytes):
    data = b"first\n" + b"x" * (3 * LINE_LIMIT_BYTES) + b"\nthird\n" + b"y" * (2 * LINE_LIMIT_BYTES)
    numbers = [(number, text[:5], len(text)) for number, text in lines_of(data, block_bytes=block_bytes)]
    assert numbers == [
        (1, "first", 5), (2, "xxxxx", LINE_LIMIT_BYTES), (3, "third", 5), (4, "yyyyy", LINE_LIMIT_BYTES),
    ]  # fmt: skip


def test_a_progress_bar_is_taken_apart_and_keeps_its_line_number():
    data = b"one\n 10%|#   | 1/2\r100%|####| 2/2\rINFO done\r\nthree\r\n"
    assert lines_of(data) == [
        (1, "one"), (2, " 10%|#   | 1/2"), (2, "100%|####| 2/2"), (2, "INFO done"), (3, "three"),
    ]  # fmt: skip


def test_nuls_that_a_rotation_left_are_dropped():
    assert lines_of(b"\x00" * 1000 + b"INFO ready\n") == [(1, "INFO ready")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_log_that_powershell_wrote_is_read(tmp_path, encoding):
    log = tmp_path / "a.log"
    log.write_bytes("\ufeffllama_context: n_ctx = 8\nüber\n".encode(encoding))
    assert [text.removeprefix("\ufeff") for _, text in read_lines(log)] == ["llama_context: n_ctx = 8", "über"]


@pytest.mark.parametrize(
    "data", [b"\x1f\x8b\x08", b"PK\x03\x04..", b"GGUF\x03\x00", b"SQLite format 3\x00", b"\x7fELF"]
)
def test_what_is_plainly_no_log_is_refused_by_name(tmp_path, data):
    path = tmp_path / "a.log"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.log: an? .*(unpack|not a log)"):
        list(read_lines(path))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        list(read_lines(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_lines(tmp_path / "none.log"))
    with pytest.raises(ConfigError, match="device"):
        list(read_lines(tmp_path.__class__("/dev/zero")))


def test_a_log_that_grows_is_read_up_to_where_it_ended(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\n")
    seen = []
    with log.open("ab") as writer:
        for _, text in read_lines(log):
            seen.append(text)
            writer.write(b"more\n" * 10)
            writer.flush()
    assert seen == ["one", "two"]


def test_a_fifo_is_read_to_its_end(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    child = os.fork()
    if child == 0:
        path.write_bytes(b"one\ntwo\n")
        os._exit(0)
    assert [text for _, text in read_lines(path)] == ["one", "two"]
    os.waitpid(child, 0)


NOVEMBER = Stamp(28827614.0, StampKind.YEARLESS)


@pytest.mark.parametrize(
    ("text", "level", "stamp", "process", "pid", "rank", "source"),
    [
        ("(EngineCore_DP0 pid=12) INFO 11-29 15:40:14 [core.py:123] said", "INFO", NOVEMBER, "EngineCore_DP0", 12, "dp0", "core.py"),
        (
            "\x1b[1;36m(Worker_TP0_EP3 pid=9)\x1b[0;0m ERROR 11-29 15:40:14 [v1/worker/gpu_worker.py:12] said",
            "ERROR", NOVEMBER, "Worker_TP0_EP3", 9, "ep3 tp0", "gpu_worker.py",
        ),
        ("(VllmWorker rank=3 pid=9) WARNING 11-29 15:40:14 [a.py:1] said", "WARNING", NOVEMBER, "VllmWorker", 9, "rank3", "a.py"),
        ("(VllmWorker TP1 pid=9) INFO 11-29 15:40:14 [a.py:1] said", "INFO", NOVEMBER, "VllmWorker", 9, "tp1", "a.py"),
        ("(RayWorkerWrapper pid=9, ip=10.0.0.2) INFO 11-29 15:40:14 worker.py:267] said", "INFO", NOVEMBER, "RayWorkerWrapper", 9, "", "worker.py"),
        ("[2026-11-29 10:00:00 DP1 TP0 EP2] said", "", Stamp(1795946400.0, StampKind.LOCAL), "", None, "dp1 ep2 tp0", ""),
        ("[rank2]: said", "", None, "", None, "rank2", ""),
        ("[rank0]:[W1129 15:40:14.000000 533 torch/csrc/a.cpp:53] said", "WARNING", NOVEMBER, "", None, "rank0", "a.cpp"),
        ("0.01.013.413 I said", "INFO", Stamp(1.013413, StampKind.RELATIVE), "", None, "", ""),
        ("2.01.013.413 E said", "ERROR", Stamp(121.013413, StampKind.RELATIVE), "", None, "", ""),
        ("Nov 29 15:40:10 host vllm[12]: INFO 11-29 15:40:14 [a.py:1] said", "INFO", NOVEMBER, "", None, "", "a.py"),
        ("vllm-1  | INFO 11-29 15:40:14 [a.py:1] said", "INFO", NOVEMBER, "", None, "", "a.py"),
        ("2026-11-29T10:00:00.5Z stderr F INFO: said", "INFO", Stamp(1795946400.5, StampKind.ZONED), "", None, "", ""),
        ("2026-11-29T12:00:00+02:00 said", "", Stamp(1795946400.0, StampKind.ZONED), "", None, "", ""),
        (
            '{"log":"INFO 11-29 15:40:14 [a.py:1] \\u001b[1msaid\\n","stream":"stderr","time":"2026-11-29T15:40:14.1Z"}',
            "INFO", NOVEMBER, "", None, "", "a.py",
        ),
        ('{"level":"warn","msg":"said","ts":"2026-11-29T10:00:00Z"}', "WARNING", Stamp(1795946400.0, StampKind.ZONED), "", None, "", ""),
        ("INFO 02-30 15:40:14 [a.py:1] said", "INFO", None, "", None, "", "a.py"),
        ("said", "", None, "", None, "", ""),
    ],
)  # fmt: skip
def test_a_line_is_taken_apart(text, level, stamp, process, pid, rank, source):
    line = parse_line(7, text)
    assert (line.number, line.message) == (7, "said")
    assert (line.level, line.process, line.pid, line.rank, line.source) == (level, process, pid, rank, source)
    assert line.stamp == (stamp and Stamp(pytest.approx(stamp.seconds), stamp.kind))


@pytest.mark.parametrize(
    "text", ["", "   ", "{", '{"a": 1}', "[]", "(pid=) x", "INFO", "llama_context: n_ctx = 8", "[" * 9999]
)
def test_a_line_without_prefix_is_its_message(text):
    assert parse_line(1, text).message == text.strip() or parse_line(1, text).level


@given(st.text(max_size=200))
def test_any_text_can_be_taken_apart(text):
    assert strip_ansi(text).endswith(parse_line(1, text).message) or text.startswith("{")


def test_a_message_a_level_deeper_is_opened_with_its_level_time_source_and_rank():
    told = {
        "timestamp": "2025-08-29T14:40:17.288163Z",
        "level": "ERROR",
        "fields": {"message": "Shard 1 failed to start"},
        "target": "text_generation_launcher",
        "span": {"rank": 1, "name": "shard-manager"},
    }
    line = parse_line(1, json.dumps(told))
    assert (line.message, line.level, line.rank) == ("Shard 1 failed to start", "ERROR", "rank1")
    assert line.text == "text_generation_launcher: Shard 1 failed to start"
    assert line.stamp is not None
    assert line.stamp.kind == StampKind.ZONED


def test_lines_of_json_in_lines_of_json_are_opened_to_the_innermost():
    inner = json.dumps({"level": "ERROR", "fields": {"message": "\x1b[31mout of memory\x1b[0m"}, "target": "router"})
    line = parse_line(1, json.dumps({"log": inner + "\n", "stream": "stderr", "time": "2025-08-29T14:40:17Z"}))
    assert (line.message, line.level, line.source) == ("out of memory", "ERROR", "router")
    assert line.stamp is not None
    assert parse_line(1, json.dumps({"jsonPayload": {"message": "a"}, "severity": "WARNING"})).message == "a"
    assert parse_line(1, json.dumps({"textPayload": "b"})).message == "b"
    assert parse_line(1, json.dumps({"body": "c"})).message == "c"


@pytest.mark.parametrize(
    "told", [[], {"fields": []}, {"fields": {"message": 1}}, {"span": {"rank": True}}, {"level": 7}]
)
def test_json_without_a_message_stays_as_it_is(told):
    assert parse_line(1, json.dumps(told)).message == json.dumps(told)


@pytest.mark.parametrize("rank", [-1, True, "1", 10**30, None])
def test_a_rank_that_is_none_is_no_rank(rank):
    assert parse_line(1, json.dumps({"message": "a", "span": {"rank": rank}})).ranks == {}
