"""A model in the layers that a mesh and a plan ask for."""

from __future__ import annotations

from shardlab.errors import UserError
from shardlab.models.blocks import Blocks
from shardlab.models.columns import Columns
from shardlab.models.expert_layers import ExpertLayers
from shardlab.models.halves import Halves
from shardlab.models.model import Model
from shardlab.models.moe import MoE
from shardlab.program.mesh import Mesh


def cut_for(
    model: Blocks, mesh: Mesh, *, planned: bool = False, attention_apart: bool = False, columns: bool = False
) -> Model:
    """The model as a program's layers are: cut finer where the mesh slices layers, or the plan or a tie says so.

    Args:
        planned: whether a plan is followed, which shares a tied weight where a program of whole blocks cannot.
        attention_apart: whether that plan wants attention to be a step of its own.
        columns: whether the program wants every matrix cut by columns.

    Raises:
        UserError: when the model does not divide.
    """
    if mesh.ep > 1:
        if not isinstance(model, MoE):
            raise UserError(
                f"the mesh has ep {mesh.ep}, which cuts mixtures of experts, but {type(model).__name__} has none; "
                "train a MoE, or set ep to 1"
            )
        return ExpertLayers(model, mesh.ep)
    if columns:
        return Columns(model, mesh.tp)
    tied = planned and bool(model.borrowed(model.layers - 1))
    apart = mesh.cp > 1 or attention_apart
    if mesh.tp > 1 or apart or tied:
        return Halves(model, mesh.tp, context=apart)
    return model
