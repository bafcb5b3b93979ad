"""Real `quantization_config` blocks, by the repository or tool that publishes each, and what they say of single modules.

Long lists are cut to what the asserted modules need.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.model.quantization import Quantization, read_quantization

SAMPLES = Path(__file__).parents[2] / "samples" / "configs"
Q = "model.layers.3.self_attn.q_proj"
EXPERT = "model.layers.3.mlp.experts.7.down_proj"
SHARED = "model.layers.3.mlp.shared_experts.up_proj"
MLP = "model.layers.3.mlp.down_proj"
ROUTER = "model.layers.3.mlp.gate"
NORM = "model.layers.3.input_layernorm"
HEAD = "lm_head"
EMBED = "model.embed_tokens"
BLOCKS = 8 + 32 / 128**2
GROUPS = 4 + (16 + 4) / 128
"""Four bits, and for 128 weights a scale of 16 bits and a zero point of four."""


def read(block: Any, **config: Any) -> Quantization:
    return read_quantization({"torch_dtype": "bfloat16", "quantization_config": block, **config}, "config.json")


def sample(name: str) -> Quantization:
    path = SAMPLES / f"{name}.json"
    return read_quantization(json.loads(path.read_text(encoding="utf-8")), str(path))


def group(
    bits: int,
    kind: str,
    strategy: str,
    *,
    targets: tuple[str, ...] = ("Linear",),
    activations: dict[str, Any] | None = None,
    **weights: Any,
) -> dict[str, Any]:
    return {
        "input_activations": activations,
        "output_activations": None,
        "targets": list(targets),
        "weights": {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False, **weights},
    }


def compressed(
    stored: str, *groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **more: Any
) -> dict[str, Any]:
    return {
        "config_groups": {f"group_{turn}": part for turn, part in enumerate(groups)},
        "format": stored,
        "ignore": list(ignore),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


# DeepSeek-R1-FP4 and others by nvidia: attention stays as it is, and a pattern says so for each layer.
MODELOPT_NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(61))],
    },
}

REAL: list[tuple[str, Any, str, dict[str, float]]] = [
    (
        "deepseek-ai/DeepSeek-V3",
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8",
        {
            Q: BLOCKS,
            EXPERT: BLOCKS,
            SHARED: BLOCKS,
            ROUTER: 16,
            NORM: 16,
            HEAD: 16,
            EMBED: 16,
            "model.layers.61.eh_proj": 16,
        },
    ),
    (
        "neuralmagic/Meta-Llama-3-8B-Instruct-FP8",
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        "fp8",
        {Q: 8, MLP: 8, HEAD: 16},
    ),
    (
        "meta-llama/Llama-3.1-405B-Instruct-FP8",
        {
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.0.mlp.down_proj",
                *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(126) for part in "qkvo"),
            ],
            "quant_method": "fbgemm_fp8",
        },
        "fp8",
        {Q: 16, MLP: 8, "model.layers.0.mlp.down_proj": 16, HEAD: 16},
    ),
    (
        "meituan/DeepSeek-R1-Block-INT8",
        {"activation_scheme": "dynamic", "quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
        "int8",
        {Q: BLOCKS, EXPERT: BLOCKS, ROUTER: 16, HEAD: 16},
    ),
    (
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "awq",
        {Q: GROUPS, MLP: GROUPS, HEAD: 16, EMBED: 16, NORM: 16},
    ),
    (
        "Qwen/Qwen2.5-VL-7B-Instruct-AWQ",
        {"bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq", "zero_point": True},
        "awq",
        {Q: GROUPS, "visual.blocks.3.mlp.down_proj": 16, "model.visual.blocks.3.mlp.down_proj": 16},
    ),
    (
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        {
            "bits": 4,
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "modules_in_block_to_quantize": None,
            "quant_method": "gptq",
            "sym": True,
        },
        "gptq",
        {Q: GROUPS, HEAD: 16, EMBED: 16, ROUTER: 16, EXPERT: GROUPS},
    ),
    (
        "GPTQModel, the dynamic rules of its documentation",
        {
            "bits": 4,
            "group_size": 128,
            "desc_act": True,
            "lm_head": True,
            "dynamic": {"-:.*down.*": {}, "+:.*q_proj": {"bits": 8, "group_size": 64}},
            "quant_method": "gptq",
        },
        "gptq",
        {HEAD: GROUPS, MLP: 16, Q: 8 + (16 + 8) / 64, "model.layers.3.self_attn.k_proj": GROUPS, EMBED: 16},
    ),
    (
        "TheBloke/Llama-2-7B-GPTQ, branch gptq-8bit--1g-actorder_True",
        {"bits": 8, "group_size": -1, "desc_act": True, "quant_method": "gptq"},
        "gptq",
        {Q: 8, HEAD: 16},
    ),
    (
        "openai/gpt-oss-120b",
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "mxfp4",
        {Q: 16, "model.layers.3.mlp.experts.gate_up_proj": 4.25, "model.layers.3.mlp.router": 16, HEAD: 16, EMBED: 16},
    ),
    (
        "deepseek-ai/DeepSeek-V4-Flash",
        {
            "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "fp8 with mxfp4 experts",
        {"layers.0.ffn.experts.0.w1": 4.25, "layers.0.ffn.shared_experts.w1": BLOCKS, "layers.0.attn.wq_b": BLOCKS},
    ),
    (
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
        compressed("pack-quantized", group(4, "int", "group", group_size=128, symmetric=True, actorder="weight")),
        "compressed-tensors/int4",
        {Q: 4 + 16 / 128, MLP: 4 + 16 / 128, HEAD: 16, EMBED: 16, NORM: 16},
    ),
    (
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        compressed(
            "int-quantized",
            group(
                8,
                "int",
                "channel",
                symmetric=True,
                activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            ),
        ),
        "compressed-tensors/int8",
        {Q: 8, HEAD: 16},
    ),
    (
        "vLLM, documentation of FP8 KV caches calibrated with llm-compressor, on a Mixtral",
        compressed(
            "float-quantized",
            group(8, "float", "channel", activations={"num_bits": 8, "type": "float", "strategy": "token"}),
            ignore=("lm_head", "re:.*block_sparse_moe.gate"),
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        "compressed-tensors/fp8",
        {Q: 8, "model.layers.3.block_sparse_moe.experts.0.w1": 8, "model.layers.3.block_sparse_moe.gate": 16},
    ),
    (
        "RedHatAI/Llama-4-Scout-17B-16E-Instruct-quantized.w4a16",
        compressed(
            "pack-quantized",
            group(4, "int", "group", group_size=128),
            ignore=("re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model", "re:.*multi_modal_projector"),
        ),
        "compressed-tensors/int4",
        {
            "language_model.model.layers.3.self_attn.q_proj": 16,
            "language_model.model.layers.3.feed_forward.experts.0.up_proj": 4.125,
            "model.layers.3.feed_forward.router": 16,
            "language_model.lm_head": 16,
        },
    ),
    (
        "moonshotai/Kimi-K2-Thinking",
        compressed(
            "pack-quantized",
            group(4, "int", "group", group_size=32, symmetric=True),
            ignore=(
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ),
        ),
        "compressed-tensors/int4",
        {Q: 16, EXPERT: 4.5, SHARED: 16, "model.layers.0.mlp.gate_proj": 16, ROUTER: 16},
    ),
    (
        "moonshotai/Kimi-K3",
        compressed(
            "mxfp4-pack-quantized",
            group(4, "float", "group", group_size=32, symmetric=True, scale_dtype="torch.uint8"),
            ignore=("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"),
        ),
        "compressed-tensors/mxfp4",
        {
            Q: 16,
            EXPERT: 4.25,
            "language_model.model.layers.3.block_sparse_moe.experts.3.w1": 4.25,
            SHARED: 16,
            HEAD: 16,
        },
    ),
    (
        "RedHatAI/Qwen3-32B-NVFP4",
        compressed(
            "nvfp4-pack-quantized",
            group(
                4,
                "float",
                "tensor_group",
                group_size=16,
                activations={"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            ),
        ),
        "compressed-tensors/nvfp4",
        {Q: 4.5, MLP: 4.5, HEAD: 16},
    ),
    ("nvidia/DeepSeek-R1-FP4 (hf_quant_config.json)", MODELOPT_NVFP4, "modelopt/nvfp4", {Q: 16, EXPERT: 4.5, HEAD: 16}),
    (
        "nvidia/Llama-3.1-8B-Instruct-FP8 (hf_quant_config.json)",
        {
            "producer": {"name": "modelopt", "version": "0.17.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        "modelopt/fp8",
        {Q: 8, HEAD: 16, EMBED: 16},
    ),
    (
        "nvidia/Qwen3.6-35B-A3B-NVFP4 (hf_quant_config.json, shortened)",
        {
            "producer": {"name": "modelopt", "version": "0.44.0"},
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["mtp*"],
                "quantized_layers": {
                    "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.language_model.layers.3.self_attn.k_proj": {"quant_algo": "FP8"},
                    "model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                },
            },
        },
        "modelopt/mixed",
        {Q: 8, EXPERT: 4.5, HEAD: 4.5, "model.layers.3.self_attn.o_proj": 16, "mtp.layers.0.mlp.down_proj": 16},
    ),
    (
        "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": None,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        },
        "bitsandbytes/nf4",
        {Q: pytest.approx(4.127, abs=1e-3), HEAD: 16, EMBED: 16},
    ),
    (
        "Intel/Qwen3-Coder-30B-A3B-Instruct-int4-AutoRound, shortened",
        {
            "bits": 4,
            "data_type": "int",
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}, MLP: {"bits": 16, "data_type": "fp"}},
            "group_size": 128,
            "packing_format": "auto_round:auto_gptq",
            "quant_method": "auto-round",
            "sym": True,
        },
        "auto-round/int4",
        {Q: GROUPS, EXPERT: GROUPS, MLP: 16, HEAD: 16, ROUTER: 16},
    ),
    (
        "amd/DeepSeek-R1-0528-MXFP4, shortened",
        {
            "exclude": ["lm_head", "re:.*self_attn.*", "*.mlp.gate"],
            "global_quant_config": {
                "input_tensors": {"dtype": "fp4", "group_size": 32, "is_dynamic": True, "qscheme": "per_group"},
                "weight": {"dtype": "fp4", "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"},
            },
            "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "quant_method": "quark",
        },
        "quark/mxfp4",
        {Q: 16, EXPERT: 4.25, HEAD: 16, ROUTER: 16},
    ),
]


@pytest.mark.parametrize(("source", "block", "method", "bits"), REAL, ids=[row[0] for row in REAL])
def test_each_module_of_a_real_block_has_its_bits(source, block, method, bits):
    found = read(block)
    assert found.method == method
    assert {module: found.bits(module) for module in bits} == bits


@pytest.mark.parametrize(
    ("name", "method", "bits"),
    [
        ("deepseek-v3.2", "fp8", {Q: BLOCKS, "model.layers.3.self_attn.indexer.weights_proj": 16, HEAD: 16}),
        ("minimax-m2.5", "fp8", {Q: BLOCKS, "model.layers.3.block_sparse_moe.gate": 16, "lm_head": 16}),
        ("qwen3-30b-a3b-fp8", "fp8", {Q: BLOCKS, EXPERT: BLOCKS, ROUTER: 16, HEAD: 16}),
        ("kimi-k2.5-nvfp4", "modelopt/nvfp4", {Q: 16, EXPERT: 4.5, "language_model.lm_head": 16, HEAD: 16}),
        ("gpt-oss-20b", "mxfp4", {"model.layers.3.mlp.experts.down_proj": 4.25, Q: 16}),
        ("llama-3.1-8b", "none", {Q: 16, HEAD: 16}),
    ],
)
def test_each_module_of_a_published_config_has_its_bits(name, method, bits):
    found = sample(name)
    assert found.method == method
    assert {module: found.bits(module) for module in bits} == bits


def test_what_stands_beside_the_weights_is_told():
    found = read(MODELOPT_NVFP4)
    assert (found.kv_cache_dtype, found.kv_cache_bits) == ("fp8", 8.0)
    assert (found.weight_bits, found.activation_bits, found.plain_bits) == (4.5, 4, 16.0)
    plain = read(None)
    assert (plain.method, plain.kv_cache_dtype, plain.activation_bits, plain.schemes) == ("none", None, None, ())
    assert {row[0]: read(row[1]).kv_cache_dtype for row in REAL}["amd/DeepSeek-R1-0528-MXFP4, shortened"] == "fp8"
    assert read(compressed("pack-quantized", group(4, "int", "group", group_size=128))).activation_bits is None


def test_the_scale_of_a_row_is_spread_over_the_row():
    found = read(compressed("int-quantized", group(8, "int", "channel")))
    assert found.bits(Q) == 8
    assert found.bits(Q, columns=4096) == 8 + 16 / 4096
    assert read({"quant_method": "gptq", "bits": 4, "group_size": -1}).bits(Q, columns=4096) == 4 + 20 / 4096


def test_the_scheme_of_most_weights_is_that_of_the_experts_where_layers_differ():
    mixed = next(row[1] for row in REAL if row[0].startswith("nvidia/Qwen3.6"))
    assert read(mixed).scheme is not None
    assert read(mixed).weight_bits == 4.5
    assert [scheme.name for scheme in read(mixed).schemes] == ["nvfp4", "fp8"]


def test_a_name_among_the_targets_goes_before_a_class():
    block = compressed(
        "mixed-precision",
        group(4, "int", "group", group_size=128) | {"format": "pack-quantized"},
        group(8, "float", "channel", targets=("re:.*self_attn.*",)) | {"format": "float-quantized"},
    )
    found = read(block)
    assert (found.bits(Q), found.bits(MLP), found.method) == (8, 4.125, "compressed-tensors/mixed")


def test_integers_that_do_not_fill_a_word_evenly_take_more_than_their_width():
    found = read(compressed("pack-quantized", group(3, "int", "group", group_size=128)))
    assert found.bits(Q) == 32 / 10 + 16 / 128
    unpacked = read(compressed("int-quantized", group(4, "int", "channel")))
    assert unpacked.bits(Q) == 8


def test_zero_points_count_where_a_group_has_them():
    found = read(compressed("pack-quantized", group(4, "int", "group", group_size=128, symmetric=False)))
    assert found.bits(Q) == 4 + (16 + 4) / 128


def test_embeddings_are_quantised_where_a_group_names_them():
    found = read(compressed("pack-quantized", group(4, "int", "group", group_size=64, targets=("Linear", "Embedding"))))
    assert (found.bits(EMBED), found.bits(HEAD), found.bits(NORM)) == (4.25, 16, 16)
    assert read(compressed("pack-quantized", group(4, "int", "group", group_size=64), ignore=())).bits(HEAD) == 4.25


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_block_may_stand_in_the_text_part(key):
    block = {"quant_method": "fp8"}
    found = read_quantization({"text_config": {"dtype": "float16", key: block}}, "config.json")
    assert (found.method, found.bits(Q), found.plain_bits) == ("fp8", 8, 16)


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("hf_quant_config.json", MODELOPT_NVFP4, "modelopt/nvfp4"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_a_block_in_a_file_of_its_own_is_read(tmp_path, name, content, method):
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert read_quantization({}, "config.json", tmp_path).method == method
    assert read_quantization({"quantization_config": {"quant_method": "fp8"}}, "config.json", tmp_path).method == "fp8"
    assert read_quantization({}, "config.json").method == "none"
    (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{name}: not JSON"):
        read_quantization({}, "config.json", tmp_path)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("fp8", "quantization_config must be an object"),
        ({"bits": 4}, "must name the method"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not known"),
        ({"quant_method": "awq", "bits": "4", "group_size": 128}, "bits is '4'"),
        ({"quant_method": "awq", "bits": 4}, "group_size is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two sides of a block"),
        ({"quant_method": "fp8", "expert_dtype": "fp5"}, "expert_dtype 'fp5'"),
        ({"quant_method": "fp8", "ignored_layers": [3]}, "list of module names"),
        ({"quant_method": "modelopt", "quant_algo": "W6A6"}, "quant_algo 'W6A6'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "neither quantized_layers nor config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP3"}, "KV cache type 'FP3'"),
        ({"quant_method": "bitsandbytes"}, "either load_in_4bit or load_in_8bit"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (compressed("marlin-24", group(4, "int", "group", group_size=128)), "format 'marlin-24'"),
        (compressed("float-quantized", group(6, "float", "tensor")), "float of 6 bits"),
        (compressed("nvfp4-pack-quantized", group(4, "float", "group", group_size=8)), "groups of 8"),
        (compressed("int-quantized", group(8, "int", "spiral")), "strategy 'spiral'"),
        (compressed("int-quantized", group(8, "int", "channel", targets=("LSTM",))), "class 'LSTM'"),
        (compressed("int-quantized", group(8, "int", "channel"), ignore=("re:(",)), "no regular expression"),
        (
            compressed("int-quantized", group(8, "int", "channel"), sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format 'sparse-24-bitmask'",
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp7"}}}, "dtype 'fp7'"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "ternary"}, "data_type 'ternary'"),
    ],
)
def test_what_is_not_known_is_named_and_refused(block, message):
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read(block)
    assert message in str(caught.value)


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match=r"config\.json: torch_dtype 'float8_e4m3fn' is not known"):
        read_quantization({"torch_dtype": "float8_e4m3fn"}, "config.json")
    assert read_quantization({"dtype": "torch.float16"}, "config.json").plain_bits == 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text("abc.*:(+", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in paths(part, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@given(st.data())
def test_a_damaged_block_is_refused_or_gives_bits_of_a_weight(data):
    """Whatever stands where, the answer is a ConfigError or a number of bits that a weight can have."""
    block = data.draw(st.sampled_from([row[1] for row in REAL]))
    for _ in range(data.draw(st.integers(1, 3))):
        block = replaced(block, data.draw(st.sampled_from(paths(block))), data.draw(JSON))
    try:
        found = read(block)
    except ConfigError:
        return
    for module in (Q, EXPERT, SHARED, ROUTER, NORM, HEAD, EMBED):
        assert 1 <= found.bits(module, 4096) <= 64
