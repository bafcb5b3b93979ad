"""A serving file is changed to the byte, kept in versions, and whole whenever the power goes."""

import errno
import os
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError, RecordError
from serving.settings import (
    Difference,
    SettingEntry,
    apply,
    backup,
    diff,
    edit_settings,
    read_settings,
    restore,
    stored_settings,
    versions,
    write_settings,
)
from serving.settings.editing import _edited
from serving.settings.versions import locked

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
OLD = b"# the old one\nmax_batch_size: 48\nmodel: m\n"
NEW = b"# the new one\nmax_batch_size: 64\nmodel: m\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "hy3-serving.yaml"
    path.write_bytes(OLD)
    return path


def edited(text, changes, reasons=None):
    return _edited(text.encode(), changes, reasons or {}, "f.yaml").decode()


# ---- editing


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        # The name of the key, its alignment and its comment stay.
        ("max-num-seqs:   48   # why\n", {"max_batch_size": 64}, "max-num-seqs:   64   # why\n"),
        ("--parallel: 8\n", {"max_batch_size": 16}, "--parallel: 16\n"),
        ("disable_radix_cache: true\n", {"enable_prefix_cache": True}, "disable_radix_cache: false\n"),
        # Quotes stay where text stays text.
        ("model: 'a b' # x\n", {"model": "c"}, "model: 'c' # x\n"),
        ('model: "a"\nengine: vllm\n', {"model": "it's #1"}, 'model: "it\'s #1"\nengine: vllm\n'),
        ("model: a\n", {"model": "b # c"}, "model: 'b # c'\n"),
        ("model: a\n", {"model": "48"}, "model: '48'\n"),
        ("kv_cache_quant: off # yet\n", {"kv_cache_dtype": "fp8"}, "kv_cache_quant: fp8 # yet\n"),
        ("gpu_memory_utilization: .90\n", {"gpu_memory_utilization": 0.85}, "gpu_memory_utilization: 0.85\n"),
        ("kv_unified: yes\n", {"kv_unified": False}, "kv_unified: false\n"),
        # Values over several lines.
        ("model: >-\n  a\n  b\n\n# c\nengine: vllm\n", {"model": "d"}, "model: d\n\n# c\nengine: vllm\n"),
        ("model: a\n  b\nengine: vllm\n", {"model": "d"}, "model: d\nengine: vllm\n"),
        # Other ways to write a mapping.
        ("{ model: m,  np: 8 }\n", {"max_batch_size": 9}, "{ model: m,  np: 9 }\n"),
        ("{model: m, np: 8}", {"model": "a, b"}, "{model: 'a, b', np: 8}"),
        ("? model\n: m\n", {"model": "n"}, "? model\n: n\n"),
        ("model: &m m\ndtype: *m\n", {"dtype": "half"}, "model: &m m\ndtype: half\n"),
        # A new key goes to the end of the document, as the file has its lines.
        ("model: m\n", {"max_batch_size": 8}, "model: m\nmax_batch_size: 8\n"),
        ("model: m", {"max_batch_size": 8}, "model: m\nmax_batch_size: 8"),
        (
            "np: 8\nderived_from:\n  tp: 8\n",
            {"max_model_len": 9, "derived_from": {"tensor_parallel_size": 4, "gpus": 3}},
            "np: 8\nderived_from:\n  tp: 4\n  gpus: 3\nmax_model_len: 9\n",
        ),
        ("model: m\r\n", {"max_batch_size": 8}, "model: m\r\nmax_batch_size: 8\r\n"),
        ("model: m\n\n# tail\n", {"max_batch_size": 8}, "model: m\n\n# tail\nmax_batch_size: 8\n"),
        ("---\nmodel: m\n...\n# tail\n", {"max_batch_size": 8}, "---\nmodel: m\nmax_batch_size: 8\n...\n# tail\n"),
        ("  model: m\n", {"gpus": 8, "gpu": "h200"}, "  model: m\n  gpus: 8\n  gpu: h200\n"),
        ("\ufeffmodel: m\n", {"gpus": 8}, "\ufeffmodel: m\ngpus: 8\n"),
        # A key that goes takes its line along, and no comment of another.
        ("# a\nmodel: m # m\n# b\ngpus: 8\n", {"model": None}, "# a\n# b\ngpus: 8\n"),
        ("model: m\ngpus: 8", {"gpus": None}, "model: m\n"),
        ("model: m\n", {"gpus": None}, "model: m\n"),
        # What the batch size was derived from is one thing: given whole.
        (
            "np: 8\nderived_from:   # budget\n    tp: 8 # t\n    # in\n    gpu: h200\n\n# end\nmodel: m\n",
            {"derived_from": {"tensor_parallel_size": 4, "gpus": 4}},
            "np: 8\nderived_from:   # budget\n    tp: 4 # t\n    # in\n    gpus: 4\n\n# end\nmodel: m\n",
        ),
        ("np: 8\nderived_from: {tp: 8}\n", {"derived_from": {"gpus": 4}}, "np: 8\nderived_from: {gpus: 4}\n"),
        ("np: 8\n", {"derived_from": {"gpus": 4}}, "np: 8\nderived_from:\n  gpus: 4\n"),
        ("np: 8\nderived_from:\n  gpus: 4 # x\nmodel: m\n", {"derived_from": None}, "np: 8\nmodel: m\n"),
        ("np: 8\nderived_from:\n  gpus: 4\n", {"derived_from": {}}, "np: 8\nderived_from:\n  {}\n"),
    ],
)
def test_an_edit_changes_what_was_asked_and_leaves_every_other_byte(before, changes, after):
    assert edited(before, changes) == after


def test_a_new_key_has_its_reason_beside_it_or_above_it():
    assert edited("model: m\n", {"max_batch_size": 8}, {"max_batch_size": "fits\n twice"}) == (
        "model: m\nmax_batch_size: 8  # fits twice\n"
    )
    lines = edited("model: m\r\n", {"max_batch_size": 8}, {"max_batch_size": "word " * 40}).split("\r\n")
    assert [line.startswith("# word word") for line in lines] == [False, True, True, False, False]
    assert lines[3] == "max_batch_size: 8"
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("before", "changes", "says"),
    [
        ("max_batch: 8\n", {"model": "m"}, "f.yaml:1: unknown key 'max_batch'"),
        ("np: 8\n", {"max_batch_size": 0}, "f.yaml:1: np: is 0; it must be 1 to 65536"),
        ("np: 8\n", {"max_batch_size": "many"}, "f.yaml:1: np: must be a whole number"),
        ("np: 8\n", {"colour": "blue"}, "f.yaml: 'colour' is no canonical key"),
        ("np: 8\n", {"np": 9}, "f.yaml: 'np' is no canonical key; use 'max_batch_size'"),
        ("np: 8\n", {"max_batch_size": None}, "f.yaml: the file is empty"),
        ("{np: 8}\n", {"model": "m"}, "is written in braces; write one key a line, so that model can be added"),
        ("{np: 8, model: m}\n", {"model": None}, "model does not begin its line; remove it by hand"),
        ("model: &m m\ndtype: *m\n", {"model": "n"}, "not valid YAML: found undefined alias"),
        ("cpu_moe: true\n", {"cpu_moe_layers": True}, "cannot set cpu_moe_layers to True"),
    ],
)
def test_an_edit_that_would_not_say_what_was_asked_is_refused(file, before, changes, says):
    with pytest.raises(ConfigError) as error:
        edited(before, changes)
    assert says in str(error.value)
    file.write_text(before)
    with pytest.raises(ConfigError):
        edit_settings(file, changes)
    assert file.read_text() == before


COMMENT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20).map(
    lambda text: f"# {text}"
)
BETWEEN = st.lists(st.one_of(st.just(""), COMMENT, COMMENT.map(lambda text: f"   {text}")), max_size=3)
COUNTS = st.integers(1, 9999)
NAMES = {
    "max_batch_size": ("max_batch_size", "max-num-seqs", "--parallel"),
    "max_model_len": ("max_model_len", '"context_length"'),
    "gpus": ("gpus", "'cards'"),
    "model": ("model", "model-path", "--model_id"),
    "dtype": ("dtype",),
}
TEXTS = ("model", "dtype")


@st.composite
def files(draw):
    """A file in pieces: text before a value, the value, and so on; and the place of each key's value."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    pieces = [draw(st.sampled_from(["", "\ufeff"])) + draw(st.sampled_from(["", f"---{newline}"]))]
    places, quotes = {}, {}
    for key in draw(st.permutations(list(NAMES)))[: draw(st.integers(1, len(NAMES)))]:
        pieces[-1] += "".join(line + newline for line in draw(BETWEEN))
        pieces[-1] += draw(st.sampled_from(NAMES[key])) + ":" + " " * draw(st.integers(1, 4))
        quotes[key] = draw(st.sampled_from(["", "'", '"'])) if key in TEXTS else ""
        places[key] = len(pieces)
        pieces += [f"{quotes[key]}x{draw(COUNTS)}{quotes[key]}" if key in TEXTS else str(draw(COUNTS)), ""]
        pieces[-1] += draw(st.sampled_from(["", "   "])) + draw(
            st.one_of(st.just(""), COMMENT.map(lambda text: f" {text}"))
        )
        pieces[-1] += newline
    pieces[-1] += "".join(line + newline for line in draw(BETWEEN))
    if draw(st.booleans()):
        pieces[-1] = pieces[-1].removesuffix(newline)
    return pieces, places, quotes


@given(files(), st.data())
def test_comments_order_quotes_spelling_and_line_ends_survive_every_edit(made, data):
    pieces, places, quotes = made
    chosen = data.draw(st.lists(st.sampled_from(sorted(places)), unique=True, min_size=1))
    changes = {key: f"y{data.draw(COUNTS)}" if key in TEXTS else data.draw(COUNTS) for key in chosen}
    expected = list(pieces)
    for key, value in changes.items():
        expected[places[key]] = f"{quotes[key]}{value}{quotes[key]}"
    after = edited("".join(pieces), changes)
    assert after == "".join(expected)
    back = {key: pieces[places[key]].strip("'\"") for key in chosen}
    assert edited(after, {key: one if key in TEXTS else int(one) for key, one in back.items()}) == "".join(pieces)


@given(files(), st.data())
def test_adding_a_key_and_removing_it_again_gives_the_same_file(made, data):
    text = "".join(made[0])
    added = edited(text, {"enable_prefix_cache": True}, {"enable_prefix_cache": data.draw(st.text(max_size=200))})
    kept = added.removeprefix(text)
    assert added.startswith(text)
    assert kept.rstrip("\r\n").splitlines()[-1].startswith("enable_prefix_cache: true")
    assert added.endswith(("\n", "\r\n")) == text.endswith("\n")
    assert [
        line for line in edited(added, {"enable_prefix_cache": None}).splitlines() if line not in kept.splitlines()
    ] == [line for line in text.splitlines() if line not in kept.splitlines()]


def test_an_edit_of_a_file_gives_what_it_now_says(file):
    read = edit_settings(file, {"max_batch_size": 64, "gpus": 8}, reasons={"gpus": "as delivered"})
    assert read == read_settings(file)
    assert file.read_bytes() == OLD.replace(b"48", b"64") + b"gpus: 8  # as delivered\n"


def test_a_file_is_written_with_its_reasons(tmp_path):
    path = tmp_path / "new.yaml"
    read = write_settings(
        path,
        [
            SettingEntry("model", "/models/hy3"),
            SettingEntry("max_batch_size", 48, "what the KV cache holds at 3000 tokens each"),
            SettingEntry("gpu_memory_utilization", 0.9, "leaves " + "room " * 30),
            SettingEntry("enable_prefix_cache", True),
            SettingEntry("derived_from", {"tensor_parallel_size": 8, "gpu": "h200"}, "the inputs"),
        ],
        heading="Hy3 on 8 x H200\n\nby plimsoll budget",
    )
    assert read == read_settings(path)
    assert (read.max_batch_size, read.derived_from) == (48, {"tensor_parallel_size": 8, "gpu": "h200"})
    lines = path.read_text().splitlines()
    assert lines[:5] == [
        "# Hy3 on 8 x H200",
        "#",
        "# by plimsoll budget",
        "model: /models/hy3",
        "max_batch_size: 48  # what the KV cache holds at 3000 tokens each",
    ]
    assert lines[5].startswith("# leaves room room")
    assert lines[7:] == [
        "gpu_memory_utilization: 0.9",
        "enable_prefix_cache: true",
        "derived_from:  # the inputs",
        "  tensor_parallel_size: 8",
        "  gpu: h200",
    ]


def test_a_file_that_is_there_is_not_written_over_unasked(file):
    with pytest.raises(ConfigError, match="exists already"):
        write_settings(file, [SettingEntry("max_batch_size", 8)])
    assert file.read_bytes() == OLD
    write_settings(file, [SettingEntry("max_batch_size", 8)], overwrite=True)
    assert file.read_bytes() == b"max_batch_size: 8\n"


def test_entries_that_make_no_serving_file_leave_none(tmp_path):
    with pytest.raises(ConfigError, match=r"new\.yaml:1: unknown key 'colour'"):
        write_settings(tmp_path / "new.yaml", [SettingEntry("colour", "blue")])
    assert list(tmp_path.iterdir()) == []


@given(
    st.dictionaries(
        st.sampled_from(["model", "gpu", "dtype"]), st.text(min_size=1).filter(lambda text: text.strip()), min_size=1
    )
)
def test_any_text_is_written_so_that_it_reads_the_same_or_is_refused(values):
    try:
        raw = edited("max_batch_size: 8 # c\n", values)
    except (ConfigError, UnicodeEncodeError):
        # Characters that no YAML file may hold.
        assert any(not char.isprintable() for text in values.values() for char in text)
        return
    assert raw.startswith("max_batch_size: 8 # c\n")


# ---- versions


def test_a_version_is_the_file_to_the_byte_with_number_hash_time_and_reason(file):
    one = backup(file, reason="before\nthe change", at=NOON)
    assert Path(one.path).read_bytes() == OLD
    assert Path(one.path) == file.with_name("hy3-serving.yaml.plimsoll") / f"0001-{one.sha256[:12]}.yaml"
    assert (one.version, one.size_bytes) == (1, len(OLD))
    assert [(use.at, use.reason) for use in one.uses] == [("2026-11-29T12:00:00+00:00", "before the change")]
    assert versions(file) == (one,)


def test_the_same_content_is_stored_once_and_each_use_of_it_noted(file):
    first = backup(file, reason="a", at=NOON)
    file.write_bytes(NEW)
    second = backup(file, reason="b", at=NOON)
    file.write_bytes(OLD)
    again = backup(file, reason="c", at=NOON)
    assert (first.version, second.version, again.version) == (1, 2, 1)
    assert [use.reason for use in again.uses] == ["a", "c"]
    assert [(one.version, len(one.uses)) for one in versions(file)] == [(1, 2), (2, 1)]


def test_a_restored_file_is_the_version_to_the_byte_and_what_it_replaces_is_stored(file):
    file.write_bytes(b"\xef\xbb\xbfmax_batch_size: 8\r\n\r\n# end")
    whole = file.read_bytes()
    backup(file)
    file.write_bytes(NEW)
    assert restore(file, 1, at=NOON).version == 1
    assert file.read_bytes() == whole
    kept = versions(file)[1]
    assert Path(kept.path).read_bytes() == NEW
    assert kept.uses[0].reason == "before version 1 was restored"


def test_a_file_that_is_gone_is_restored(file):
    backup(file)
    file.unlink()
    restore(file, 1)
    assert file.read_bytes() == OLD


def test_a_file_that_no_longer_reads_is_stored_and_restored_all_the_same(file):
    backup(file)
    file.write_bytes(b"\xff\x00 no settings")
    assert backup(file).version == 2
    restore(file, 1)
    restore(file, 2)
    assert file.read_bytes() == b"\xff\x00 no settings"
    with pytest.raises(ConfigError, match="not UTF-8"):
        stored_settings(file, 2)


def test_a_version_that_was_changed_is_refused(file):
    one = backup(file)
    Path(one.path).write_bytes(NEW)
    for use in (restore, stored_settings):
        with pytest.raises(RecordError, match="was changed since it was stored"):
            use(file, 1)
    assert file.read_bytes() == OLD
    assert backup(file).version == 2


def test_a_version_that_was_changed_by_hand_is_no_backup_of_what_it_says_now(file):
    first = backup(file)
    Path(first.path).write_bytes(NEW)
    file.write_bytes(NEW)
    second = backup(file)
    assert second.version == 2
    file.write_bytes(OLD)
    restore(file, 2)
    assert file.read_bytes() == NEW


def test_two_versions_of_one_number_are_told_apart_or_refused(file):
    first = backup(file, reason="ours")
    other = Path(first.path).with_name("0001-" + sha256(NEW).hexdigest()[:12] + ".yaml")
    other.write_bytes(NEW)
    assert [one.uses != () for one in versions(file) if one.sha256 == first.sha256] == [True]
    with pytest.raises(RecordError, match=r"2 stored versions have the number 1 .*rename"):
        restore(file, 1)
    assert file.read_bytes() == OLD
    other.rename(other.with_name(other.name.replace("0001", "0002")))
    assert restore(file, 2).version == 2
    assert file.read_bytes() == NEW


def test_a_version_that_is_not_there_is_refused_with_those_that_are(file):
    with pytest.raises(ConfigError, match=r"has no stored version 3; stored: none"):
        restore(file, 3)
    backup(file)
    with pytest.raises(ConfigError, match=r"has no stored version 3; stored: 1$"):
        restore(file, 3)


def test_notes_that_a_crash_cut_short_cost_only_themselves(file):
    backup(file, reason="a", at=NOON)
    uses = file.with_name("hy3-serving.yaml.plimsoll") / "uses.jsonl"
    uses.write_bytes(uses.read_bytes() + b'{"version": 1, "sha2')
    backup(file, reason="b", at=NOON)
    assert [use.reason for use in versions(file)[0].uses] == ["a", "b"]
    uses.unlink()
    assert versions(file)[0].uses == ()


def test_what_else_lies_in_the_folder_is_no_version(file):
    backup(file)
    folder = file.with_name("hy3-serving.yaml.plimsoll")
    (folder / "0002-notahash.yaml").write_text("x")
    (folder / "README").write_text("x")
    assert [one.version for one in versions(file)] == [1]
    assert versions(file.with_name("other.yaml")) == ()


def test_files_differ_by_what_they_say_not_by_how(tmp_path):
    (tmp_path / "a.yaml").write_text("np: 8\nmodel: m\nderived_from: {gpus: 8}\ntp: 8\n")
    (tmp_path / "b.yaml").write_text("# c\nmodel: 'm'\nmax_batch_size: 16\nderived_from:\n  cards: 4\ngpu: x\ntp: 8\n")
    was, now = read_settings(tmp_path / "a.yaml"), read_settings(tmp_path / "b.yaml")
    assert diff(was, was) == ()
    assert set(diff(was, now)) == {
        Difference("max_batch_size", 8, 16, 1, 3),
        Difference("gpu", None, "x", None, 6),
        Difference("derived_from.gpus", 8, 4, 3, 5),
    }
    assert diff(now, was)[0] == Difference("gpu", "x", None, 6, None)


# ---- the disk


def test_a_file_keeps_its_mode_and_a_link_stays_one(tmp_path, file):
    file.chmod(0o640)
    link = tmp_path / "links" / "current.yaml"
    link.parent.mkdir()
    link.symlink_to("../hy3-serving.yaml")
    backup(link)
    apply(link, NEW)
    assert link.is_symlink()
    assert file.read_bytes() == NEW
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(Path(versions(file)[0].path).stat().st_mode) == 0o640
    assert [path.name for path in link.parent.iterdir()] == ["current.yaml"]
    assert versions(link) == versions(file)


def test_what_is_no_serving_file_does_not_replace_one(file):
    for text in ("", "max_batch: 8\n", "max_batch_size: 0\n", b"\xff"):
        with pytest.raises(ConfigError):
            apply(file, text)
    assert file.read_bytes() == OLD
    assert list(file.parent.iterdir()) == [file]


def test_places_that_cannot_be_written_are_told(tmp_path, file):
    with pytest.raises(RecordError, match=r"nowhere: cannot be written: No such file"):
        apply(tmp_path / "nowhere" / "f.yaml", NEW)
    with pytest.raises(RecordError, match="is no regular file"):
        apply(tmp_path, NEW)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        backup(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="directory"):
        edit_settings(tmp_path, {"model": "m"})
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises((ConfigError, RecordError)):
        apply(loop, NEW)


def test_a_second_writer_is_refused_and_the_lock_ends_with_its_holder(file):
    script = f"""
import sys
from pathlib import Path
from serving.settings.versions import locked
with locked(Path({str(file)!r})):
    print("holds", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "holds\n"
        for write in (
            lambda: apply(file, NEW),
            lambda: edit_settings(file, {"max_batch_size": 9}),
            lambda: backup(file),
            lambda: restore(file, 1),
        ):
            with pytest.raises(RecordError, match="another process is writing settings in"):
                write()
        holder.kill()
    assert file.read_bytes() == OLD
    apply(file, NEW)
    assert file.read_bytes() == NEW


def test_where_a_folder_cannot_be_locked_a_file_is_still_replaced_whole(file, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    apply(file, NEW)
    assert file.read_bytes() == NEW


# ---- crashes

CALLS = ("open", "write", "fchmod", "fsync", "replace", "unlink", "listdir", "mkdir")


class Death(BaseException):
    """The process ends: nothing that comes after it is done either."""


@contextmanager
def failing(step, fault):
    """Let call number `step` to the system fail; after a death, all that follow do too."""
    real = {name: getattr(os, name) for name in CALLS}
    count = 0

    def wrapped(name):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == step or (count > step and fault is Death):
                raise fault() if fault is Death else OSError(fault, os.strerror(fault))
            return real[name](*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrapped(name))
        yield lambda: count
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def prepare(folder):
    """A file whose versions are 1: the old one, 2: the new one."""
    file = folder / "f.yaml"
    file.write_bytes(NEW)
    backup(file, at=NOON)
    file.write_bytes(OLD)
    (folder / "f.yaml.plimsoll" / ".plimsoll-new-77").write_bytes(b"left by a writer that died")
    return file


OPERATIONS = {
    "apply": lambda file: apply(file, NEW),
    "edit": lambda file: edit_settings(file, {"max_batch_size": 64}),
    "restore": lambda file: restore(file, 1, at=NOON),
    "write": lambda file: write_settings(file, [SettingEntry("max_batch_size", 64)], overwrite=True),
    "backup": lambda file: backup(file, at=NOON),
    "first backup": lambda file: backup(file.with_name("g.yaml"), at=NOON),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [Death, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_whatever_fails_at_whichever_step_the_file_is_the_old_or_the_new_one(tmp_path, operation, fault):
    run = OPERATIONS[operation]
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "g.yaml").write_bytes(OLD)
    run(prepare(whole))
    after = (whole / "f.yaml").read_bytes()
    outcomes = set()
    for step in range(1, 100):
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "g.yaml").write_bytes(OLD)
        file = prepare(folder)
        with failing(step, fault) as calls:
            try:
                run(file)
            except (Death, RecordError) as error:
                failed = error
            else:
                failed = None
        assert file.read_bytes() in (OLD, after)
        outcomes.add(file.read_bytes())
        for named in (file, file.with_name("g.yaml")):
            for one in versions(named):
                assert one.sha256[:12] in one.path
                assert Path(one.path).read_bytes() in (OLD, NEW)
        if failed is None:
            assert file.read_bytes() == after
            if calls() < step:
                break
            continue
        if fault is not Death:
            assert os.strerror(fault) in str(failed)
        # What was interrupted is done again, and leaves nothing lying about.
        run(file)
        assert file.read_bytes() == after
        assert [path.name for path in folder.glob(".plimsoll-new-*")] == []
    else:
        pytest.fail("the operation never ran through")
    assert step > 5
    assert outcomes == {OLD, after}


KILLED = """
import os, signal, sys
from serving.settings import apply
calls = 0
def wrapped(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("open", "write", "fchmod", "fsync", "replace", "unlink", "listdir", "close"):
    setattr(os, name, wrapped(getattr(os, name)))
apply(sys.argv[1], sys.argv[3])
"""


def test_a_process_killed_at_any_call_leaves_the_old_file_or_the_new_one(file):
    seen = []
    for step in range(1, 40):
        file.write_bytes(OLD)
        done = subprocess.run([sys.executable, "-c", KILLED, file, str(step), NEW.decode()], check=False)
        seen.append(file.read_bytes())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert set(seen) == {OLD, NEW}
    assert seen == sorted(seen, key=lambda content: content == NEW)
    assert len(seen) > 6
    apply(file, OLD)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


LOOP = """
import sys
from serving.settings import apply, backup
turn = 0
while True:
    apply(sys.argv[1], sys.argv[2 + turn % 2])
    backup(sys.argv[1])
    turn += 1
    print(turn, flush=True)
"""


def test_a_writer_killed_in_mid_work_leaves_a_whole_file_and_whole_versions(file):
    for turns in range(1, 6):
        with subprocess.Popen(
            [sys.executable, "-c", LOOP, file, OLD.decode(), NEW.decode()], stdout=subprocess.PIPE
        ) as writer:
            for _ in range(turns * 3):
                writer.stdout.readline()
            writer.kill()
        assert file.read_bytes() in (OLD, NEW)
        for one in versions(file):
            assert Path(one.path).name == f"{one.version:04}-{one.sha256[:12]}.yaml"
    assert len(versions(file)) == 2
    with locked(file):
        pass


def test_content_is_forced_to_the_disk_before_the_name_changes_and_the_folder_after(file, monkeypatch):
    calls = []
    force, rename = os.fsync, Path.replace

    def fsync(handle):
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        force(handle)

    def replace(self, target):
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    apply(file, NEW)
    assert calls == ["file", "rename", "folder"]
