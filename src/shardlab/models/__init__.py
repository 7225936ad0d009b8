"""Models as lists of layers: their shapes, FLOPs and bytes. `shardlab.models.tensors` runs the models on torch.

Read in this order: `primitives` (one step of a model's arithmetic), with `attention` and `mixture` (its larger
primitives); `model` (a model as a list of primitives, and as layers of a program) and `architectures` (GPT, Llama,
mixtures of experts); `layer` (a layer as a run of primitives), `layout` (parameters in a layer's flat buffer, and
kernels), `recomputation` (inside blocks) and `matrices` (matrices for Muon, and activations that frameworks keep).
`cutting` cuts a model into finer layers for parallelism. `named` finds a model by name, and `from_config` reads a
config.json of transformers.
"""

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
