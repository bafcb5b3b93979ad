"""What is known of a language model from its `config.json`: its shape, and the sizes that follow from it."""

from serving.model.shape import BUILT_IN_MODELS, ModelShape, Parameters, Split, read_model

__all__ = ["BUILT_IN_MODELS", "ModelShape", "Parameters", "Split", "read_model"]
