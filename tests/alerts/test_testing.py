import pytest

from alerts.testing import RememberedPast, read_points, series
from serving.clock import NS
from serving.errors import ConfigError
from serving.records import Event


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("", ()),
        ("7", (7,)),
        ("0+10x5 _ 7", (0, 10, 20, 30, 40, 50, None, 7)),
        ("50-10x2", (50, 40, 30)),
        ("-1+1x2", (-1, 0, 1)),
        ("7x2", (7, 7, 7)),
        ("_x3 1", (None, None, None, 1)),
        ("1e9+2.5e6x1", (1e9, 1.0025e9)),
    ],
)
def test_words_are_points(text, points):
    assert read_points(text) == points


@pytest.mark.parametrize("text", ["x5", "1+2", "_+1x2", "1 two", "1x", "1*3"])
def test_a_word_outside_the_language_is_refused(text):
    with pytest.raises(ConfigError, match="is not one of"):
        read_points(text)


def test_a_missing_point_takes_its_time():
    one = series("up", "1 _ 0", interval_s=15, start_ns=NS, labels=[("gpu", "0")])
    assert (one.t_ns, one.values, one.labels) == ((NS, 31 * NS), (1, 0), (("gpu", "0"),))


def test_memory_cuts_series_and_events_to_the_window():
    memory = RememberedPast([series("up", "1 2 3 4"), series("other", "5")], [Event(90 * NS, "restart", "")])
    (cut,) = memory.series("up", 60 * NS, 120 * NS)
    assert cut.values == (2, 3)
    assert memory.series("up", 1000 * NS, 2000 * NS) == ()
    assert len(memory.events(60 * NS, 120 * NS)) == 1
    assert memory.events(0, 60 * NS) == ()
