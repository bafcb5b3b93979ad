"""A GGUF file has the shape of the model that it was made of, and the bytes of its tensors."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from serving.embedded.tiny_model import PRESETS, write_gguf
from serving.errors import ConfigError
from serving.model import read_model
from serving.model.gguf import GgufFile, GgufTensor, read_gguf
from serving.model.gguf_model import shape_of_gguf

CONFIGS = Path(__file__).parents[2] / "samples" / "configs"
# Weights of a block and its bytes, as ggml has them.
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_K": (256, 144), "MXFP4": (32, 17)}


def tensor(name: str, *shape: int, kind: str = "F32") -> GgufTensor:
    weights, size = BLOCKS[kind]
    return GgufTensor(name, shape, kind, math.prod(shape) // weights * size)


def tensors_of(architecture: str, meta: dict, *, kind: str, experts: str, **options) -> tuple[GgufTensor, ...]:
    """The tensors that llama.cpp's converter writes for a model with these metadata."""
    hidden, vocabulary, blocks = meta["embedding_length"], options["vocabulary"], meta["block_count"]
    heads, kv_heads = meta["attention.head_count"], meta.get("attention.head_count_kv", 1)
    key = meta.get("attention.key_length", hidden // heads)
    bias = options.get("bias", False)

    def pair(name: str, rows: int, columns: int) -> list[GgufTensor]:
        found = [tensor(f"{name}.weight", rows, columns, kind=kind)]
        return [*found, tensor(f"{name}.bias", rows)] if bias else found

    found = [tensor("token_embd.weight", vocabulary, hidden, kind=kind), tensor("output_norm.weight", hidden)]
    if not options.get("tied"):
        found.append(tensor("output.weight", vocabulary, hidden, kind=kind))
    predicted = meta.get("nextn_predict_layers", 0)
    for block in range(blocks):
        at = f"blk.{block}"
        found += [tensor(f"{at}.{name}.weight", hidden) for name in ("attn_norm", "ffn_norm")]
        if options.get("qk_norm"):
            found += [tensor(f"{at}.attn_{name}_norm.weight", key) for name in "qk"]
        if "attention.kv_lora_rank" in meta:
            latent, rope = meta["attention.kv_lora_rank"], meta["rope.dimension_count"]
            query, key_mla = meta["attention.q_lora_rank"], meta["attention.key_length_mla"]
            value = meta["attention.value_length_mla"]
            found += [
                tensor(f"{at}.attn_q_a.weight", query, hidden, kind=kind),
                tensor(f"{at}.attn_q_a_norm.weight", query),
                tensor(f"{at}.attn_q_b.weight", heads * key_mla, query, kind=kind),
                tensor(f"{at}.attn_kv_a_mqa.weight", latent + rope, hidden, kind=kind),
                tensor(f"{at}.attn_kv_a_norm.weight", latent),
                tensor(f"{at}.attn_k_b.weight", heads, latent, key_mla - rope, kind=kind),
                tensor(f"{at}.attn_v_b.weight", heads, value, latent, kind=kind),
                tensor(f"{at}.attn_output.weight", hidden, heads * value, kind=kind),
            ]
        elif options.get("fused"):
            found.append(tensor(f"{at}.attn_qkv.weight", (heads + 2 * kv_heads) * key, hidden, kind=kind))
            found.append(tensor(f"{at}.attn_output.weight", hidden, heads * key, kind=kind))
        else:
            found += pair(f"{at}.attn_q", heads * key, hidden)
            found += pair(f"{at}.attn_k", kv_heads * key, hidden) + pair(f"{at}.attn_v", kv_heads * key, hidden)
            found += pair(f"{at}.attn_output", hidden, heads * key)
        if options.get("sinks"):
            found.append(tensor(f"{at}.attn_sinks.weight", heads))
        width = meta.get("feed_forward_length", 0)
        if "expert_count" in meta and block >= meta.get("leading_dense_block_count", 0):
            count = meta["expert_count"]
            wide = meta.get("expert_feed_forward_length", width)
            found.append(tensor(f"{at}.ffn_gate_inp.weight", count, hidden))
            for name in ("gate", "up", "down"):
                sides = (hidden, wide) if name == "down" else (wide, hidden)
                found.append(tensor(f"{at}.ffn_{name}_exps.weight", count, *sides, kind=experts))
                if bias:
                    found.append(tensor(f"{at}.ffn_{name}_exps.bias", count, sides[0]))
                shared = meta.get("expert_shared_count", 0) * wide
                if shared:
                    sides = (hidden, shared) if name == "down" else (shared, hidden)
                    found.append(tensor(f"{at}.ffn_{name}_shexp.weight", *sides, kind=kind))
            if bias:
                found.append(tensor(f"{at}.ffn_gate_inp.bias", count))
            if options.get("correction"):
                found.append(tensor(f"{at}.exp_probs_b.bias", count))
        elif options.get("fused"):
            found.append(tensor(f"{at}.ffn_up.weight", 2 * width, hidden, kind=kind))
            found.append(tensor(f"{at}.ffn_down.weight", hidden, width, kind=kind))
        else:
            found += [tensor(f"{at}.ffn_{name}.weight", width, hidden, kind=kind) for name in ("gate", "up")]
            found.append(tensor(f"{at}.ffn_down.weight", hidden, width, kind=kind))
        if block >= blocks - predicted:
            found.append(tensor(f"{at}.nextn.eh_proj.weight", hidden, 2 * hidden, kind=kind))
            found += [tensor(f"{at}.nextn.{name}.weight", hidden) for name in ("enorm", "hnorm", "shared_head_norm")]
    return tuple(found)


def file_of(architecture: str, meta: dict, **options) -> GgufFile:
    kind, experts = options.pop("kind", "Q8_0"), options.pop("experts", "Q4_K")
    tensors = tensors_of(architecture, meta, kind=kind, experts=experts, **options)
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in meta.items()}
    return GgufFile(Path("model.gguf"), 3, metadata, tensors, ())


# Metadata as llama.cpp prints them at a start.
QWEN3_30B = {
    "block_count": 48,
    "context_length": 40960,
    "embedding_length": 2048,
    "feed_forward_length": 6144,
    "attention.head_count": 32,
    "attention.head_count_kv": 4,
    "attention.key_length": 128,
    "expert_count": 128,
    "expert_used_count": 8,
    "expert_feed_forward_length": 768,
}
DEEPSEEK_V3 = {
    "block_count": 61,
    "context_length": 163840,
    "embedding_length": 7168,
    "feed_forward_length": 18432,
    "attention.head_count": 128,
    "attention.head_count_kv": 1,
    "expert_used_count": 8,
    "leading_dense_block_count": 3,
    "attention.q_lora_rank": 1536,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "expert_feed_forward_length": 2048,
    "expert_count": 256,
    "expert_shared_count": 1,
    "rope.dimension_count": 64,
}
GPT_OSS_120B = {
    "block_count": 36,
    "context_length": 131072,
    "embedding_length": 2880,
    "feed_forward_length": 2880,
    "attention.head_count": 64,
    "attention.head_count_kv": 8,
    "attention.key_length": 64,
    "attention.sliding_window": 128,
    "expert_count": 128,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
}
GLM_AIR = {
    "block_count": 47,
    "context_length": 131072,
    "embedding_length": 4096,
    "feed_forward_length": 10944,
    "attention.head_count": 96,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "expert_count": 128,
    "expert_used_count": 8,
    "expert_feed_forward_length": 1408,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "nextn_predict_layers": 1,
}
HUNYUAN_A13B = {
    "block_count": 32,
    "context_length": 262144,
    "embedding_length": 4096,
    "feed_forward_length": 3072,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "expert_count": 64,
    "expert_used_count": 8,
    "expert_feed_forward_length": 3072,
    "expert_shared_count": 1,
}
PHI3_MINI = {
    "block_count": 32,
    "context_length": 4096,
    "embedding_length": 3072,
    "feed_forward_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": 32,
    "attention.sliding_window": 2047,
}

FILES = [
    ("qwen3moe", QWEN3_30B, {"vocabulary": 151936, "qk_norm": True}, "qwen3-30b-a3b"),
    ("deepseek2", DEEPSEEK_V3, {"vocabulary": 129280, "correction": True}, "deepseek-v3"),
    ("gpt-oss", GPT_OSS_120B, {"vocabulary": 201088, "bias": True, "sinks": True, "experts": "MXFP4"}, "gpt-oss-120b"),
    ("glm4moe", GLM_AIR, {"vocabulary": 151552, "correction": True}, "glm-4.5-air"),
    ("hunyuan-moe", HUNYUAN_A13B, {"vocabulary": 128167, "qk_norm": True, "tied": True}, "hunyuan-a13b"),
    ("phi3", PHI3_MINI, {"vocabulary": 32064, "fused": True}, "phi-3-mini-4k"),
]


@pytest.mark.parametrize(("architecture", "meta", "options", "same"), FILES)
def test_a_file_has_the_layers_of_the_model_that_it_was_made_of(architecture, meta, options, same):
    file = file_of(architecture, meta, **options)
    shape, config = shape_of_gguf(file, name="a-model"), read_model(CONFIGS / f"{same}.json")
    assert shape.kv_bytes_per_token() == config.kv_bytes_per_token()
    assert shape.total_parameters == pytest.approx(config.total_parameters, rel=1e-3)
    assert shape.active_parameters == pytest.approx(config.active_parameters, rel=1e-3)
    assert len(shape.mtp) == meta.get("nextn_predict_layers", 0)
    assert shape.architecture == architecture


@pytest.mark.parametrize(("architecture", "meta", "options", "same"), FILES)
def test_bytes_are_exactly_those_of_the_tensors(architecture, meta, options, same):
    file = file_of(architecture, meta, **options)
    shape = shape_of_gguf(file, name="a-model")
    stored = shape.weight_bytes(mtp_layers=len(shape.mtp))
    assert stored.total == pytest.approx(sum(one.size_bytes for one in file.tensors), abs=8)
    if "expert_count" in meta:
        routed = [one for one in file.tensors if "_exps." in one.name and ".nextn" not in one.name]
        assert stored.experts == pytest.approx(sum(one.size_bytes for one in routed), abs=8)


def test_gpt_oss_is_as_large_as_llama_cpp_reports_it():
    # ggml-org/llama.cpp#15253: 433 tensors of F32, 146 of Q8_0 and 108 of MXFP4 are 59.02 GiB.
    file = file_of("gpt-oss", GPT_OSS_120B, vocabulary=201088, bias=True, sinks=True, experts="MXFP4")
    assert {kind: sum(one.type == kind for one in file.tensors) for kind in ("F32", "Q8_0", "MXFP4")} == {
        "F32": 433,
        "Q8_0": 146,
        "MXFP4": 108,
    }
    assert shape_of_gguf(file, name="a-model").weight_bytes().total / 2**30 == pytest.approx(59.02, abs=0.01)


@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("experts", [0, 8])
def test_files_of_the_embedded_engine_are_read(tmp_path, preset, experts):
    path = tmp_path / "some-model.gguf"
    write_gguf(path, replace(PRESETS[preset], experts=experts))
    shape, file = read_model(path), read_gguf(path)
    assert shape.total_parameters == file.parameters
    assert shape.weight_bytes().total == sum(one.size_bytes for one in file.tensors)
    assert shape.experts == experts
    assert shape.name == "some-model"
    assert replace(read_model(tmp_path), name="") == replace(shape, name="")


def test_a_folder_with_several_models_needs_a_name(tmp_path):
    for name in ("one.gguf", "two.gguf", "mmproj-one.gguf"):
        write_gguf(tmp_path / name, PRESETS["tiny"])
    with pytest.raises(ConfigError, match=r"several GGUF models \(one.gguf, two.gguf\)"):
        read_model(tmp_path)
    (tmp_path / "two.gguf").unlink()
    assert read_model(tmp_path).name == "one"


def test_windows_and_patterns_of_gemma_are_read():
    meta = {
        "block_count": 6,
        "context_length": 32768,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "attention.sliding_window": 512,
    }
    found = []
    for one in file_of("gemma3", meta, vocabulary=320, tied=True, qk_norm=True, kind="F16").tensors:
        found.append(one)
        if one.name.endswith("ffn_norm.weight"):
            block = one.name.split(".")[1]
            found += [tensor(f"blk.{block}.{name}.weight", 64) for name in ("post_attention_norm", "post_ffw_norm")]
    file = replace(file_of("gemma3", meta, vocabulary=320, tied=True), tensors=tuple(found))
    shape = shape_of_gguf(file, name="a-model")
    assert [layer.mixer.window for layer in shape.layers] == [512] * 5 + [None]
    assert shape.total_parameters == file.parameters
    assert shape.weight_bytes().total == sum(one.size_bytes for one in file.tensors)


def test_layers_of_one_part_are_read_from_lists():
    lists = {"attention.head_count_kv": (0, 0, 2, 0), "feed_forward_length": (0, 24, 0, 24)}
    meta = {
        "block_count": 4,
        "context_length": 4096,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.key_length": 16,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
    }
    channels = 128 + 2 * 2 * 8
    tensors = [tensor(name, 320, 64, kind="F16") for name in ("token_embd.weight", "output.weight")]
    tensors += [tensor(f"blk.{block}.attn_norm.weight", 64) for block in range(4)]
    tensors += [
        tensor("output_norm.weight", 64),
        tensor("blk.0.ssm_in.weight", 128 + channels + 8, 64, kind="F16"),
        tensor("blk.0.ssm_out.weight", 64, 128, kind="F16"),
        tensor("blk.0.ssm_conv1d.weight", channels, 4),
        tensor("blk.0.ssm_conv1d.bias", channels),
        *(tensor(f"blk.0.ssm_{name}", 8) for name in ("a", "d", "dt.bias")),
        tensor("blk.0.ssm_norm.weight", 128),
        *(
            tensor(f"blk.2.attn_{name}.weight", rows, 64, kind="F16")
            for name, rows in (("q", 64), ("k", 32), ("v", 32))
        ),
        tensor("blk.2.attn_output.weight", 64, 64, kind="F16"),
    ]
    for block in (1, 3):
        tensors += [tensor(f"blk.{block}.ffn_up.weight", 24, 64, kind="F16")]
        tensors += [tensor(f"blk.{block}.ffn_down.weight", 64, 24, kind="F16")]
    metadata = {"general.architecture": "nemotron_h"} | {f"nemotron_h.{k}": v for k, v in (meta | lists).items()}
    file = GgufFile(Path("model.gguf"), 3, metadata, tuple(tensors), ())
    shape = shape_of_gguf(file, name="a-model")
    assert shape.total_parameters == file.parameters
    assert shape.weight_bytes().total == sum(one.size_bytes for one in file.tensors)
    assert shape.kv_bytes_per_token() == 2 * 2 * 16 * 2
    assert shape.state_bytes() == 3 * channels * 2 + 128 * 8 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"general.architecture": "clip"}, "general.architecture 'clip' is not known; known: llama, "),
        ({"general.architecture": None}, "general.architecture 'None'"),
        ({"qwen3moe.block_count": None}, "block_count is missing"),
        ({"qwen3moe.block_count": 10**9}, "block_count is '1000000000'"),
        ({"qwen3moe.embedding_length": "wide"}, "hidden_size is 'wide'"),
        ({"qwen3moe.block_count": 40}, "something about this model is not known"),
        ({"qwen3moe.expert_feed_forward_length": 700}, "something about this model is not known"),
    ],
)
def test_what_is_missing_or_does_not_fit_the_tensors_is_refused(change, said):
    file = file_of("qwen3moe", QWEN3_30B, vocabulary=151936, qk_norm=True)
    with pytest.raises(ConfigError, match=said) as caught:
        shape_of_gguf(replace(file, metadata={**file.metadata, **change}), name="a-model")
    assert str(caught.value).startswith("model.gguf: ")
