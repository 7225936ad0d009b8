"""The verbs that cut values and put them together on one rank: plain calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from shardlab.errors import Refused
from shardlab.program.ops import OpKind
from shardlab.program.rooted import Names
from shardlab.program.tape import Op
from shardlab.program.tracing import RankContext
from shardlab.program.values import Value
from shardlab.rules import dealing, gathers
from shardlab.rules.pieces import Holds


class SlicingVerbs(RankContext):
    """Slices of a value, and their concatenation."""

    def slice(self, value: Value, index: int, of: int) -> Value:
        """Slice `index`, from 0, of `of` equal ones: of what a value holds of its parameters, or of its tokens.

        Tokens are cut as `reduce_scatter` deals them: every sequence, where the mesh cuts sequences; else the batch, in
        whole microbatches. Tokens that were put together from so many pieces are cut into these, which may be unequal.
        The slice is a view of the value's memory, which stays until the last of both is freed.
        """
        spec = self._read(value, "slice")
        if index.__class__ is not int or of.__class__ is not int:
            given = f"slice {index!r} of {of!r} was asked for"
            self.refuse("unknown slice", spec.about("slice"), given, "give whole numbers")
        try:
            made = dealing.slice_of(spec, index, of)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.SLICE, made.layer, (value.number,), (output.number,), holds=Holds(1 << index, of)))
        self._done_with(value)
        return output

    def concatenate(self, values: Iterable[Value]) -> Value:
        """Pieces of one value side by side, in new memory: what `all_gather` makes of those that several ranks give.

        They may be given in any order: each goes where it belongs.
        """
        read = [values] if isinstance(values, Value) else list(values)
        if not read:
            self.refuse("wrong number", "concatenate", "no value was given", "give the pieces")
        specs = [self._read(value, "concatenate") for value in read]
        names = Names(range(len(specs)), "piece")
        rule = partial(gathers.gather, specs[0].about("concatenate"), specs, names)
        return self._made_of(read, OpKind.CONCATENATE, rule)
