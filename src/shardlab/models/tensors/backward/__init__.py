"""A layer's forward and backward pass as the executor runs them: each primitive has both, a layer is a list of them.

Most primitives have both written out, so that small layers wait for no graph of autograd's, and large ones keep and add
no more than they must. They are tested against the definitions, `shardlab.models.tensors.compute`.
"""

from shardlab.models.tensors.backward import dense, mixture
from shardlab.models.tensors.backward.autograd import CompiledPasses
from shardlab.models.tensors.backward.layer import PreparedLayer, prepared_layer
from shardlab.models.tensors.backward.workspace import AddGradients, Take, Weights, Workspace

WRITTEN_OUT = (dense, dense, dense, mixture, dense, dense)
"""The files that register primitives' passes, named so that they are imported."""

__all__ = ["AddGradients", "CompiledPasses", "PreparedLayer", "Take", "Weights", "Workspace", "prepared_layer"]
