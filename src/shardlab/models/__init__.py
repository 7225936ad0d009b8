"""Models as lists of layers: their shapes, FLOPs and bytes. `shardlab.models.tensors` computes them on torch."""

from shardlab.models.blocks import Blocks
from shardlab.models.cutting import CutModel, cut, cut_for
from shardlab.models.gpt import GPT
from shardlab.models.layout import LayerLayout, Parameter
from shardlab.models.llama import Llama, Mixtral
from shardlab.models.mlp import MLP
from shardlab.models.model import Model
from shardlab.models.moe import MoE
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
