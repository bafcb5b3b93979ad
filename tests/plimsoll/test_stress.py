"""What a stress run reads of its server's log: what was written since it began, wherever that is now."""

import pytest

from plimsoll.stress import _read_since


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        (b"start\n", b"start\nout of memory\n", "out of memory\n"),
        (b"start\n", b"start\n", ""),
        (b"a long old log\n", b"new\n", "new\n"),
        (b"", b"\xff\n", "\N{REPLACEMENT CHARACTER}\n"),
    ],
)
def test_a_log_is_read_from_where_it_was_and_a_new_one_from_its_start(tmp_path, before, after, read):
    log = tmp_path / "log"
    log.write_bytes(after)
    assert _read_since(log, len(before)) == read


def test_of_a_long_log_only_the_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("plimsoll.stress.LOG_TAIL_BYTES", 8)
    (tmp_path / "log").write_bytes(b"0123456789" * 10)
    assert _read_since(tmp_path / "log", 3) == "23456789"
