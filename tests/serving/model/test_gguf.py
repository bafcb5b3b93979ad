"""GGUF files: those that the embedded engine is given, hand-made ones, and broken ones."""

import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.embedded.tiny_model import PRESETS, TinyShape, write_gguf
from serving.errors import ConfigError
from serving.model.gguf import GgufFile, Skipped, part_names, read_gguf

LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(content: str | bytes) -> bytes:
    encoded = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(encoded)) + encoded


def typed(kind: int, value: Any) -> bytes:
    if kind == 8:
        return struct.pack("<I", 8) + text(value)
    if kind == 9:
        inner, values = value
        body = b"".join(text(each) if inner == 8 else struct.pack(f"<{LETTERS[inner]}", each) for each in values)
        return struct.pack("<IIQ", 9, inner, len(values)) + body
    return struct.pack(f"<I{LETTERS[kind]}", kind, value)


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf(
    pairs: list[tuple[str, int, Any]],
    tensors: list[bytes],
    data_bytes: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    head += b"".join(text(key) + typed(kind, value) for key, kind, value in pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data_bytes)


def saved(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, PRESETS["tiny"])
    return path


def test_a_model_of_the_embedded_engine_is_read_back(tiny):
    shape = PRESETS["tiny"]
    found = read_gguf(tiny)
    assert (found.version, found.architecture, found.quantisation, found.missing_parts) == (3, "llama", "F16", ())
    assert found.metadata["llama.block_count"] == shape.layers
    assert found.metadata["llama.expert_count"] == shape.experts
    assert found.metadata["tokenizer.ggml.tokens"] == Skipped(shape.vocab)
    assert found.metadata["tokenizer.ggml.add_bos_token"] is False
    by_name = {part.name: part for part in found.tensors}
    assert by_name["token_embd.weight"].shape == (shape.vocab, shape.hidden)
    assert by_name["blk.1.ffn_down_exps.weight"].shape == (shape.experts, shape.hidden, shape.ffn)
    assert by_name["blk.0.attn_norm.weight"].type == "F32"
    assert found.parts[0].file_bytes == tiny.stat().st_size
    assert found.parts[0].missing_bytes == 0


@pytest.mark.parametrize("shape", [TinyShape(experts=0), TinyShape(layers=1, hidden=64, vocab=1024)])
def test_the_bytes_of_all_tensors_fill_the_file(tmp_path, shape):
    path = tmp_path / "model.gguf"
    write_gguf(path, shape)
    found = read_gguf(path)
    part = found.parts[0]
    assert 0 <= part.file_bytes - part.needed_bytes < 32
    assert sum(found.bytes_by_type.values()) == sum(each.size_bytes for each in found.tensors)
    assert sum(found.bytes_by_type.values()) < part.file_bytes
    assert found.parameters == sum(math.prod(each.shape) for each in found.tensors)


# Bits per weight as llama.cpp's documentation and the tables of its quantisation tool give them.
@pytest.mark.parametrize(
    ("number", "name", "bits"),
    [
        (0, "F32", 32),
        (1, "F16", 16),
        (2, "Q4_0", 4.5),
        (3, "Q4_1", 5),
        (6, "Q5_0", 5.5),
        (7, "Q5_1", 6),
        (8, "Q8_0", 8.5),
        (9, "Q8_1", 9),
        (10, "Q2_K", 2.625),
        (11, "Q3_K", 3.4375),
        (12, "Q4_K", 4.5),
        (13, "Q5_K", 5.5),
        (14, "Q6_K", 6.5625),
        (15, "Q8_K", 9.125),
        (16, "IQ2_XXS", 2.0625),
        (17, "IQ2_XS", 2.3125),
        (18, "IQ3_XXS", 3.0625),
        (19, "IQ1_S", 1.5625),
        (20, "IQ4_NL", 4.5),
        (21, "IQ3_S", 3.4375),
        (22, "IQ2_S", 2.5625),
        (23, "IQ4_XS", 4.25),
        (24, "I8", 8),
        (25, "I16", 16),
        (26, "I32", 32),
        (27, "I64", 64),
        (28, "F64", 64),
        (29, "IQ1_M", 1.75),
        (30, "BF16", 16),
        (34, "TQ1_0", 1.6875),
        (35, "TQ2_0", 2.0625),
        (39, "MXFP4", 4.25),
        (40, "NVFP4", 4.5),
        (41, "Q1_0", 1.125),
        (42, "Q2_0", 2.25),
    ],
)
def test_each_type_takes_its_documented_bits(tmp_path, number, name, bits):
    found = read_gguf(saved(tmp_path, gguf([], [tensor("x", (512, 3), number, 0)])))
    (only,) = found.tensors
    assert (only.type, only.shape, only.size_bytes * 8 / only.elements) == (name, (3, 512), bits)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type_are_read(tmp_path, version):
    pairs = [
        ("general.architecture", 8, "gemma3"),
        ("general.file_type", 4, 15),
        ("u8", 0, 200),
        ("i8", 1, -3),
        ("u16", 2, 65_000),
        ("i16", 3, -300),
        ("i32", 5, -70_000),
        ("f32", 6, 0.5),
        ("flag", 7, True),
        ("u64", 10, 2**40),
        ("i64", 11, -(2**40)),
        ("f64", 12, 1e-5),
        ("heads", 9, (5, [8, 4, 8])),
        ("pattern", 9, (7, [True, False])),
        ("languages", 9, (8, ["en", "de"])),
        ("none", 9, (4, [])),
    ]
    found = read_gguf(saved(tmp_path, gguf(pairs, [], version=version)))
    expected = {key: tuple(value[1]) if kind == 9 else value for key, kind, value in pairs}
    assert dict(found.metadata) == expected
    assert (found.architecture, found.quantisation, found.version) == ("gemma3", "Q4_K_M", version)


def test_a_guessed_recipe_is_named_and_an_unknown_one_gives_way_to_the_tensors(tmp_path):
    tensors = [tensor("a", (256, 8), 14, 0), tensor("b", (256,), 0, 1696)]
    assert read_gguf(saved(tmp_path, gguf([("general.file_type", 4, 1024 + 18)], tensors))).quantisation == "Q6_K"
    assert read_gguf(saved(tmp_path, gguf([("general.file_type", 4, 999)], tensors))).quantisation == "Q6_K"
    found = read_gguf(saved(tmp_path, gguf([], tensors)))
    assert (found.quantisation, found.bytes_by_type) == ("Q6_K", {"Q6_K": 1680, "F32": 1024})
    assert read_gguf(saved(tmp_path, gguf([], []))).quantisation == "unknown"


def test_long_lists_and_texts_keep_their_length_only(tmp_path):
    words = [f"w{turn}" * (turn % 40) for turn in range(100_000)]
    long = "x" * 2**19  # longer than what is read at once
    pairs = [
        ("tokens", 9, (8, words)),
        ("scores", 9, (6, [0.0] * 100_000)),
        ("long words", 9, (8, [long, "", long, *["y"] * 100])),
        ("template", 8, "z" * (2**20 + 1)),
        ("after", 4, 7),
    ]
    found = read_gguf(saved(tmp_path, gguf(pairs, [tensor("t", (32,), 8, 0)], 34)))
    assert dict(found.metadata) == {
        "tokens": Skipped(100_000),
        "scores": Skipped(100_000),
        "long words": Skipped(103),
        "template": Skipped(2**20 + 1),
        "after": 7,
    }
    assert [each.name for each in found.tensors] == ["t"]


def test_alignment_of_its_own_is_kept(tmp_path):
    tensors = [tensor("a", (32,), 8, 0), tensor("b", (32,), 8, 128)]
    content = gguf([("general.alignment", 4, 128)], tensors, 128 + 34, alignment=128)
    part = read_gguf(saved(tmp_path, content)).parts[0]
    assert part.needed_bytes == part.file_bytes
    with pytest.raises(ConfigError, match=r"general\.alignment is 100"):
        read_gguf(saved(tmp_path, gguf([("general.alignment", 4, 100)], [])))


def test_a_file_that_was_cut_lacks_the_bytes_that_are_gone(tmp_path, tiny):
    whole = tiny.read_bytes()
    padding = read_gguf(tiny).parts[0].file_bytes - read_gguf(tiny).parts[0].needed_bytes
    assert read_gguf(saved(tmp_path, whole[:-1000])).parts[0].missing_bytes == 1000 - padding


# --- several files -------------------------------------------------------------------------------------------------


def split(folder: Path, count: int = 3, tensors: int = 3) -> list[Path]:
    paths = []
    for turn in range(count):
        pairs: list[tuple[str, int, Any]] = [("split.no", 2, turn), ("split.count", 2, count)]
        pairs.append(("split.tensors.count", 5, tensors))
        if turn == 0:
            pairs.append(("general.architecture", 8, "llama"))
        own = [tensor(f"blk.{turn}.attn_q.weight", (256, 2), 12, 0)]
        paths.append(saved(folder, gguf(pairs, own, 288), f"big-{turn + 1:05d}-of-{count:05d}.gguf"))
    return paths


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_files_of_a_split_model_are_read_whichever_is_named(tmp_path, asked):
    paths = split(tmp_path)
    found = read_gguf(paths[asked])
    assert [part.path for part in found.parts] == paths
    assert [each.name for each in found.tensors] == [f"blk.{turn}.attn_q.weight" for turn in range(3)]
    assert found.architecture == "llama"


def test_missing_files_of_a_split_model_are_named(tmp_path):
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ConfigError, match=r"1 of the model's 3 files are missing: big-00002-of-00003\.gguf;"):
        read_gguf(paths[0])
    partial = read_gguf(paths[0], whole=False)
    assert partial.missing_parts == ("big-00002-of-00003.gguf",)
    assert len(partial.tensors) == 2


def test_files_that_are_not_of_one_model_are_refused(tmp_path):
    first, *_ = split(tmp_path, tensors=4)
    with pytest.raises(ConfigError, match="have 3 tensors, not 4"):
        read_gguf(first)
    with pytest.raises(ConfigError, match="is one of 3 files, but its name says 1"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))
    paths = split(tmp_path)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(ConfigError, match=r"'blk\.0\.attn_q\.weight' is in two files"):
        read_gguf(paths[0])


def test_names_of_parts_follow_the_pattern_of_llama_cpp(tmp_path):
    assert part_names(tmp_path / "a-00002-of-00003.gguf") == [f"a-0000{turn}-of-00003.gguf" for turn in (1, 2, 3)]
    for name in ("a.gguf", "a-00001-of-00001.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf"):
        assert part_names(tmp_path / name) == [name]


# --- broken files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at byte 0: does not begin with GGUF"),
        (b"GGU", "at byte 0: does not begin with GGUF"),
        (b"PK\x03\x04" + bytes(100), "at byte 0: does not begin with GGUF"),
        (b"GGUF", "at byte 4: the file ends before the version does"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "at byte 4: is big-endian"),
        (gguf([], [], version=1), "at byte 4: is of GGUF version 1; known: 2, 3"),
        (gguf([], [], version=0), "is of GGUF version 0"),
        (gguf([], [], counts=(2**60, 0)), "at byte 8: number of tensors is 1152921504606846976"),
        (gguf([], [], counts=(0, 2**40)), "at byte 16: number of metadata keys is"),
        (gguf([("a", 4, 1), ("a", 4, 2)], []), "metadata key 'a' stands twice"),
        (gguf([("", 4, 1)], []), "a key of 0 bytes is none"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"\xff") + bytes(64), "a key is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 13) + bytes(64), "type 13"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, 2**62) + bytes(64),
            "the file ends",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**62), "no model has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**20), "the file ends"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2**20), "the file ends"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
            "list of type 9",
        ),
        (gguf([], [tensor("a", (1, 1, 1, 1, 1), 0, 0)]), "has 5 dimensions"),
        (gguf([], [tensor("a", (2**40, 2**40), 0, 0)]), "absurd shape"),
        (gguf([], [tensor("a", (100, 2), 12, 0)]), "rows of 100 are no whole blocks of Q4_K"),
        (gguf([], [tensor("a", (32,), 31, 0)]), "has ggml type 31, which is not known"),
        (gguf([], [tensor("a", (32,), 0, 0), tensor("a", (32,), 0, 128)]), "tensor 'a' stands twice"),
        # Group 128 under the number that llama.cpp gives to group 64.
        (gguf([], [tensor("a", (128, 8), 42, 0), tensor("b", (32,), 0, 272)]), "'a' of type Q2_0 ends at 288"),
    ],
)
def test_a_broken_file_is_named_with_the_byte(tmp_path, content, message):
    path = saved(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_gguf(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: at byte ")


@pytest.mark.parametrize("name", ["folder.gguf", "none.gguf", "n\0ul.gguf"])
def test_what_cannot_be_read_is_told(tmp_path, name):
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"gguf"):
        read_gguf(tmp_path / name)


def test_a_file_that_promises_much_costs_no_memory(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    promises = [
        text("a") + struct.pack("<IIQ", 9, 8, 2**24),
        text("a") + struct.pack("<IIQ", 9, 12, 2**24),
        text("a") + struct.pack("<IQ", 8, 2**63),
        struct.pack("<Q", 2**16) + b"a" * 100,
    ]
    for promise in promises:
        path = saved(tmp_path, head + promise)
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError):
                read_gguf(path)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


def _read_or_refuse(path: Path) -> GgufFile | None:
    try:
        return read_gguf(path)
    except ConfigError:
        return None


@given(content=st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: gguf([], [])[:8] + tail))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused_or_read(tmp_path, content):
    _read_or_refuse(saved(tmp_path, content))


SMALL = gguf(
    [("general.architecture", 8, "llama"), ("heads", 9, (5, [8, 4])), ("words", 9, (8, ["a"] * 70)), ("flag", 7, True)],
    [tensor("a", (256, 2), 12, 0), tensor("b", (32,), 0, 288)],
    288 + 128,
)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_damaged_file_is_refused_or_read(tmp_path, data):
    content = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from([0, 1, 9, 127, 255]))
    found = _read_or_refuse(saved(tmp_path, bytes(content[: data.draw(st.integers(0, len(content)))])))
    if found is not None:
        assert all(each.size_bytes >= 0 for each in found.tensors)


@given(cut=st.integers(0, len(SMALL) - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_file_never_reads_as_whole(tmp_path, cut):
    found = _read_or_refuse(saved(tmp_path, SMALL[:cut]))
    assert found is None or found.parts[0].missing_bytes == len(SMALL) - cut
