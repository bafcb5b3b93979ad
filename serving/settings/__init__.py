"""The engine-neutral serving file: what the server under test is meant to run with, in YAML.

    model: /models/hy3
    engine: vllm
    max_batch_size: 48            # from what the KV cache holds at the mean length
    max_model_len: 32768
    tensor_parallel_size: 8
    derived_from:                 # what the batch size was worked out for
      tensor_parallel_size: 8
      gpu: h200

`keys` reads it under every engine's names, `arguments` writes it as an engine's flags, `editing` changes it and leaves
all else in it as it was, `versions` keeps what it said before.
"""

from serving.settings.arguments import EngineArguments, engine_arguments
from serving.settings.editing import SettingEntry, edit_settings, write_settings
from serving.settings.keys import (
    DERIVED_KEYS,
    ENGINE_ALIASES,
    MAX_BATCH_SIZE_LIMIT,
    SETTING_ALIASES,
    SETTING_KEYS,
    SPLIT_KEYS,
    Scalar,
    Settings,
    StaleInput,
    parse_settings,
    read_assignment,
    read_settings,
    stale_inputs,
    stale_warning,
)
from serving.settings.versions import (
    Backup,
    Difference,
    Use,
    apply,
    backup,
    diff,
    restore,
    stored_settings,
    versions,
)

__all__ = [
    "DERIVED_KEYS",
    "ENGINE_ALIASES",
    "MAX_BATCH_SIZE_LIMIT",
    "SETTING_ALIASES",
    "SETTING_KEYS",
    "SPLIT_KEYS",
    "Backup",
    "Difference",
    "EngineArguments",
    "Scalar",
    "SettingEntry",
    "Settings",
    "StaleInput",
    "Use",
    "apply",
    "backup",
    "diff",
    "edit_settings",
    "engine_arguments",
    "parse_settings",
    "read_assignment",
    "read_settings",
    "restore",
    "stale_inputs",
    "stale_warning",
    "stored_settings",
    "versions",
    "write_settings",
]
