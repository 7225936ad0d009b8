"""Mistakes in right programs: a statement left out, moved or changed, on one rank or on all that meet in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from tests.attack.script import NAMES, Script

Ranks = list[list[str]]
AMONG = re.compile(r"among=(\[[\d, ]+\])")
NUMBER = re.compile(r"(?<![\w.])\d+(?!\w)")
COLLECTIVE = re.compile(r"rank\.(all_reduce|all_gather|reduce_scatter|all_to_all)\(")
BACKWARD = re.compile(r"k\.(g\w+)(?:, .*)? = rank\.backward(?:_weight)?\((\d+),")
SUM = re.compile(r"(?:k|pop)\.(g\w+) \+ (?:k|pop)\.(g\w+)|rank\.add\((?:k|pop)\.(g\w+), (?:k|pop)\.(g\w+)\)")
REDUCED = re.compile(r"await rank\.(?:all_reduce|reduce_scatter)\(((?:k|pop)\.g\w+).*\)$")
UPDATE = re.compile(r"(rank\.update\((\d+), )(?:k|pop)\.g\w+")
FACTOR = re.compile(r"(rank\.scale\((?:k|pop)\.\w+, )(.*)\)$")


def wild_script(script: Script, random: Random) -> Script:
    """The script with one to three mistakes, some of which change nothing that matters."""
    lines = [list(each) for each in script.lines]
    if random.random() < 0.6:  # nothing that a mistake moves or names again has gone before
        lines = [[line.replace("pop.", "k.") for line in each if not _ends(line)] for each in lines]
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        rank = random.choice([at for at, each in enumerate(lines) if each] or [0])
        if lines[rank]:
            random.choice(MISTAKES)(lines, rank, random.randrange(len(lines[rank])), random)
    return Script(script.mesh, tuple(map(tuple, lines)))


def _ends(line: str) -> bool:
    """Whether a statement ends a value that may just as well stay till the end of the step."""
    return line.startswith("del k.") and line[6] not in "wv"


def _drop(lines: Ranks, rank: int, at: int, random: Random) -> None:
    del lines[rank][at]


def _repeat(lines: Ranks, rank: int, at: int, random: Random) -> None:
    lines[rank].insert(random.randint(at, min(at + 5, len(lines[rank]))), lines[rank][at])


def _move(lines: Ranks, rank: int, at: int, random: Random) -> None:
    line = lines[rank].pop(at)
    lines[rank].insert(max(0, min(len(lines[rank]), at + random.choice([-9, -3, -1, 1, 3, 9]))), line)


def _other_value(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Read another value of the same kind, or write over it."""
    names = NAMES.findall(lines[rank][at])
    if not names:
        return
    _, name = random.choice(names)
    stem = name.partition("_")[0]
    others = {other for line in lines[rank] for _, other in NAMES.findall(line) if other.partition("_")[0] == stem}
    other = random.choice(sorted(others))
    lines[rank][at] = NAMES.sub(lambda found: f"{found[1]}.{other if found[2] == name else found[2]}", lines[rank][at])


def _number(lines: Ranks, rank: int, at: int, random: Random) -> None:
    found = list(NUMBER.finditer(lines[rank][at]))
    if found:
        number = random.choice(found)
        other = str(max(0, int(number[0]) + random.choice([-1, 1, 1, 2])))
        line = lines[rank][at]
        lines[rank][at] = line[: number.start()] + other + line[number.end() :]


def _keep(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """End a value later, or sooner."""
    line = lines[rank][at]
    lines[rank][at] = line.replace("pop.", "k.") if "pop." in line else line.replace("(k.", "(pop.", 1)


def _members(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Name the members of a group in another order: on all of them, or on one."""
    here = [(r, n) for r, each in enumerate(lines) for n, line in enumerate(each) if AMONG.search(line)]
    if not here:
        return
    r, n = random.choice(here)
    found = AMONG.search(lines[r][n])
    assert found is not None
    members = eval(found[1])
    order = random.sample(members, len(members))
    for other, where in _same(lines, r, n, AMONG) if random.random() < 0.8 else [(r, n)]:
        lines[other][where] = AMONG.sub(f"among={order}", lines[other][where])


def _verb(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Meet in another collective, on all ranks that meet."""
    here = [(r, n) for r, each in enumerate(lines) for n, line in enumerate(each) if COLLECTIVE.search(line)]
    if not here:
        return
    r, n = random.choice(here)
    verb = random.choice(["all_reduce", "all_gather", "reduce_scatter"])
    more = ", reduction='mean')" if verb == "all_reduce" and random.random() < 0.5 else ")"
    for other, where in _same(lines, r, n, COLLECTIVE):
        line = COLLECTIVE.sub(f"rank.{verb}(", lines[other][where])
        lines[other][where] = line.replace(", reduction='mean'", "")[:-1] + more


def _same(lines: Ranks, rank: int, at: int, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
    """Where the other ranks have the same collective: the next one as often before it as here."""

    def key(line: str) -> tuple[str, str] | None:
        verb, among = COLLECTIVE.search(line), AMONG.search(line)
        if not pattern.search(line) or verb is None:
            return None
        return verb[1], str(sorted(eval(among[1]))) if among else line[line.index(")") :]

    wanted = key(lines[rank][at])
    place = sum(key(line) == wanted for line in lines[rank][:at])
    members = eval(wanted[1]) if wanted and wanted[1].startswith("[") else range(len(lines))
    found: list[tuple[int, int]] = []
    for other in members:
        where = [n for n, line in enumerate(lines[other]) if key(line) == wanted]
        found += [(other, n) for n in where[place : place + 1]]
    return found


def _factor(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Scale by something else, everywhere or here; or scale what was not."""
    other = random.choice(["2", "Fraction(1, 2)", "-1", "Fraction(1, 3)", "10**200", "Fraction(1, 10**200)"])
    scaled = [(r, n) for r, each in enumerate(lines) for n, line in enumerate(each) if FACTOR.search(line)]
    if not scaled:
        return
    r, n = random.choice(scaled)
    old = FACTOR.search(lines[r][n])
    for where, place in scaled if random.random() < 0.5 else [(r, n)]:
        found = FACTOR.search(lines[where][place])
        if found and old and found[2] == old[2]:
            lines[where][place] = f"{lines[where][place][: found.start()]}{found[1]}{other})"


def _summand(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Leave a weight's gradient out of a sum or add it twice: one, or all that a layer has, here or on all ranks."""
    made = gradients_of(lines)
    if not made:
        return
    r, layer, name = random.choice(made)
    where = random.choice(["one", "rank", "all"])
    twice = random.random() < 0.4
    for other, l, each in made:
        if (other, each) == (r, name) or (where != "one" and l == layer and (where == "all" or other == r)):
            without(lines[other], each, twice=twice)


def gradients_of(lines: Ranks) -> list[tuple[int, int, str]]:
    """The weights' gradients that are computed: on which rank, in which layer, and their names."""
    found = [(rank, BACKWARD.match(line)) for rank, each in enumerate(lines) for line in each]
    return [(rank, int(match[2]), match[1]) for rank, match in found if match]


def without(lines: list[str], name: str, *, twice: bool = False) -> bool:
    """Leave a gradient out of the sum that a rank adds it to, or add it twice; false if there is no such sum."""
    for at, line in enumerate(lines):
        match = SUM.search(line)
        summands = [each for each in match.groups() if each] if match else []
        if match and name in summands:
            kept = [*summands, name] if twice else [each for each in summands if each != name]
            lines[at] = line.replace(match[0], " + ".join(f"k.{each}" for each in kept or summands[:1]))
            return True
    return False


def _for_another(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """A gradient stands for another one of its weight, as the embedding's does for that of the head tied to it."""
    made = [(layer, name) for where, layer, name in gradients_of(lines) if where == rank]
    random.shuffle(made)
    for layer, name in made:
        others = [other for l, other in made if other != name and _shared(l, layer, lines)]
        if not others:
            continue
        other = random.choice(others)
        lines[rank] = [
            line if BACKWARD.match(line) else re.sub(rf"(k|pop)\.{name}\b", f"k.{other}", line) for line in lines[rank]
        ]
        return


def _shared(layer: int, other: int, lines: Ranks) -> bool:
    """Whether two layers compute with one weight, as far as the text can tell: the first and the last may."""
    last = max(l for _, l, _ in gradients_of(lines))
    return layer == other or {layer, other} == {0, last}


def _alone(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Gradients are not summed over the ranks that would meet, which go on with their own."""
    here = [(r, n) for r, each in enumerate(lines) for n, line in enumerate(each) if REDUCED.search(line)]
    places = [_same(lines, r, n, COLLECTIVE) for r, n in here]
    places = [met for met in places if len(met) > 1]
    for where, n in random.choice(places) if places else []:
        lines[where][n] = REDUCED.sub(r"\1", lines[where][n])


def _own_update(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """An update is given a gradient that the rank has computed itself, as if nobody else had any."""
    updates = [(n, int(found[2])) for n, line in enumerate(lines[rank]) if (found := UPDATE.search(line))]
    made = [(layer, name) for where, layer, name in gradients_of(lines) if where == rank]
    pairs = [(n, name) for n, updated in updates for layer, name in made if _shared(layer, updated, lines)]
    if pairs:
        n, name = random.choice(pairs)
        lines[rank][n] = UPDATE.sub(rf"\g<1>k.{name}", lines[rank][n])


def _place(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Keep a value elsewhere."""
    here = [
        (r, n) for r, each in enumerate(lines) for n, line in enumerate(each) if "'host'" in line or "'disk'" in line
    ]
    if here:
        r, n = random.choice(here)
        line = lines[r][n]
        lines[r][n] = line.replace("'host'", "'disk'") if "'host'" in line else line.replace("'disk'", "'host'")


def _slice_first(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Take a slice of a value that is read here, before and perhaps also after."""
    names = NAMES.findall(lines[rank][at])
    if names:
        _, name = random.choice(names)
        of = random.randint(1, 4)
        line = f"k.v_{900 + at} = rank.slice(k.{name}, {random.randrange(of)}, {of})"
        where = random.randint(at, min(at + 6, len(lines[rank])))
        lines[rank].insert(where, line)
        if random.random() < 0.5:
            lines[rank].insert(random.randint(where + 1, len(lines[rank])), f"del k.v_{900 + at}")


def _copied_first(lines: Ranks, rank: int, at: int, random: Random) -> None:
    """Cast or copy a value on its way into a statement."""
    names = NAMES.findall(lines[rank][at].partition("=")[2])
    if names:
        _, name = random.choice(names)
        copy = random.choice(
            [
                f"k.{name} = rank.cast(rank.cast(k.{name}, 'bfloat16'))",
                f"k.{name} = rank.cast(k.{name}, 'bfloat16')",
                f"k.{name} = await rank.reload(await rank.offload(k.{name}))",
                f"k.{name} = rank.concatenate([rank.slice(k.{name}, 1, 2), rank.slice(k.{name}, 0, 2)])",
            ]
        )
        lines[rank].insert(at, copy)


MISTAKES: list[Callable[[Ranks, int, int, Random], None]] = [
    _drop,
    _repeat,
    _move,
    _move,
    _other_value,
    _other_value,
    _number,
    _number,
    _keep,
    _members,
    _verb,
    _summand,
    _summand,
    _for_another,
    _alone,
    _own_update,
    _factor,
    _place,
    _slice_first,
    _copied_first,
]
"""Each changes the lines in place, at a statement of a rank."""
