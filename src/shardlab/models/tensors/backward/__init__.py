"""Forward and backward passes of layers, as the executor runs them.

Each primitive has both passes, and a layer runs those of its primitives in order. Most backward passes are written by
hand: small layers then do not wait for autograd's graph, and large layers save and copy no more than they need. Tests
compare them with autograd through the definitions in `shardlab.models.tensors.compute`.

Read `workspace` first (the interface), then `layer` (how a layer runs passes), `dense` and `mixture` (the passes of the
primitives), and `autograd` (all other passes).
"""

from shardlab.models.tensors.backward import dense, mixture
from shardlab.models.tensors.backward.autograd import CompiledPasses
from shardlab.models.tensors.backward.layer import PreparedLayer, prepare_layer
from shardlab.models.tensors.backward.workspace import Accumulate, AddGradients, Context

WRITTEN_OUT = (dense, mixture)
"""Modules that register passes of primitives. They are named here so that they are imported."""

__all__ = ["Accumulate", "AddGradients", "CompiledPasses", "Context", "PreparedLayer", "prepare_layer"]
