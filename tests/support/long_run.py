"""Check many more mutants and random programs than the tests have time for: `python -m tests.support.long_run --help`.

For each kind of mistake, it prints how many mutants were judged right, wrong, hanging or broken, and how many of each
passed the check; only right ones may pass. Then it prints how many valid programs passed, both unchanged and rewritten
by passes; all must pass.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random

from shardlab.check import check
from shardlab.language import Program
from shardlab.language.pass_names import OffloadTargets
from shardlab.simulate.passes import PASSES
from shardlab.simulate.passes.reorder import CannotApply
from tests.support.interpreter import Outcome, judge
from tests.support.mutations import MUTATIONS
from tests.support.random_layers import random_attention, random_experts
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.refusing import refusal

WRITERS: list[Callable[[int], Program]] = [
    lambda seed: random_program(random_shape(seed)),
    lambda seed: random_plan(seed).program,
    random_attention,
    random_experts,
]
"""Generators of valid programs from a seed."""

OFFLOADS = [OffloadTargets(optimizer="host"), OffloadTargets(activations="host", parameters="disk")]
"""Settings of the pass `offload`."""

LONGEST = 600
"""Maximum number of ops of a program that is mutated."""


def subjects(random: Random) -> Iterator[Program]:
    """Yield small programs without end: plans for every model, and random programs."""
    while True:
        seed = random.randrange(10**6)
        yield random_plan(seed, ranks=random.choice([2, 3, 4])).program
        if random.random() < 0.2:
            yield random_program(random_shape(seed))
        if random.random() < 0.2:
            yield random_attention(seed)
            yield random_experts(seed)


def mutants(mutant_count: int, random: Random) -> None:
    """Judge and check this many mutants."""
    outcomes: dict[str, Counter[tuple[Outcome, bool]]] = {kind: Counter() for kind in MUTATIONS}
    total = survivors = 0
    for program in subjects(random):
        if sum(map(len, program.tapes)) > LONGEST:
            continue
        for kind, mutation in MUTATIONS.items():
            candidates = [mutant for mutant in mutation(program) if mutant.tapes != program.tapes]
            often = sum(outcomes[kind].values()) * len(MUTATIONS) > total
            for mutant in (
                random.sample(candidates, min(2 if often else 12, len(candidates))) if kind != "another world" else ()
            ):
                sentence, verdict = refusal(mutant), judge(mutant)
                outcomes[kind][verdict.outcome, sentence is None] += 1
                total += 1
                if sentence is None and not verdict.right:
                    survivors += 1
                    print(
                        f"SURVIVOR {kind}: {verdict.outcome.value}, {verdict.reason}; {program.mesh}, {program.sizes}"
                    )
        if total >= mutant_count:
            break
    print(f"{'':44s}" + "".join(f"{outcome.value:>8s}" for outcome in Outcome) + "  passed, judged right")
    for kind, counts in [*outcomes.items(), ("all", sum(outcomes.values(), Counter[tuple[Outcome, bool]]()))]:
        of = [counts[outcome, True] + counts[outcome, False] for outcome in Outcome]
        print(f"{kind:44s}" + "".join(f"{count:8d}" for count in of) + f"{counts[Outcome.RIGHT, True]:8d}")
    print(f"{total} mutants, {survivors} that are not right passed")


def programs(program_count: int, random: Random) -> None:
    """Check and judge this many valid programs."""
    alarms = 0
    for number in range(program_count):
        seed = random.randrange(10**9)
        program = WRITERS[number % len(WRITERS)](seed)
        sentence, verdict = refusal(program), judge(program)
        if sentence or not verdict.right:
            alarms += 1
            print(f"FALSE ALARM of writer {number % len(WRITERS)}, seed {seed}: {sentence}; {verdict}")
        elif (wrong := wrongly_passed(program, random)) is not None:
            alarms += 1
            print(f"FALSE PASS over writer {number % len(WRITERS)}, seed {seed}: {wrong}")
    print(f"{program_count} valid programs, {alarms} false alarms")


def wrongly_passed(program: Program, random: Random) -> str | None:
    """Run four passes over a program in their order, with random settings; return the one that makes it wrong."""
    for name in sorted(random.sample(list(PASSES), k=4), key=list(PASSES).index):
        setting = random.choice(OFFLOADS if name == "offload" else [1, 2, 3, 8, 99])
        with suppress(CannotApply):
            program = replace(program, tapes=PASSES[name].rewrite(check(program), setting))
        sentence, verdict = refusal(program), judge(program)
        if sentence or not verdict.right:
            return f"{name}={setting}: {sentence}; {verdict}"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=50_000)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mutants(arguments.mutants, Random(arguments.seed))
    programs(arguments.programs, Random(arguments.seed))
