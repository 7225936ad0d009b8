"""The models' arithmetic on torch: layers, dropout, first weights, loss and sampling."""

from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.generate import generate
from shardlab.models.tensors.layers import Layer, layers_of, loss_of
from shardlab.models.tensors.seeding import generator_of
from shardlab.models.tensors.weights import initial_weights, views

__all__ = ["Dropout", "Layer", "generate", "generator_of", "initial_weights", "layers_of", "loss_of", "views"]
