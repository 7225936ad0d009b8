"""Programs by family and seed, with the model that each trains: every process makes the same one of the same seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

from shardlab.check import Checked, check
from shardlab.language import Mesh, Program, Refused, Strategy, trace
from shardlab.models import GPT, Blocks, Mixtral, MoE
from shardlab.simulate.passes import PASSES
from shardlab.simulate.passes.reorder import CannotApply
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.job import Job
from tests.attack.models import MODELS, ROWS
from tests.attack.script import Script
from tests.attack.wild import wild_script
from tests.attack.writing import right_script
from tests.support.mutations import MUTATIONS
from tests.support.random_plans import random_plan
from tests.support.random_programs import program_of, random_shape

FAMILIES = ("script", "plan", "written")
"""Scripts of this folder; plans of any kind; and the programs of `tests.support.random_programs`."""

PASSED = {"prefetch": 2, "receive-early": 2, "bucket": 2, "defer": 2, "update-early": 1, "fuse-steps": 1, "arena": 1}
"""Passes that rewrite some of the programs, each with a setting."""


@dataclass(frozen=True)
class Subject:
    """A program to be tried.

    Attributes:
        family: one of `FAMILIES`.
        seed: decides the program.
        wild: whether it has mistakes.
        passes: what rewrites it, in order.
    """

    family: str
    seed: int
    wild: bool = False
    passes: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.family, str(self.seed), *["wild"] * self.wild, *self.passes]
        return " ".join(words)

    @property
    def job(self) -> SubjectJob:
        return SubjectJob.of(self)

    def checked(self) -> Checked:
        """The program, checked, and as its passes leave it.

        Raises:
            Refused, UserError: when the program is wrong.
        """
        return self._passed(check(self.program()))

    def program(self) -> Program:
        job = self.job
        program = trace(job.entry.program, job.mesh, job.sizes, job.microbatches)
        return self._mutated(program) if self.wild and self.family != "script" else program

    def _mutated(self, program: Program) -> Program:
        """A tape with a mistake of some kind: the first that the program can have."""
        random = Random(self.seed)
        for kind in random.sample(sorted(MUTATIONS), len(MUTATIONS)):
            if kind == "another world":
                continue
            skipped = random.randrange(8)
            found = program
            for count, mutant in enumerate(MUTATIONS[kind](program)):
                found = mutant
                if count >= skipped:
                    break
            if found.tapes != program.tapes:
                return found
        return program

    def _passed(self, checked: Checked) -> Checked:
        for name in self.passes:
            try:
                tapes = PASSES[name].rewrite(checked, PASSED[name])
                rewritten = check(replace(checked.program, tapes=tapes))
            except (CannotApply, Refused):
                continue
            if set(checked.backends()) <= set(rewritten.backends()):
                checked = rewritten
        return checked


@dataclass(frozen=True)
class SubjectJob(Job):
    """The training job of a subject; see `Subject`."""

    subject: Subject = field(default_factory=lambda: Subject("script", 0))
    mesh: Mesh = field(default_factory=Mesh)
    script: Script | None = None
    program: Strategy | None = None

    @classmethod
    def of(cls, subject: Subject) -> SubjectJob:
        seed = subject.seed
        more: dict[str, Any] = {"subject": subject, "precision": "fp64", "micro_batch_size": ROWS}
        if subject.family == "script":
            script, model, microbatches = right_script(seed)
            if subject.wild:
                script = wild_script(script, Random(seed + 1))
            ranks = script.mesh.world
            return cls("script", ranks, microbatches, MODELS[model], mesh=script.mesh, script=script, **more)
        if subject.family == "written":
            shape = random_shape(seed)
            model = replace(MODELS["gpt"], layers=shape.layers)
            world = shape.mesh.world
            return cls("", world, shape.microbatches, model, mesh=shape.mesh, program=program_of(shape), **more)
        planned = random_plan(seed, ranks=4)
        plan = planned.plan
        slices = plan.mesh.tp * plan.mesh.cp * (plan.stripes or 2)  # of a sequence
        model = replace(_model_of(planned.model, planned.layers, tied=seed % 2 == 1), seq_len=-(-16 // slices) * slices)
        optimizer = "muon" if planned.muon else "adamw"
        world = plan.mesh.world
        return cls(plan, world, planned.microbatches, model, mesh=plan.mesh, optimizer=optimizer, **more)

    @property
    def entry(self) -> StrategyEntry:
        return self._entry

    @cached_property
    def _entry(self) -> StrategyEntry:
        if not isinstance(self.strategy, str):
            return entry_from_plan(self.strategy, "plan")
        program = self.script.strategy if self.script is not None else self.program
        assert program is not None
        return StrategyEntry("program", program, "", "", lambda _: self.mesh, self.mesh.world)

    def checked(self) -> Checked:
        return self.subject.checked()


def _model_of(name: str, layers: int, *, tied: bool) -> Blocks:
    """The model that stands for one of `tests.support.random_plans.MODELS`; its head is `tied`, if it may be."""
    blocks = layers if name == "whole" else layers - 1
    common: dict[str, Any] = {"layers": max(1, blocks), "hidden_size": 16, "heads": 4, "vocab_size": 24}
    if name in ("mixture", "routed"):
        return MoE(**common, experts=4, auxiliary=0.1, tied=tied)
    if name == "routed apart":
        return Mixtral(**common, kv_heads=4, experts=4, shared_experts=1, auxiliary=0.1, tied=tied)
    return GPT(**common, tied=name == "tied" or (tied and name == "context"))
