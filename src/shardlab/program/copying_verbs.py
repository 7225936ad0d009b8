"""The verbs that copy values between the rank's device, the host's memory and the disk."""

from __future__ import annotations

from collections.abc import Callable

from shardlab.errors import Refused
from shardlab.program.ops import OpKind
from shardlab.program.tape import Op
from shardlab.program.tracing import RankContext
from shardlab.program.values import Handle, Value, Wait
from shardlab.rules import place
from shardlab.rules.spec import Spec


class CopyHandle(Handle[Value]):
    """A copy under way; it waits for no other rank."""

    __slots__ = ()

    def __init__(self, rank: RankContext, value: Value, made: Spec) -> None:
        self._begin(rank, rank.make(made), value, ready=True)

    def wait(self) -> Wait:
        raise AssertionError("a copy is ready at once")


class CopyingVerbs(RankContext):
    """Copies that start at once; `await` the handle for the copy."""

    def offload(self, value: Value, to: str = "host") -> Handle[Value]:
        """Copy a value elsewhere, so that its memory on the device can be freed.

        It can be kept there, and reloaded. In the host's memory weights' gradients are also added, and weights that lie
        there with their optimizer states updated, by the host's processors. What a layer has kept of an activation is
        not copied: its layer's backward pass computes it again.

        Args:
            value: a weight, an optimizer state, an activation or a gradient, on the device.
            to: "host", its memory, or "disk", a file.

        Raises:
            Refused: for another place, for a scalar, statistics or a term of a sum, for a value that is not on the
                device, and for a weight's gradient that would go to the disk.
        """
        return self._copy(OpKind.OFFLOAD, value, lambda spec: place.offload(spec, to), to)

    def reload(self, value: Value) -> Handle[Value]:
        """Copy a value from where it lies to the device.

        Raises:
            Refused: for a value that is there.
        """
        return self._copy(OpKind.RELOAD, value, place.reload)

    def _copy(self, kind: OpKind, value: Value, rule: Callable[[Spec], Spec], to: str = "") -> Handle[Value]:
        spec = self._read(value, kind.value)
        try:
            made = rule(spec)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        handle = CopyHandle(self, value, made)
        op = Op(kind, spec.layer, (value.number,), (handle.result.number,), handle.number, place=to)
        self._issue(op, handle, value)
        return handle
