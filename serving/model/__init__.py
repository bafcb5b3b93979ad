"""What is known of a language model from its files: its shape, and the sizes that follow from it.

Sizes are computed from the shape and never looked up, so that they hold for a model that nobody has listed. An
architecture that is not known is refused and never guessed.
"""

from serving.model.shape import (
    Attention,
    Dense,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    ModelShape,
    Module,
    RecurrentState,
    Split,
    StoredBits,
    UniformBits,
    Weights,
)
from serving.model.source import BUILT_IN_MODELS, read_model

__all__ = [
    "BUILT_IN_MODELS",
    "Attention",
    "Dense",
    "Experts",
    "Indexer",
    "LatentAttention",
    "Layer",
    "ModelShape",
    "Module",
    "RecurrentState",
    "Split",
    "StoredBits",
    "UniformBits",
    "Weights",
    "read_model",
]
