"""The language of strategies: values, the mesh, the rank's verbs, and the tape that tracing makes of them."""

from shardlab.errors import Deadlock, Refused, UserError
from shardlab.program.mesh import AXES, Group, Mesh
from shardlab.program.ops import OpKind
from shardlab.program.rank import Rank
from shardlab.program.sizes import Sizes
from shardlab.program.tape import ExpectedValue, Op, Program
from shardlab.program.values import Handle, Store, Value
from shardlab.program.world import Strategy, World, trace
from shardlab.rules.kind import Kind, Reduction
from shardlab.rules.pieces import Holds
from shardlab.rules.spec import Spec

__all__ = [
    "AXES",
    "Deadlock",
    "ExpectedValue",
    "Group",
    "Handle",
    "Holds",
    "Kind",
    "Mesh",
    "Op",
    "OpKind",
    "Program",
    "Rank",
    "Reduction",
    "Refused",
    "Sizes",
    "Spec",
    "Store",
    "Strategy",
    "UserError",
    "Value",
    "World",
    "trace",
]
