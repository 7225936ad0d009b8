"""Models as lists of layers: their shapes, FLOPs and bytes. `shardlab.models.tensors` computes them on torch."""

from shardlab.models.architectures import GPT, MLP, Llama, Mixtral, MoE
from shardlab.models.cutting import CutModel, cut, cut_for
from shardlab.models.layout import LayerLayout, Parameter
from shardlab.models.model import Blocks, Model
from shardlab.models.named import find_model

__all__ = [
    "GPT",
    "MLP",
    "Blocks",
    "CutModel",
    "LayerLayout",
    "Llama",
    "Mixtral",
    "MoE",
    "Model",
    "Parameter",
    "cut",
    "cut_for",
    "find_model",
]
