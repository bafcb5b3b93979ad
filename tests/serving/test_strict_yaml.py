import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.strict_yaml import read_yaml


@pytest.fixture
def node_of(tmp_path):
    def write(text):
        path = tmp_path / "watch.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(path)

    return write


def test_values_are_read_as_what_they_are_asked_for(node_of):
    keys = node_of("url: http://h\ninterval: 1\nratio: 0.5\nlive: true\nlist: [a, b]\nmore: {x: 1}\nnone:\n").mapping()
    assert keys["url"].text() == "http://h"
    assert keys["interval"].integer() == 1
    assert keys["ratio"].number(0, 1) == 0.5
    assert keys["live"].flag() is True
    assert [item.text() for item in keys["list"].items()] == ["a", "b"]
    assert keys["more"].is_mapping()
    assert keys["more"].mapping(["x"])["x"].number() == 1
    assert keys["none"].is_null()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url: a\nintervall: 2\n", r"watch\.yaml:2: unknown key 'intervall'; did you mean 'interval'\?"),
        ("zzz: 2\n", r"watch\.yaml:1: unknown key 'zzz'; known here: url, interval"),
        ("url: a\nurl: b\n", r"watch\.yaml:2: key 'url' is written a second time"),
        ("interval: 1\n", r"watch\.yaml:1: key 'url' is missing"),
        ("- a\n", r"watch\.yaml:1: must be a mapping of keys to values, not a list"),
        ("just text\n", "must be a mapping of keys to values, not 'just text'"),
        ("1: a\n", r"watch\.yaml:1: a key must be plain text"),
    ],
)
def test_a_mistake_in_the_keys_is_named_with_its_line(node_of, text, said):
    with pytest.raises(ConfigError, match=said):
        node_of(text).mapping(["url", "interval"], required=["url"])


def test_an_unknown_key_deeper_down_names_what_it_is_in(node_of):
    inner = node_of("target:\n  urll: a\n").mapping()["target"]
    with pytest.raises(ConfigError, match=r":2: unknown key 'urll' in 'target'; did you mean 'url'"):
        inner.mapping(["url"])


@pytest.mark.parametrize(
    ("value", "ask", "said"),
    [
        ("[1]", lambda node: node.text(), "v: must be text, not a list"),
        ("7", lambda node: node.text(), "must be text, not '7'"),
        ("''", lambda node: node.text(), "must be text, not ''"),
        ("one", lambda node: node.number(), "must be a number, not 'one'"),
        ("true", lambda node: node.number(), "must be a number, not 'true'"),
        (".nan", lambda node: node.number(), r"must be a number, not '\.nan'"),
        (".inf", lambda node: node.number(), "must be a number"),
        ("", lambda node: node.number(), "must be a number, not nothing"),
        ("0", lambda node: node.number(0.1, 60), "v: is 0; it must be 0.1 to 60"),
        ("-1", lambda node: node.number(0), "it must be 0 or more"),
        ("9", lambda node: node.number(maximum=1), "it must be 1 or less"),
        ("1.5", lambda node: node.integer(), "must be a whole number, without quotes or fraction"),
        ("1", lambda node: node.flag(), "must be true or false, not '1'"),
        ("{a: 1}", lambda node: node.items(), "must be a list, not a mapping"),
        ("!!python/object:os.system x", lambda node: node.text(), "must be text"),
        ("2026-99-99", lambda node: node.number(), "must be a number"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_file_and_line(node_of, value, ask, said):
    node = node_of(f"# comment\nv: {value}\n").mapping()["v"]
    with pytest.raises(ConfigError, match=r"watch\.yaml:2: ") as caught:
        ask(node)
    assert caught.match(said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"a: [1\nb: 2\n", r"watch\.yaml:2: not valid YAML"),
        (b"a: b: c\n", r"watch\.yaml:1: not valid YAML"),
        (b"a: \xff\n", r"watch\.yaml:1: not UTF-8 text"),
        (b"a: \x00\n", "not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: " + b"x" * 2**20, "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_document_says_so(node_of, raw, said):
    with pytest.raises(ConfigError, match=said):
        node_of(raw)


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_a_config_error(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("any") / "any.yaml"
    path.write_bytes(raw)
    try:
        node = read_yaml(path)
        node.mapping()
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_yaml(pipe)
