"""Folders of weights, whole and broken, as downloads, tools that quantise and people leave them."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.embedded.tiny_model import PRESETS, TinyShape, write_gguf, write_hf
from serving.errors import ConfigError
from serving.weights import Level, WeightsCheck, check_weights

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4}
LAYERS = 3
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4976698672\n"
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def head_of(tensors: Tensors) -> tuple[bytes, int]:
    """(the head of a safetensors file, bytes of its data)."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for side in shape:
            size *= side
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    body = json.dumps(content).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body, end


def save(path: Path, tensors: Tensors, *, cut: int = 0) -> int:
    """Write a file whose data is a hole of the right length."""
    head, size = head_of(tensors)
    path.write_bytes(head)
    os.truncate(path, len(head) + size - cut)
    return size


def layer(number: int, dtype: str = "BF16", suffix: str = "weight", scale: str | None = None) -> dict[str, Any]:
    stem = f"model.layers.{number}"
    tensors: dict[str, Any] = {f"{stem}.input_layernorm.weight": ("BF16", (64,))}
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors[f"{stem}.{module}.{suffix}"] = (dtype, (256, 64))
        if scale:
            tensors[f"{stem}.{module}.{scale}"] = ("F32", (2, 1))
    return tensors


ENDS: Tensors = {"model.embed_tokens.weight": ("BF16", (128, 64)), "lm_head.weight": ("BF16", (128, 64))}


def make(
    folder: Path,
    quantization: dict[str, Any] | None = None,
    *,
    index: bool = True,
    torch_dtype: str = "bfloat16",
    **stored: Any,
) -> Path:
    """A model in three files with everything that belongs to it."""
    folder.mkdir(exist_ok=True)
    places, total = {}, 0
    for number in range(LAYERS):
        name = f"model-{number + 1:05d}-of-{LAYERS:05d}.safetensors"
        tensors = {**layer(number, **stored), **(ENDS if number == 0 else {})}
        places |= dict.fromkeys(tensors, name)
        total += save(folder / name, tensors)
    if index:
        content = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    config = {"model_type": "llama", "torch_dtype": torch_dtype}
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"w{turn}": turn for turn in range(200)}}}))
    return folder


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def said(check: WeightsCheck, level: Level) -> list[str]:
    return [finding.what for finding in check.findings if finding.level is level]


def only(check: WeightsCheck, level: Level = Level.ERROR) -> str:
    found = said(check, level)
    assert len(found) == 1, found
    return found[0]


def test_a_whole_model_has_nothing_to_complain_of(tmp_path):
    check = check_weights(make(tmp_path))
    assert (check.format, check.files, check.tensors, check.quantisation) == ("safetensors", 3, 17, "none")
    assert check.is_whole
    assert {finding.level for finding in check.findings} == {Level.OK}
    weights = 3 * (4 * 256 * 64 + 64) + 2 * 128 * 64
    assert (check.total_bytes, check.bytes_by_dtype) == (2 * weights, {"BF16": 2 * weights})


@pytest.mark.parametrize("shape", [PRESETS["tiny"], TinyShape(experts=0, vocab=1024)])
def test_a_model_of_the_embedded_engine_is_whole_in_both_formats(tmp_path, shape):
    write_hf(tmp_path / "hf", shape)
    write_gguf(tmp_path / "gguf" / "model.gguf", shape)
    folder = check_weights(tmp_path / "hf")
    assert (folder.findings[0].level, folder.format, list(folder.bytes_by_dtype)) == (Level.OK, "safetensors", ["BF16"])
    for source in (tmp_path / "gguf", tmp_path / "gguf" / "model.gguf"):
        check = check_weights(source)
        assert (check.is_whole, check.format, check.quantisation, check.files) == (True, "gguf", "F16", 1)
        assert check.total_bytes is not None
        assert folder.total_bytes is not None
        # F16 and BF16 are of one size; in GGUF, norms and routers have 32 bits.
        assert 1 <= check.total_bytes / folder.total_bytes < 1.02


# --- files ---------------------------------------------------------------------------------------------------------


def test_missing_files_of_the_index_are_named(tmp_path):
    second(make(tmp_path)).unlink()
    check = check_weights(tmp_path)
    assert only(check) == "1 of the 3 files of the index are missing: model-00002-of-00003.safetensors"
    assert (check.is_whole, check.files) == (False, 2)


def test_missing_files_are_seen_by_their_numbers_where_there_is_no_index(tmp_path):
    second(make(tmp_path, index=False)).unlink()
    check = check_weights(tmp_path)
    assert only(check) == "1 of 3 files are missing: model-00002-of-00003.safetensors"
    assert "there is no model.safetensors.index.json" in only(check, Level.WARNING)


def test_files_that_the_index_does_not_name_are_a_warning(tmp_path):
    save(make(tmp_path) / "model-00004-of-00004.safetensors", layer(7))
    check = check_weights(tmp_path)
    assert only(check, Level.WARNING) == "1 files are not in the index: model-00004-of-00004.safetensors"
    assert (check.is_whole, check.tensors) == (True, 17)
    save(tmp_path / "model-00004-of-00004.safetensors", layer(7))
    (tmp_path / "model-00004-of-00004.safetensors").rename(tmp_path / "consolidated.safetensors")
    finding = next(finding for finding in check_weights(tmp_path).findings if finding.level is Level.WARNING)
    assert "maker's own format" in finding.next_step


def test_two_sets_side_by_side_without_an_index_are_an_error(tmp_path):
    make(tmp_path, index=False)
    for number in (1, 2):
        save(tmp_path / f"model-{number:05d}-of-00002.safetensors", layer(number - 1))
    errors = said(check_weights(tmp_path), Level.ERROR)
    assert errors[0].startswith("2 sets of weights lie side by side")
    assert errors[1].startswith("10 tensors are in more than one file")


def test_an_adapter_beside_a_model_is_no_second_set(tmp_path):
    save(make(tmp_path) / "adapter_model.safetensors", layer(0))
    assert {finding.level for finding in check_weights(tmp_path).findings} == {Level.OK}


def test_weights_in_other_formats_are_told_of(tmp_path):
    (make(tmp_path) / "pytorch_model.bin").write_bytes(b"PK" + bytes(100))
    write_gguf(tmp_path / "model-q8.gguf", TinyShape(layers=1, vocab=1024))
    assert only(check_weights(tmp_path), Level.WARNING).endswith("files: model-q8.gguf, pytorch_model.bin")


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_file_that_was_cut_is_named_with_what_is_missing(tmp_path, cut):
    path = second(make(tmp_path))
    os.truncate(path, path.stat().st_size - cut)
    assert only(check_weights(tmp_path)) == (
        f"model-00002-of-00003.safetensors is cut ({cut} of 131200 bytes of data are not there)"
    )


def test_a_file_that_ends_within_its_head_is_cut(tmp_path):
    os.truncate(second(make(tmp_path)), 100)
    assert "is cut (it ends at byte 100, within its head of" in only(check_weights(tmp_path))


def test_pointers_instead_of_weights_are_one_finding(tmp_path):
    make(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(POINTER)
    check = check_weights(tmp_path)
    assert only(check).startswith("each of 3 of 3 files is a Git LFS pointer and not the file: model-00001-of-00003")
    assert "git lfs pull" in check.findings[0].next_step
    assert check.total_bytes is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{}", "does not begin like a safetensors file"),
        (b"<html><body>404 not found</body></html>" * 40, "does not begin like a safetensors file"),
        (struct.pack("<Q", 100_000_001) + bytes(2000), "does not begin like a safetensors file"),
        (struct.pack("<Q", 8) + b"not json" + bytes(2000), "has a broken head (not JSON)"),
        (struct.pack("<Q", 8) + b"[1, 2]  ", "has a broken head (no JSON object)"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "has a broken head (type, shape and place of tensor 'a' do not fit)"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "has a broken head (not JSON)"),
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path, content, message):
    second(make(tmp_path)).write_bytes(content)
    assert only(check_weights(tmp_path)) == f"model-00002-of-00003.safetensors {message}"


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, True),
        ({"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}, True),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}, False),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]}, False),
        ({"dtype": "F33", "shape": [2, 2], "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}, False),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16]}, False),
        ({"dtype": "F32", "shape": [10**30], "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}, False),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0]}, False),
        ({"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 16]}, False),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, True),
        (None, False),
    ],
)
def test_a_tensor_has_to_fit_its_place(tmp_path, entry, fits):
    make(tmp_path, index=False)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    body = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body + bytes(16))
    assert any("do not fit" in what for what in said(check_weights(tmp_path), Level.ERROR)) is not fits


def test_gaps_between_tensors_and_bytes_behind_the_last_are_told(tmp_path):
    entries = {"a.weight": ("F32", (4,)), "b.weight": ("F32", (4,))}
    head, size = head_of(entries)
    second(make(tmp_path)).write_bytes(head + bytes(size + 5))
    assert "is longer than its head says (by 5 bytes)" in said(check_weights(tmp_path), Level.ERROR)[0]
    body = head[8:].replace(b"[16, 32]", b"[20, 36]")
    second(tmp_path).write_bytes(struct.pack("<Q", len(body)) + body + bytes(36))
    assert "a gap or an overlap at byte 16 of the data" in said(check_weights(tmp_path), Level.ERROR)[0]


def test_leftovers_of_a_download_are_found_where_tools_keep_them(tmp_path):
    (make(tmp_path) / "model-00002-of-00003.safetensors.incomplete").write_bytes(b"")
    assert "did not end: model-00002-of-00003.safetensors.incomplete" in only(check_weights(tmp_path), Level.WARNING)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    make(snapshot)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "4d7a.incomplete").write_bytes(b"")
    assert "did not end: blobs/4d7a.incomplete" in only(check_weights(snapshot), Level.WARNING)
    local = make(tmp_path / "local")
    (local / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (local / ".cache" / "huggingface" / "download" / "x.4d7a.incomplete").write_bytes(b"")
    assert "did not end: download/x.4d7a.incomplete" in only(check_weights(local), Level.WARNING)


def test_links_to_nothing_are_told(tmp_path):
    path = second(make(tmp_path))
    path.unlink()
    path.symlink_to(tmp_path / "blobs" / "gone")
    assert only(check_weights(tmp_path)) == "model-00002-of-00003.safetensors is a link to nothing"


# --- index ---------------------------------------------------------------------------------------------------------


def test_a_total_that_differs_is_a_warning(tmp_path):
    path = make(tmp_path) / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["metadata"]["total_size"] += 1000
    path.write_text(json.dumps(content))
    check = check_weights(tmp_path)
    stated = content["metadata"]["total_size"]
    assert only(check, Level.WARNING) == f"the tensors take {check.total_bytes} bytes, not {stated} as the index says"


def test_tensors_that_are_not_where_the_index_places_them_are_an_error(tmp_path):
    save(second(make(tmp_path)), layer(9))
    assert only(check_weights(tmp_path)).startswith(
        "5 tensors are not in the files where the index places them: model.layers.1.input_layernorm.weight"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "model.safetensors.index.json is empty"),
        ("{", "the index cannot be used: not JSON"),
        ("[]", "the index cannot be used: must be a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "no weight_map"),
        (POINTER.decode(), "is a Git LFS pointer"),
    ],
)
def test_an_index_that_cannot_be_used_is_told(tmp_path, content, message):
    (make(tmp_path) / "model.safetensors.index.json").write_text(content)
    assert message in only(check_weights(tmp_path))


# --- configuration -------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("block", "stored", "method"),
    [
        (FP8, {"dtype": "F8_E4M3", "scale": "weight_scale_inv"}, "fp8"),
        (AWQ, {"dtype": "I32", "suffix": "qweight", "scale": "scales"}, "awq"),
        (PACKED, {"dtype": "I32", "suffix": "weight_packed", "scale": "weight_scale"}, "compressed-tensors/int4"),
        (NVFP4, {"dtype": "U8", "scale": "weight_scale"}, "modelopt/nvfp4"),
    ],
)
def test_quantised_weights_are_what_the_configuration_says(tmp_path, block, stored, method):
    check = check_weights(make(tmp_path, block, **stored))
    assert {finding.level for finding in check.findings} == {Level.OK}
    assert check.quantisation == method
    assert any(what.startswith(f"{method}, as config.json says: ") for what in said(check, Level.OK))


@pytest.mark.parametrize(
    ("block", "stored", "message"),
    [
        (FP8, {}, "config.json says fp8, but no tensor it speaks of is a weight of type F8_E4M3"),
        (AWQ, {}, "config.json says awq, but no tensor it speaks of is a qweight of type I32; the files hold BF16"),
        (AWQ, {"dtype": "F8_E4M3"}, "says awq, but no tensor"),
        (PACKED, {"dtype": "I32", "suffix": "qweight"}, "but no tensor it speaks of is a weight_packed"),
        (None, {"dtype": "F8_E4M3"}, "of weights are quantised (F8_E4M3 196608 bytes"),
        (
            None,
            {"dtype": "I32", "suffix": "qweight"},
            "but config.json says nothing of it: model.layers.0.mlp.down_proj",
        ),
    ],
)
def test_weights_that_are_not_what_the_configuration_says_are_an_error(tmp_path, block, stored, message):
    assert message in only(check_weights(make(tmp_path, block, **stored)))


def test_modules_that_the_configuration_does_not_leave_out_are_a_warning(tmp_path):
    save(second(make(tmp_path, FP8, index=False, dtype="F8_E4M3")), layer(1))
    warnings = said(check_weights(tmp_path), Level.WARNING)
    assert any(
        what.startswith("131072 bytes of weights are not quantised, though config.json says fp8") for what in warnings
    )
    block = {**FP8, "modules_to_not_convert": ["model.layers.1"]}
    make(tmp_path, block, index=False, dtype="F8_E4M3")
    assert "but config.json leaves these modules out" in str(said(check_weights(tmp_path), Level.WARNING))


def test_weights_of_another_width_than_the_configuration_says_are_a_warning(tmp_path):
    check = check_weights(make(tmp_path, dtype="F32"))
    assert only(check, Level.WARNING).startswith(
        "config.json says bfloat16, but most weights that are not quantised are F32"
    )
    assert said(check_weights(make(tmp_path, dtype="F16", torch_dtype="float16")), Level.WARNING) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config.json"),
        ("", "config.json is empty"),
        ("{", "config.json: not JSON"),
        ('{"quantization_config": {"quant_method": "aqlm"}}', "quant_method 'aqlm' is not known"),
        ('{"torch_dtype": "int7"}', "torch_dtype 'int7' is not known"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_told(tmp_path, content, message):
    path = make(tmp_path) / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    check = check_weights(tmp_path)
    assert message in only(check)
    assert check.quantisation is None
    assert check.tensors == 17


def test_a_tokenizer_has_to_be_there_with_content(tmp_path):
    path = make(tmp_path) / "tokenizer.json"
    path.write_bytes(POINTER)
    assert only(check_weights(tmp_path)) == "tokenizer.json is a Git LFS pointer and not the file"
    path.unlink()
    assert "there is no tokenizer" in only(check_weights(tmp_path))
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n" * 400)
    assert said(check_weights(tmp_path), Level.ERROR) == []


# --- GGUF and others -----------------------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, TinyShape(layers=1, vocab=1024))
    return path


def test_a_gguf_file_that_was_cut_is_told(gguf):
    os.truncate(gguf, gguf.stat().st_size - 4096)
    assert "model.gguf is cut: " in only(check_weights(gguf))


def test_a_gguf_file_that_is_none_is_told(gguf):
    gguf.write_bytes(POINTER)
    assert only(check_weights(gguf)) == "model.gguf is a Git LFS pointer and not the file"
    gguf.write_bytes(b"GGML" + bytes(2000))
    assert only(check_weights(gguf)) == "at byte 0: does not begin with GGUF, so it is no GGUF file"


def gguf_part(folder: Path, number: int, count: int) -> Path:
    pairs = [(b"split.no", number - 1), (b"split.count", count)]
    body = b"".join(struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, value) for key, value in pairs)
    name = b"blk.%d.attn_q.weight" % number
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + body + tensor
    path = folder / f"big-{number:05d}-of-{count:05d}.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(128))
    return path


def test_missing_parts_of_a_gguf_model_are_named(tmp_path):
    paths = [gguf_part(tmp_path, number, 3) for number in (1, 3)]
    for source in (tmp_path, *paths):
        assert only(check_weights(source)) == "1 of 3 files are missing: big-00002-of-00003.gguf"
    gguf_part(tmp_path, 2, 3)
    check = check_weights(tmp_path)
    assert (check.is_whole, check.files, check.bytes_by_dtype) == (True, 3, {"F32": 3 * 128})


def test_several_gguf_models_are_not_added_up(gguf):
    write_gguf(gguf.parent / "other.gguf", TinyShape(layers=1, vocab=1024))
    check = check_weights(gguf.parent)
    assert only(check, Level.WARNING) == "2 models lie side by side: model.gguf, other.gguf"
    assert (check.total_bytes, check.is_whole) == (None, True)
    (gguf.parent / "other.gguf").rename(gguf.parent / "mmproj-other.gguf")
    assert said(check_weights(gguf.parent), Level.WARNING) == []


def test_files_in_pytorch_format_are_not_opened(tmp_path):
    make(tmp_path, index=False)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK" + bytes(2000))
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    check = check_weights(tmp_path)
    assert (check.format, check.total_bytes) == ("pytorch", None)
    assert only(check) == "1 of the 2 files of the index are missing: pytorch_model-00002-of-00002.bin"
    assert "cannot be checked" in only(check, Level.WARNING)


def test_a_folder_without_weights_says_so(tmp_path):
    check = check_weights(tmp_path)
    assert (check.format, only(check)) == ("none", "there are no weights: no .safetensors, .gguf or .bin file")


@pytest.mark.parametrize("name", ["nowhere", "config.json", "n\0ul"])
def test_what_is_neither_folder_nor_gguf_is_the_callers_mistake(tmp_path, name):
    make(tmp_path)
    with pytest.raises(ConfigError, match=r"neither a folder|cannot be read"):
        check_weights(tmp_path / name)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
def test_damaged_files_are_findings_and_never_a_traceback(tmp_path, data):
    folder = make(tmp_path / "model", FP8, dtype="F8_E4M3", scale="weight_scale_inv")
    for path in sorted(folder.iterdir()):
        if data.draw(st.booleans()):
            content = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, min(len(content) - 1, 1500)))] = data.draw(st.integers(0, 255))
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    check = check_weights(folder)
    json.dumps([[finding.level, finding.what, finding.where, finding.next_step] for finding in check.findings])
    "".join(finding.what + finding.where for finding in check.findings).encode()
