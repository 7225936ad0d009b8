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
    _factor,
    _place,
    _slice_first,
    _copied_first,
]
"""Each changes the lines in place, at a statement of a rank."""
