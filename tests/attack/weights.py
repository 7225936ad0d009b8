"""How ranks keep weights and optimizer states, sum gradients and update: one way for each layer of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.attack.writing import Writing

Named = dict[int, str]

LOADED = (("w", "weight"), ("s", "opt_state"))
"""What is loaded of a layer, after the first letter of its names."""


@dataclass
class Share:
    """A slice of a layer that some ranks compute with, all of them with the same one.

    Attributes:
        layer: whose.
        cut: which of how many slices.
        ranks: who computes with it.
        way: how it is kept: "whole" by every rank, or in "parts"; "sharded", or "states" alone sharded, among the
            ranks; on the "host" and copied; stepped "there"; by one "owner" that sends it to the others; or "frozen".
        order: the ranks in the order of their shards.
        weights, states, homes: names of what each rank keeps, of its optimizer state, and of its weight elsewhere.
        places: where that is.
        parts: names of the weights and states of the parts in which a rank keeps it, in order.
        full: names of the weights that passes are given.
    """

    layer: int
    cut: tuple[int, int]
    ranks: list[int]
    way: str
    order: list[int] = field(default_factory=list[int])
    weights: Named = field(default_factory=dict[int, str])
    states: Named = field(default_factory=dict[int, str])
    homes: Named = field(default_factory=dict[int, str])
    places: Named = field(default_factory=dict[int, str])
    parts: dict[int, list[tuple[str, str]]] = field(default_factory=dict[int, list[tuple[str, str]]])
    full: Named = field(default_factory=dict[int, str])

    def shard(self, rank: int) -> str:
        """Arguments of this rank's shard."""
        place, of = self.order.index(rank), len(self.order)
        return f"{self.layer}, {self.cut[0] * of + place}, {self.cut[1] * of}"

    @property
    def whole(self) -> str:
        return f"{self.layer}, {self.cut[0]}, {self.cut[1]}" if self.cut[1] > 1 else f"{self.layer}"


class Weights:
    """All weights of a program in the making.

    Attributes:
        kept: names of values that the step leaves.
    """

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.kept: set[str] = set()
        self.shares: list[Share] = []
        self._of: dict[tuple[int, int], Share] = {}

    # The beginning of a step.

    def load(self) -> None:
        random, writing = self.writing.random, self.writing
        ways = ["whole", "whole", "sharded", "states", "host", "there", "owner", "parts", "mixed"]
        most = random.choice(ways)
        owners = [l for l in range(len(writing.signatures)) if writing.sizes.weight_of(l) == l]
        trained = random.choice([l for l in owners if writing.sizes.weights[l]])
        for l in owners:
            frozen = l != trained and writing.chance(0.04)
            for cut, ranks in self._holders(l):
                way = random.choice([*ways[:-1]]) if most == "mixed" else most
                if not writing.sizes.weights[l]:
                    way = random.choice(["whole", "bare", "bare"])
                share = Share(l, cut, ranks, "frozen" if frozen else way, random.sample(ranks, len(ranks)))
                self.shares.append(share)
                self._of |= {(rank, l): share for rank in ranks}
        for share in random.sample(self.shares, len(self.shares)):
            self._load(share)

    def _holders(self, l: int) -> list[tuple[tuple[int, int], list[int]]]:
        """The slices of a layer, and the ranks that keep each in one way: those that compute with it, or more."""
        writing = self.writing
        computing = sorted({rank for use in self._uses(l) for rank in self._computing(use)})
        if writing.chance(0.1) and not writing.idle:
            computing = sorted(rank for site in writing.sites for rank in site)
        slices = len(writing.sites[0]) if writing.signatures[l].sliced and writing.together else 1
        return [
            ((at, slices), part)
            for at in range(slices)
            for part in self._parted(l, [rank for rank in computing if rank % slices == at])
        ]

    def _parted(self, l: int, ranks: list[int]) -> list[list[int]]:
        """The ranks that compute with a slice, together or in two parts that may keep it in different ways: those of
        a tied head apart from those of the embedding, if there are any, or in any parts.
        """
        writing = self.writing
        if len(ranks) < 2 or not writing.sizes.weights[l] or not writing.chance(0.2):
            return [ranks]
        part = [rank for rank in ranks if rank not in self._computing(l)]
        if not part or len(part) == len(ranks):
            part = writing.random.sample(ranks, writing.random.randint(1, len(ranks) - 1))
        return [sorted(part), [rank for rank in ranks if rank not in part]]

    def _uses(self, l: int) -> list[int]:
        """The layers that compute with a layer's weight: the embedding's is also that of a tied head."""
        sizes = self.writing.sizes
        return [use for use in range(sizes.layers) if sizes.weight_of(use) == l]

    def _computing(self, l: int) -> set[int]:
        """The ranks that compute a layer."""
        return {rank for unit in self.writing.units for rank in unit.path[l]}

    def _load(self, share: Share) -> None:
        make, random, way = self.writing.lines.make, self.writing.random, share.way
        for rank in share.ranks:
            if way == "owner" and rank != share.order[0]:
                continue
            if way == "parts":
                self._load_parts(share, rank)
                continue
            if way in ("host", "there"):
                place = random.choice(["host", "host", "disk"]) if way == "host" else "host"
                share.places[rank] = place
                share.homes[rank] = make(rank, "w", f"rank.load_weight({share.whole}, place={place!r})")
                state = f", place={place!r}" if way == "there" else ""
                share.states[rank] = make(rank, "s", f"rank.load_opt_state({share.whole}{state})")
                continue
            held = share.shard(rank) if way == "sharded" else share.whole
            share.weights[rank] = make(rank, "w", f"rank.load_weight({held})")
            if way not in ("frozen", "bare"):
                held = share.shard(rank) if way in ("sharded", "states") else share.whole
                share.states[rank] = make(rank, "s", f"rank.load_opt_state({held})")
        self.kept |= {*share.weights.values(), *share.states.values(), *share.homes.values()}
        if way == "owner":
            owner = share.order[0]
            share.full = {owner: share.weights[owner]}
            for rank in share.order[1:]:
                share.full |= self.writing.moved(share.weights, [owner], [rank])
        elif way not in ("sharded", "host", "there", "parts"):
            share.full = dict(share.weights)

    def _load_parts(self, share: Share, rank: int) -> None:
        """Load a rank's slice in some equal parts, in any order."""
        make, random = self.writing.lines.make, self.writing.random
        of = random.randint(1, 3)
        loaded: dict[int, tuple[str, str]] = {}
        for at in random.sample(range(of), of):
            held = f"{share.layer}, {share.cut[0] * of + at}, {share.cut[1] * of}"
            weight, state = (make(rank, stem, f"rank.load_{what}({held})") for stem, what in LOADED)
            loaded[at] = weight, state
            self.kept |= {weight, state}
        share.parts[rank] = [loaded[at] for at in range(of)]

    def name(self, rank: int, l: int) -> str:
        """The name of the weight with which a rank computes, which is gathered or copied first."""
        writing = self.writing
        share = self._of[rank, writing.sizes.weight_of(l)]
        if not share.full or (share.way == "sharded" and writing.chance(0.1)):
            if share.way == "sharded":
                share.full = self._gathered(share, share.weights)
            else:
                share.full = {each: self._copied(each, share) for each in share.ranks}
        if writing.chance(0.05):
            writing.rewritten(rank, share.full[rank], "w") if share.way != "there" else None
        return share.full[rank]

    def _copied(self, rank: int, share: Share) -> str:
        """A copy on the device of a weight that is kept in parts, or elsewhere; and perhaps slices of it."""
        writing = self.writing
        if share.way == "parts":
            parts = ", ".join(f"k.{weight}" for weight, _ in share.parts[rank])
            return writing.lines.make(rank, "w", f"rank.concatenate([{parts}])")
        copy = writing.lines.make(rank, "w", f"await rank.reload(k.{share.homes[rank]})")
        for _ in range(writing.random.choice([0, 0, 1, 2])):
            of = writing.random.randint(1, 4)
            writing.lines.make(rank, "v", f"rank.slice(k.{copy}, {writing.random.randrange(of)}, {of})")
        return copy

    def _gathered(self, share: Share, values: Named) -> Named:
        """Shards put side by side, in whatever order the ranks are named."""
        if len(share.order) == 1 and self.writing.chance(0.5):
            return dict(values)
        return self.writing.collective("w", share.ranks, "all_gather", values)

    # The end of a step.

    def update(self) -> None:
        shares = self.writing.random.sample(self.shares, len(self.shares))
        slices: dict[tuple[int, tuple[int, int]], list[Share]] = {}
        for share in shares:
            slices.setdefault((share.layer, share.cut), []).append(share)
        sums = {key: self._totals(each) for key, each in slices.items()}
        totals = {id(share): sums[share.layer, share.cut] for share in shares}
        norm = self._norm(totals) if self.writing.chance(0.25) else {}
        for share in self.writing.random.sample(shares, len(shares)):
            self._update(share, totals[id(share)], norm)

    def _totals(self, shares: Sequence[Share]) -> Named:
        """The finished gradient of a slice on all ranks that keep it: summed over units and ranks, and scaled back."""
        share, *others = shares
        if share.way in ("frozen", "bare"):
            for each in shares:
                self._averaged(each)
            return {}
        uses = self._uses(share.layer)
        groups = self._groups(share.cut, sorted(rank for each in shares for rank in each.ranks))
        apart = [[use] for use in uses] if len(uses) > 1 and self.writing.chance(0.4) else [uses]
        scatters = share.way in ("sharded", "states") and len(share.order) > 1 and len(groups) == 1 and not others
        if scatters and self.writing.chance(0.6):
            return self._added([self._scattered(share, each) for each in apart])
        totals: Named = {}
        for ranks in groups:
            totals |= self._added([self._reduced(share, ranks, each) for each in apart])
        random, rewritten = self.writing.random, self.writing.rewritten
        return {rank: rewritten(rank, name, "g") if random.random() < 0.15 else name for rank, name in totals.items()}

    def _added(self, totals: Sequence[Named]) -> Named:
        """The sum of the gradients that a weight has of its uses, on each rank."""
        found, *others = totals
        for other in others:
            found = {rank: self.writing.lines.make(rank, "g", f"k.{other[rank]} + k.{found[rank]}") for rank in found}
        return found

    def _sum_of_units(self, share: Share, rank: int, uses: Sequence[int]) -> str:
        """A rank's gradients of a weight that some layers have computed with it, added; zeros if there are none."""
        writing, make = self.writing, self.writing.lines.make
        parts = [name for use in uses for name in writing.gradients.get((rank, use), ())]
        if not parts or writing.chance(0.3 if len(self._uses(share.layer)) > 1 else 0.1):
            zero = make(rank, "g", f"rank.zero_gradient({share.whole})")
            parts.append(make(rank, "g", f"rank.scale(k.{zero}, {writing.factor[0]})") if writing.factor[0] else zero)
        writing.random.shuffle(parts)
        scaled_first = writing.factor[1] and writing.chance(0.4)
        if scaled_first:
            parts = [make(rank, "g", f"rank.scale(k.{part}, {writing.factor[1]})") for part in parts]
        while len(parts) > 1:
            a, b = parts.pop(), parts.pop(writing.random.randrange(len(parts)))
            if writing.chance(0.1):
                make(rank, "v", f"rank.slice(k.{b}, 0, 2)")
            parts.append(make(rank, "g", writing.random.choice([f"k.{a} + k.{b}", f"rank.add(k.{a}, k.{b})"])))
        if writing.factor[1] and not scaled_first:
            parts = [make(rank, "g", f"rank.scale(k.{parts[0]}, {writing.factor[1]})")]
        return parts[0]

    def _groups(self, cut: tuple[int, int], ranks: list[int]) -> list[list[int]]:
        """Those of the ranks that keep a slice among which its gradients are summed: they computed other tokens."""
        writing = self.writing
        if writing.together == "tp" and cut[1] == 1:
            slices = len(writing.sites[0])
            return [part for at in range(slices) if (part := [rank for rank in ranks if rank % slices == at])]
        return [ranks]

    def _scattered(self, share: Share, uses: Sequence[int]) -> Named:
        """Each rank's shard of the sum."""
        order = share.order
        mine = {rank: self._sum_of_units(share, rank, uses) for rank in share.ranks}
        return self.writing.issue("g", order, "reduce_scatter", mine, f"among={order}")

    def _reduced(self, share: Share, ranks: Sequence[int], uses: Sequence[int]) -> Named:
        """The sum on all of some ranks. If some of them have not computed these layers, they give zeros, or they are
        sent the sum of the others.
        """
        computing = [rank for rank in ranks if any(rank in self._computing(use) for use in uses)]
        giving = computing if computing and self.writing.chance(0.5) else ranks
        mine = {rank: self._sum_of_units(share, rank, uses) for rank in giving}
        found = self._reduced_among(share, giving, mine)
        for rank in ranks:
            if rank not in found:
                found |= self.writing.moved(found, [giving[0]], [rank])
        return found

    def _reduced_among(self, share: Share, ranks: Sequence[int], mine: Named) -> Named:
        writing, random, make = self.writing, self.writing.random, self.writing.lines.make
        way = random.choice(["all_reduce"] * 3 + ["messages", "scatter and gather", "mean after", "shares after"])
        if len(ranks) == 1 and writing.chance(0.6):
            return mine
        if way == "messages" or (way == "all_reduce" and share.way == "owner" and writing.chance(0.5)):
            root, *others = random.sample(list(ranks), len(ranks))
            total = mine[root]
            for rank in others:
                part = writing.moved(mine, [rank], [root])[root]
                total = make(root, "g", f"k.{total} + k.{part}")
            found = {root: total}
            for rank in others:
                found |= writing.moved(found, [root], [rank])
            return found
        if way == "scatter and gather":
            order = random.sample(list(ranks), len(ranks))
            shards = writing.issue("g", order, "reduce_scatter", mine, f"among={order}")
            return writing.collective("g", ranks, "all_gather", shards)
        found = writing.collective("g", ranks, "all_reduce", mine)
        if way == "mean after":
            return writing.collective("g", ranks, "all_reduce", found, "reduction='mean'")
        if way == "shares after":
            part = {
                rank: make(rank, "g", f"rank.scale(k.{name}, Fraction(1, {len(ranks)}))")
                for rank, name in found.items()
            }
            return writing.collective("g", ranks, "all_reduce", part)
        return found

    def _averaged(self, share: Share) -> None:
        """Gradients that no update needs are left alone, or averaged for nothing."""
        writing = self.writing
        if share.way == "bare" and writing.chance(0.5):
            mine = {rank: self._sum_of_units(share, rank, [share.layer]) for rank in share.ranks}
            for ranks in self._groups(share.cut, share.ranks):
                if len(ranks) > 1:
                    writing.collective("g", ranks, "all_reduce", {rank: mine[rank] for rank in ranks})

    def _norm(self, totals: dict[int, Named]) -> Named:
        """Squared norm of the whole gradient, where every rank has all of it and no layer is cut."""
        writing, make = self.writing, self.writing.lines.make
        shares = [share for share in self.shares if share.way not in ("frozen", "bare")]
        everyone = sorted(rank for site in writing.sites for rank in site)
        plain = all(share.ranks == everyone and share.cut == (0, 1) for share in self.shares)
        if not plain or any(share.way in ("sharded", "states") for share in shares):
            return {}
        found: Named = {}
        for rank in everyone:
            parts = [make(rank, "n", f"rank.norm({s.layer}, k.{totals[id(s)][rank]})") for s in shares]
            while len(parts) > 1:
                parts.append(make(rank, "n", f"k.{parts.pop()} + k.{parts.pop()}"))
            found[rank] = parts[0]
        return found

    def _update(self, share: Share, totals: Named, norm: Named) -> None:
        writing, make = self.writing, self.writing.lines.make
        if share.way in ("frozen", "bare"):
            return
        if share.way == "parts":
            self._update_parts(share, totals, norm)
            return
        stepping = [share.order[0]] if share.way == "owner" else share.ranks
        new: Named = {}
        for rank in writing.random.sample(stepping, len(stepping)):
            weight = share.weights.get(rank, share.full.get(rank, ""))
            if share.way == "there":
                weight = share.homes[rank]
            if not weight:  # kept on the host, and nobody computed with it
                weight = self._copied(rank, share)
            gradient = totals[rank]
            if share.way == "there":
                gradient = make(rank, "g", f"await rank.offload(k.{gradient})")
            one, other = writing.lines.name("w"), writing.lines.name("s")
            limit = f", k.{norm[rank]}" if norm else ""
            state = share.states[rank]
            writing.lines.put(
                rank,
                f"k.{one}, k.{other} = rank.update({share.layer}, k.{gradient}, k.{weight}, k.{state}{limit})",
            )
            self.kept -= {weight, state}
            self.kept |= {other}
            new[rank] = one
            if share.way == "host":
                home = share.homes[rank]
                place = share.places[rank]
                back = make(rank, "w", f"await rank.offload(k.{one}, {place!r})")
                self.kept = (self.kept - {home}) | {back}
            else:
                self.kept |= {one}
        if share.way == "states" and len(share.order) > 1:
            self.kept -= set(new.values())
            self.kept |= set(self._gathered(share, new).values())

    def _update_parts(self, share: Share, totals: Named, norm: Named) -> None:
        lines, random = self.writing.lines, self.writing.random
        for rank in share.ranks:
            limit = f", k.{norm[rank]}" if norm else ""
            for weight, state in random.sample(share.parts[rank], len(share.parts[rank])):
                one, other = lines.name("w"), lines.name("s")
                given = f"{share.layer}, k.{totals[rank]}, k.{weight}, k.{state}{limit}"
                lines.put(rank, f"k.{one}, k.{other} = rank.update({given})")
                self.kept = (self.kept - {weight, state}) | {one, other}
