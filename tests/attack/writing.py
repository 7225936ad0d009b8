"""Programs that are right by construction: any dealing of layers and microbatches, in many ways of writing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from shardlab.language import Mesh
from shardlab.language.rules.layer_graph import Layer
from shardlab.language.rules.layer_rules import GRADIENT_OF
from tests.attack.losses import losses_of
from tests.attack.models import TIED, sizes_of
from tests.attack.script import NAMES, Lines, Script
from tests.attack.weights import Weights

Named = dict[int, str]
"""A value of several ranks: its name on each."""


@dataclass
class Unit:
    """Some microbatches that pass the layers together.

    Attributes:
        batch: arguments of `load_batch` for each rank of a site, by its place there.
        cells: tokens that count as one, in each rank's batch: microbatches times slices of their sequences.
        path: the site that computes each layer.
        inputs, values: names of each layer's inputs, and of the value that passed last.
        carried: names of what is carried beside the activation, by kind.
        pieced: whether a rank has put its batch together from pieces. Later slices are those pieces, if they are as
            many, so no rank may put it together anew.
    """

    batch: list[tuple[list[int], list[int] | None]]
    cells: int
    path: list[tuple[int, ...]]
    inputs: dict[int, Named] = field(default_factory=dict[int, Named])
    gradient: Named = field(default_factory=dict[int, str])
    value: Named = field(default_factory=dict[int, str])
    carried: dict[str, Named] = field(default_factory=dict[str, Named])
    pieced: bool = False


class Writing:
    """One program in the making.

    Args:
        seed: decides everything.

    Attributes:
        model, mesh, microbatches: what is trained where.
        sites: ranks that compute a layer together: one, or those that share its slices.
        factor: by which every loss is multiplied, and its inverse ("": by nothing).
        gradients: names of the weight's gradients that a rank has computed in a layer, by rank and layer. A tied head
            computes gradients of the embedding's weight.
    """

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.model, self.mesh = self._scene()
        world, mesh = self.mesh.world, self.mesh
        self.sizes = sizes_of(self.model, mesh)
        self.lines = Lines(world)
        self.together = "ep" if mesh.ep > 1 else "tp" if mesh.tp > 1 else ""
        count = mesh.ep * mesh.tp
        sites = [tuple(range(at, at + count)) for at in range(0, world, count)]
        idle = world > count and random.random() < 0.25
        self.sites = random.sample(sites, len(sites) - 1) if idle else sites
        self.idle = [rank for site in sites if site not in self.sites for rank in site]
        self.signatures = self.sizes.signatures
        self.microbatches = mesh.ep * random.randint(1, max(1, 5 // mesh.ep))
        self.units = self._deal()
        self.factor = random.choice(self._factors()) if random.random() < 0.4 else ("", "")
        self.gradients: dict[tuple[int, int], list[str]] = {}
        self.weights = Weights(self)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def _scene(self) -> tuple[str, Mesh]:
        """A model and a mesh of 1 to 4 ranks."""
        random = self.random
        kind = random.choice(["whole"] * 5 + ["tp"] * 3 + ["ep", "cp"])
        if kind == "tp":
            model = random.choice(["gpt", "llama", "moe", "mixture", *TIED])
            return model, Mesh(tp=2, dp_shard=random.choice([1, 1, 2]))
        if kind == "ep":
            return random.choice(["moe", "mixture", "tied moe"]), Mesh(ep=2, dp_shard=random.choice([1, 1, 2]))
        if kind == "cp":
            return "mlp", Mesh(cp=2, dp_shard=random.choice([1, 1, 2]))
        model = random.choice(["gpt", "gpt", "gpt3", "llama", "mlp", "moe", "mixture", "mixtral", "tied", *TIED])
        axes = ["dp_shard", "dp_replicate"] if model in TIED else ["dp_shard", "dp_replicate", "pp"]
        return model, Mesh(**{random.choice(axes): random.choice([1, 2, 2, 3, 4])})

    def _factors(self) -> list[tuple[str, str]]:
        world = max(2, self.mesh.world)
        return [
            ("Fraction(1, 2)", "2"),
            ("3", "Fraction(1, 3)"),
            (f"Fraction(1, {world})", f"{world}"),
            ("rank.tokens([0])", "1 / rank.tokens([0])"),
            ("-1", "-1"),
        ]

    # Dealing.

    def _deal(self) -> list[Unit]:
        """Microbatches in units, and each unit's way through the sites."""
        random, each = self.random, self.mesh.ep
        numbers = random.sample(range(self.microbatches), self.microbatches)
        sizes: list[int] = []
        while (left := self.microbatches // each - sum(sizes)) > 0:
            sizes.append(random.randint(1, left))
        units: list[Unit] = []
        staged = self._bounds() if self.chance(0.3) else None
        for size in sizes:
            parts = [[numbers.pop() for _ in range(size)] for _ in range(each)]
            cut: list[tuple[list[tuple[list[int], list[int] | None]], int]] = []
            if self.mesh.cp > 1 and self.chance(0.7):
                slices = random.sample(range(4), 4)
                at = random.randint(1, 3)
                halves = [slices[:at], slices[at:]] if self.chance(0.7) else [slices]
                cut.extend(([(parts[0], half)], size * len(half)) for half in halves)
            else:
                shared = parts if self.mesh.ep > 1 else parts * self.mesh.tp
                cut.append(([(part, None) for part in shared], size * self._sequence))
            for batch, cells in cut:
                bounds = staged or (self._bounds() if self.chance(0.3) else [(random.choice(self.sites), self._layers)])
                path = [site for site, count in bounds for _ in range(count)]
                units.append(Unit(list(batch), cells, path))
        return units

    @property
    def _layers(self) -> int:
        return len(self.signatures)

    @property
    def _sequence(self) -> int:
        return self.sizes.space(self.mesh, 1).sequence

    def _bounds(self) -> list[tuple[tuple[int, ...], int]]:
        """Sites one after the other, and how many layers each has."""
        stages = self.random.randint(1, min(len(self.sites), self._layers))
        cuts = sorted(self.random.sample(range(1, self._layers), stages - 1))
        counts = [b - a for a, b in pairwise([0, *cuts, self._layers])]
        return list(zip(self.random.sample(self.sites, stages), counts, strict=True))

    # Writing.

    def script(self) -> Script:
        self.weights.load()
        units = self.random.sample(self.units, len(self.units))
        while units:
            count = self.random.choice([1, 1, 2, len(units)])
            round_, units = units[:count], units[count:]
            for unit in round_:
                self._forward(unit)
            losses_of(self, round_)
            for unit in self.random.sample(round_, len(round_)):
                self._backward(unit)
        self.weights.update()
        return Script(self.mesh, tuple(tuple(self._ended(lines)) for lines in self.lines.of))

    def _forward(self, unit: Unit) -> None:
        unit.value = {rank: self._load(rank, unit, place) for place, rank in enumerate(unit.path[0])}
        unit.carried = {}
        before = unit.path[0]
        for l, signature in enumerate(self.signatures):
            site = unit.path[l]
            if site != before:
                unit.value = self.moved(unit.value, before, site)
                unit.carried = {kind: self.moved(each, before, site) for kind, each in unit.carried.items()}
                before = site
            if self.together == "ep" and signature.sliced:
                unit.value = self.collective("x", site, "all_to_all", unit.value)
            elif self.chance(0.1):
                stem = "x" if l else "b"
                cells = self._cells(unit, signature)
                unit.value = {rank: self.rewritten(rank, name, stem, cells) for rank, name in unit.value.items()}
            unit.inputs[l] = unit.value
            made = [self._call_forward(rank, l, unit) for rank in site]
            for port in signature.inputs[1:]:
                del unit.carried[port.kind.name]
            unit.value = {rank: names[0] for rank, names in zip(site, made, strict=True)}
            for at, port in enumerate(signature.outputs[1:], 1):
                unit.carried[port.kind.name] = {rank: names[at] for rank, names in zip(site, made, strict=True)}
            if signature.sliced and self.together == "ep":
                unit.value = self.collective("x", site, "all_to_all", unit.value)
            elif signature.sliced and self.together and l < self._layers - 1:
                unit.value = self.collective("x", site, "all_reduce", unit.value)

    def _load(self, rank: int, unit: Unit, place: int) -> str:
        """Activation 0, perhaps of unequal pieces."""
        numbers, slices = unit.batch[place]
        cut = "" if slices is None else f", {slices}"
        if len(numbers) > 1 and self.together != "ep" and self.chance(0.5):
            at = self.random.randint(1, len(numbers) - 1)
            one = self.lines.make(rank, "x", f"rank.load_batch({numbers[:at]}{cut})")
            other = self.lines.make(rank, "x", f"rank.load_batch({numbers[at:]}{cut})")
            unit.pieced = True
            return self.lines.make(rank, "x", f"rank.concatenate([k.{one}, k.{other}])")
        return self.lines.make(rank, "x", f"rank.load_batch({numbers}{cut})")

    def _call_forward(self, rank: int, l: int, unit: Unit) -> list[str]:
        signature = self.signatures[l]
        weight = self.weights.name(rank, l)
        given = [unit.value[rank], *(unit.carried[port.kind.name][rank] for port in signature.inputs[1:])]
        save = ", save=False" if signature.recomputed and self.chance(0.15) else ""
        outputs = [self.lines.name("x" if at == 0 else "c") for at in range(len(signature.outputs))]
        if signature.recomputed:
            self.lines.put(rank, f"k.{outputs[0]} = rank.forward({l}, k.{given[0]}, k.{weight}{save})")
        else:
            inputs = ", ".join(f"k.{name}" for name in given)
            targets = ", ".join(f"k.{name}" for name in outputs)
            self.lines.put(rank, f"{targets}, = rank.forward({l}, ({inputs},), k.{weight})")
        return outputs

    def _backward(self, unit: Unit) -> None:
        gradient, above, before = unit.gradient, dict[str, Named](), unit.path[-1]
        for l, signature in reversed(list(enumerate(self.signatures))):
            site = unit.path[l]
            if site != before:
                gradient = self.moved(gradient, before, site)
                above = {kind: self.moved(each, before, site) for kind, each in above.items()}
                before = site
            if self.together == "ep" and signature.sliced:
                gradient = self.collective("d", site, "all_to_all", gradient)
            elif self.chance(0.1):
                after = self.signatures[l + 1] if l + 1 < self._layers else signature
                cells = self._cells(unit, after)
                gradient = {rank: self.rewritten(rank, name, "d", cells) for rank, name in gradient.items()}
            made = [self._call_backward(rank, l, unit, gradient, above) for rank in site]
            for port in signature.outputs[1:]:
                del above[GRADIENT_OF[port.kind].name]
            gradient = {rank: names[0] for rank, names in zip(site, made, strict=True)}
            for at, port in enumerate(signature.inputs[1:], 1):
                above[GRADIENT_OF[port.kind].name] = {rank: names[at] for rank, names in zip(site, made, strict=True)}
            if signature.sliced and self.together == "ep":
                gradient = self.collective("d", site, "all_to_all", gradient)
            elif signature.sliced and self.together and l:
                gradient = self.collective("d", site, "all_reduce", gradient)

    def _call_backward(self, rank: int, l: int, unit: Unit, gradient: Named, above: dict[str, Named]) -> list[str]:
        signature, make = self.signatures[l], self.lines.name
        given = [gradient[rank], *(above[GRADIENT_OF[port.kind].name][rank] for port in signature.outputs[1:])]
        x, weight = unit.inputs[l][rank], self.weights.name(rank, l)
        total, made = make("g"), [make("d") for _ in signature.inputs]
        inputs = f"k.{given[0]}" if signature.recomputed else f"({', '.join(f'k.{name}' for name in given)},)"
        targets = ", ".join(f"k.{name}" for name in made)
        if self.chance(0.2) and self.sizes.weights[self.sizes.weight_of(l)]:
            one = "" if signature.recomputed else ","
            self.lines.put(rank, f"{targets}{one} = rank.backward_input({l}, k.{x}, {inputs}, k.{weight})")
            self.lines.put(rank, f"k.{total} = rank.backward_weight({l}, k.{x}, k.{given[0]})")
        else:
            self.lines.put(rank, f"k.{total}, {targets} = rank.backward({l}, k.{x}, {inputs}, k.{weight})")
        self.gradients.setdefault((rank, l), []).append(total)
        return made

    # Communication.

    def moved(self, values: Named, source: Sequence[int], target: Sequence[int]) -> Named:
        """Send values from one site to another, rank by rank."""
        found: Named = {}
        for a, b in zip(source, target, strict=True):
            handle = self.lines.make(a, "h", f"rank.send(k.{values[a]}, to={b})")
            found[b] = self.lines.make(b, "x", f"await rank.recv(source={a})")
            if self.chance(0.5):
                self.lines.put(a, f"await k.{handle}")
        return found

    def group(self, ranks: Sequence[int], verb: str) -> tuple[str, list[int]]:
        """A group's arguments, and its members as they are named; experts are exchanged in their own order."""
        members = list(ranks)
        along = [
            axis
            for axis in ("dp_shard", "dp_replicate", "pp", "tp", "ep", "cp")
            if list(self.mesh.group(members[0], axis).ranks) == members
        ]
        whole = members == list(range(self.mesh.world))
        if along and self.chance(0.4):
            return f"axis={self.random.choice(along)!r}", members
        if whole and self.chance(0.3):
            return "", members
        if verb == "all_to_all":
            return f"among={members}", members
        order = self.random.sample(members, len(members))
        return f"among={order}", order

    def collective(self, stem: str, ranks: Sequence[int], verb: str, values: Named, more: str = "") -> Named:
        """A collective of some ranks' values, started and awaited at once, or awaited later."""
        arguments, _ = self.group(ranks, verb)
        return self.issue(stem, ranks, verb, values, ", ".join(filter(None, (arguments, more))))

    def issue(self, stem: str, ranks: Sequence[int], verb: str, values: Named, arguments: str) -> Named:
        """A collective whose group is known."""
        comma = ", " if arguments else ""
        if self.chance(0.7):
            return self.lines.together(stem, ranks, f"await rank.{verb}({{}}{comma}{arguments})", values)
        handles = self.lines.together("h", ranks, f"rank.{verb}({{}}{comma}{arguments})", values)
        return {rank: self.lines.make(rank, stem, f"await k.{handles[rank]}") for rank in ranks}

    # Values.

    def _cells(self, unit: Unit, signature: Layer) -> int:
        """How many cells the value has that a layer takes first; experts' buffers have no part for a part of them."""
        buffers = signature.name in ("experts", "combining") and self._sequence > 1
        return -1 if buffers or unit.pieced or self.mesh.cp > 1 else unit.cells

    def rewritten(self, rank: int, name: str, stem: str, cells: int = 0) -> str:
        """A value copied, or cut and put together again: the same numbers under another name.

        Args:
            stem: what it is: a batch, which cannot be cast; another activation, a gradient, or a weight.
            cells: of an activation or its gradient, or -1 for one that has no slices (0: this is a weight or a
                weight's gradient).
        """
        make = self.lines.make
        slices = [] if cells < 0 else ["slices", "unread"]
        way = self.random.choice([*slices, "host", *(["cast"] if stem != "b" else [])])
        if way == "cast":
            copy = make(rank, stem, f"rank.cast(k.{name}, {self.random.choice(['bfloat16', 'float32'])!r})")
            return make(rank, stem, f"rank.cast(k.{copy})")
        if way == "host":
            place = self.random.choice(["host", "disk"]) if stem != "g" else "host"
            copy = make(rank, stem, f"await rank.offload(k.{name}, {place!r})")
            return make(rank, stem, f"await rank.reload(k.{copy})")
        if cells:
            whole = self._sequence if self._sequence > 1 else cells
            parts = self.random.choice([n for n in range(1, whole + 1) if whole % n == 0] or [1])
        else:
            parts = self.random.randint(1, 4)
        if way == "unread":
            make(rank, stem, f"rank.slice(k.{name}, {self.random.randrange(parts)}, {parts})")
            return name
        pieces = [make(rank, stem, f"rank.slice(k.{name}, {at}, {parts})") for at in range(parts)]
        if not cells:  # of tokens, the order would be that in which later slices are dealt
            self.random.shuffle(pieces)
        return make(rank, stem, f"rank.concatenate([{', '.join(f'k.{piece}' for piece in pieces)}])")

    def _ended(self, lines: list[str]) -> list[str]:
        """A rank's statements, and where its values end: at once, later, or at the end of the step."""
        last: dict[str, int] = {}
        for at, line in enumerate(lines):
            last |= {name: at for _, name in NAMES.findall(line)}
        ended: dict[int, list[str]] = {}
        kept = self.weights.kept
        taken: dict[int, set[str]] = {}
        for name, at in last.items():
            if name in kept or name.startswith("h_"):
                continue
            draw = self.random.random() * (0.9 if name[0] in "wv" else 1.0)
            makes = lines[at].partition("=")[0]
            if draw < 0.5 and f"k.{name}" not in makes:
                taken.setdefault(at, set()).add(name)
            elif draw < 0.9:
                at = at if draw < 0.75 else self.random.randint(at, min(at + 6, len(lines) - 1))
                ended.setdefault(at, []).append(f"del k.{name}")
        found: list[str] = []
        for at, line in enumerate(lines):
            for name in taken.get(at, ()):
                if [each for _, each in NAMES.findall(line)].count(name) == 1:
                    line = NAMES.sub(lambda found: f"pop.{name}" if found[2] == name else found[0], line)  # noqa: B023
            found += [line, *ended.get(at, ())]
        return found


def right_script(seed: int) -> tuple[Script, str, int]:
    """The right program of a seed, its model and its number of microbatches."""
    writing = Writing(seed)
    return writing.script(), writing.model, writing.microbatches
