"""The language of strategies: values, the mesh, the rank's verbs, and the tape that tracing makes of them."""

from shardlab.common.errors import Deadlock, Refused, UserError
from shardlab.language.mesh import AXES, Group, Mesh
from shardlab.language.ops import OpKind
from shardlab.language.rank import Rank
from shardlab.language.rules.kinds import Holds, Kind, Reduction
from shardlab.language.rules.spec import Spec
from shardlab.language.sizes import Sizes
from shardlab.language.tape import ExpectedValue, Op, Program
from shardlab.language.values import Handle, Store, Value
from shardlab.language.world import Strategy, World, trace

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
