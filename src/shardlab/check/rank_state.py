"""One rank while its tape is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from shardlab.errors import Refused, Rule
from shardlab.program import Group, Holds, Kind, Op, Program, Spec
from shardlab.rules.kind import AUTOGRAD_KINDS
from shardlab.rules.layer import LayerRules
from shardlab.rules.pieces import counted
from shardlab.rules.spec import Form


class RankState:
    """State of a rank up to the op at hand: what is live, in flight and loaded.

    Attributes:
        trained: the program's layers whose weights are updated, as a bit set.
        rules: what ops make of values.
        layers: those of each layer.
        at: index of the op at hand.
        specs: the spec of every value made so far, by number.
        live: those that ops may use now.
        saved_of: live activation to what its layer keeps of its forward passes, by form: of each slice of the layer's
            parameters the latest.
        half_of: live activation to what first halves of its backward left for the second ones, by form.
        reading: value to how many communications in flight read it, if any.
        flying: handle to the index of the op that issued it.
        arrived: handle to what it delivers (None: nothing).
        loaded: (kind, layer, slices) to the index of the op that loaded them.
        clips: whether its updates so far were given the norm (None: there was no update).
        groups: those of which this rank has issued a collective.
        batches: batch to the index of its latest op.
        concerned: indices of the ops that are looked at again once all tapes have passed; walking whole tapes, half of
            them FREE, would cost a tenth of the check each time.
        waits_for: the handle that the rank waits for (-1: it does not).
    """

    def __init__(self, index: int, program: Program, trained: int) -> None:
        self.index = index
        self.program = program
        self.trained = trained
        self.ops = program.tapes[index]
        self.rules = program.rules
        self.layers = program.rules.layers
        self.at = 0
        self.specs: dict[int, Spec] = {}
        self.live = Live(self)
        self.saved_of: dict[int, dict[Form, int]] = {}
        self.half_of: dict[int, dict[Form, int]] = {}
        self.reading: dict[int, int] = {}
        self.flying: dict[int, int] = {}
        self.arrived: dict[int, Spec | None] = {}
        self.loaded: dict[tuple[Kind, int, Holds], int] = {}
        self.clips: bool | None = None
        self.groups: set[Group] = set()
        self.batches: dict[int, int] = {}
        self.concerned: list[int] = []
        self.waits_for = -1

    def make(self, number: int, spec: Spec) -> None:
        """A value comes to life; its number must be new."""
        if number in self.specs or number < 0:
            self._refuse_number(number)
        self.specs[number] = self.live[number] = spec

    def note(self, number: int, spec: Spec) -> None:
        """A value exists, whether or not ops may use it."""
        if number in self.specs or number < 0:
            self._refuse_number(number)
        self.specs[number] = spec

    def _refuse_number(self, number: int) -> NoReturn:
        self.refuse("number in use", f"makes value {number}, which must be a new one", "number values from 0")

    def make_all(self, numbers: Sequence[int], specs: Sequence[Spec]) -> None:
        """Values come to life, as many as the op says."""
        if len(numbers) != len(specs):
            given = f"numbers {counted(len(numbers), 'value')}, but makes {len(specs)} beside what the layer keeps"
            self.refuse("malformed tape", given, "number what it makes")
        known, live = self.specs, self.live
        for number, spec in zip(numbers, specs, strict=True):
            if number in known or number < 0:  # as in `make`, without a call for each
                self._refuse_number(number)
            known[number] = live[number] = spec

    def layer(self, op: Op) -> LayerRules:
        """The rules of the layer that an op computes."""
        if not 0 <= op[1] < len(self.layers):
            remedy = f"the model has layers 0-{len(self.layers) - 1}, name one of these"
            self.refuse("unknown layer", f"layer {op[1]} does not exist", remedy)
        return self.layers[op[1]]

    def want_layer(self, op: Op, layer: int) -> None:
        """The layer that an op names must be the one that it acts on."""
        if op[1] != layer:
            self.refuse("wrong layer", f"the op says layer {op[1]}, but it acts on layer {layer}", "say that one")

    def refuse(self, rule: Rule, given: str, remedy: str, op: int | None = None) -> NoReturn:
        """Refuse the op at hand, or another, or the tape's end."""
        at = self.at if op is None else op
        about = self.ops[at].about if at < len(self.ops) else ""
        raise Refused(rule, about, given, remedy).at(self.index, at)

    def refuse_input(self, number: int) -> NoReturn:
        """Say why an op may not use a value."""
        flying = next((handle for handle, at in self.flying.items() if number in self.ops[at].outputs), None)
        if flying is not None:
            self.refuse("in flight", f"value {number} is still in flight", f"wait for handle {flying} first")
        if number not in self.specs:
            self.refuse("freed", f"value {number} has not been made yet", "make it before")
        if self.specs[number].kind in AUTOGRAD_KINDS:
            remedy = "leave it to the backward of its activation"
            self.refuse("the layer's own", f"value {number} is what a layer keeps", remedy)
        given = f"value {number}, {self.specs[number]}, was freed or replaced before this op"
        self.refuse("freed", given, "free it after its last use")


class Live(dict[int, Spec]):
    """The specs of the values that a rank's ops may use now, by number; asking for any other is refused."""

    def __init__(self, state: RankState) -> None:
        super().__init__()
        self.state = state

    def __missing__(self, number: int) -> NoReturn:
        self.state.refuse_input(number)
