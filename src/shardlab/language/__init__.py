"""The language of strategies: the values and verbs of a program, and its tapes.

A strategy is an async function of one `Rank`. `trace` runs it on all ranks with symbolic values and returns a
`Program`: one tape of ops for each rank. Read in this order: `mesh` (the grid of ranks), `ops` and `tape` (the table of
ops, and the tape), `values` (values, stores and handles), `rank` with its three families of verbs (`rank_values`,
`rank_compute`, `rank_communication`), then how tracing works: `tracing` (one rank), `rendezvous` and `collective_calls`
(communication between ranks) and `world` (the loop that drives them). `rules` is the algebra that derives each value
from an op's inputs. `sizes` and `precision` give elements and bytes; `pass_names` parses the names of tape passes that
a user asks for.
"""

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
