"""Numbers on the command line."""

import argparse

import pytest

from plimsoll.arguments import duration, number, whole


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole(1, 9), "1", 1),
        (whole(1, 9), "9", 9),
        (number(0, 1), "0.5", 0.5),
        (number(0.001, 1000), "1e3", 1000.0),
        (duration(0), "0", 0.0),
        (duration(0), "30", 30.0),
        (duration(0), "90s", 90.0),
        (duration(0), "1.5m", 90.0),
        (duration(0), "1h", 3600.0),
        (duration(0), "2d", 172_800.0),
    ],
)
def test_what_is_read(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (whole(1, 9), "0", "outside 1 to 9"),
        (whole(1, 9), "10", "outside 1 to 9"),
        (whole(1, 9), "1.5", "not a whole number"),
        (whole(1, 9), "9" * 5000, "not a whole number"),
        (number(0, 1), "2", "outside 0 to 1"),
        (number(0, 1), "nan", "outside 0 to 1"),
        (number(0, 1), "x", "not a number"),
        (duration(0.05, 60), "0.01", "from 0.05 to 60 seconds"),
        (duration(0), "-1", "from 0 to"),
        (duration(0), "400d", "from 0 to"),
        (duration(0), "s", "write 30, 90s, 10m or 1h"),
        (duration(0), "", "write 30, 90s, 10m or 1h"),
        (duration(0), "infs", "from 0 to"),
    ],
)
def test_what_is_refused_says_what_would_do(read, text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        read(text)
