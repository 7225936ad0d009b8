"""A sample of the attack: random programs are refused in a sentence, or compute what one device computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.language import Refused, trace
from shardlab.train.job import Job
from tests.attack import campaign
from tests.attack.campaign import Attack, World, subject_of, subjects_of, text_of
from tests.attack.models import MODELS, TIED
from tests.attack.script import Script
from tests.attack.subjects import Subject
from tests.attack.trial import Outcome, ask, job_of, results_in, run_jobs
from tests.attack.wild import gradients_of, without
from tests.attack.writing import right_script
from tests.support.ranks import Ranks

SAMPLE = Attack(count=48, seed=36)
"""Of programs that are only asked about, and of those that are run."""


@pytest.fixture(scope="module")
def accepted() -> list[Outcome]:
    """The accepted programs of the sample; none of them all failed."""
    outcomes = [ask(subject, interpreted=at % 4 == 0, drawn=False) for at, subject in enumerate(subjects_of(SAMPLE))]
    failed = [f"{each.subject}: {each.what}\n{each.detail}" for each in outcomes if each.failed]
    assert not failed, "\n".join(failed)
    assert any(each.what == "refused" for each in outcomes)
    return [each for each in outcomes if each.what == "accepted"]


@pytest.mark.starts_ranks
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_accepted_computes_one_device_s_numbers(
    ranks: Callable[[int], Ranks], tmp_path: Path, accepted: list[Outcome], count: int
) -> None:
    jobs = [job_of(each) for each in accepted if each.subject.job.ranks == count][:8]
    assert any(job.model.has_tied_head for job in jobs)
    ranks(count).call(run_jobs, jobs, str(tmp_path))
    found, ended = results_in(tmp_path, count)
    assert ended == len(jobs)
    assert not any(found.values()), found


def test_programs_have_all_that_the_check_was_once_mistaken_about() -> None:
    scripts = [right_script(seed)[0] for seed in range(60)]
    text = "\n".join(script.text for script in scripts)
    for what in (
        "among=[1, 0]", "place='host'", "place='disk'", "rank.zero_gradient", "rank.loss_stats", "reduction='mean'",
        "Fraction(1, 2)", "rank.tokens", "save=False", "rank.cast", "all_to_all", "reduce_scatter", "backward_weight",
        "pop.", "del k.", "rank.norm",
    ):  # fmt: skip
        assert what in text, what
    assert any(not lines for script in scripts for lines in script.lines), "no rank is idle"
    models = {right_script(seed)[1] for seed in range(60)}
    assert {"gpt", "llama", "mlp", "moe", "mixtral", *TIED} <= models


def test_a_tied_weight_s_gradient_that_lacks_a_use_or_has_it_twice_is_refused() -> None:
    rules: dict[bool, set[str]] = {False: set(), True: set()}
    for seed in range(40):
        job, twice = Subject("script", seed).job, bool(seed % 2)
        if not job.model.has_tied_head or job.script is None:
            continue
        lines = [[line.replace("pop.", "k.") for line in each if "del k.g" not in line] for each in job.script.lines]
        uses = [(rank, name) for rank, layer, name in gradients_of(lines) if job.sizes.weight_of(layer) == 0]
        if any(without(lines[rank], name, twice=twice) for rank, name in uses):
            strategy = Script(job.mesh, tuple(map(tuple, lines))).strategy
            with pytest.raises(Refused) as refused:
                trace(strategy, job.mesh, job.sizes, job.microbatches)
            rules[twice].add(refused.value.rule)
    assert "missing microbatches" in rules[False]
    assert "counted twice" in rules[True]


def test_a_seed_means_one_program() -> None:
    for subject in subjects_of(replace(SAMPLE, count=12)):
        assert text_of(subject) == text_of(subject_of(str(subject).split()))
        assert subject_of(str(subject).split()) == subject


def raises_inside(*_: Any) -> None:
    raise IndexError("a mistake of ours")


def test_an_exception_within_shardlab_is_a_failure_though_tracing_blames_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardlab.language.rules.layer_rules import LayerRules  # its rules are called by the verbs

    subject = Subject("script", 1)
    monkeypatch.setattr(LayerRules, "forward", raises_inside)
    outcome = ask(subject, interpreted=False, drawn=False)
    assert outcome.what == "tracing raised"
    assert "raises_inside" in outcome.detail


def test_a_statement_that_cannot_be_done_is_the_program_s_own_mistake() -> None:
    script, _, microbatches = right_script(1)
    lines = (("k.a, k.b = rank.load_weight(0)",), *script.lines[1:])
    subject = Subject("script", 1, wild=True)
    job = replace(subject.job, script=Script(script.mesh, lines), microbatches=microbatches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "job", job)
        assert ask(subject, interpreted=False, drawn=False).rule == "no operator"


class FakeRanks:
    """Ranks that write results as `run_jobs` does, and of which one dies of some programs."""

    started = 0

    def __init__(self, count: int) -> None:
        self.count, self.usable = count, True
        FakeRanks.started += 1

    def call(self, _: object, jobs: list[Job], folder: str) -> None:
        for rank in range(self.count):
            with Path(folder, f"results-{rank}").open("ab") as file:
                for number, job in enumerate(jobs):
                    if job.seed == 13 and rank == 1:
                        break
                    pickle.dump((number, job.seed != 7, "far off"), file)
        if any(job.seed == 13 for job in jobs):
            raise AssertionError("rank 1:\nthe process ended")

    def close(self) -> None:
        self.usable = False


def test_a_rank_that_dies_fails_one_program_and_the_others_are_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seeded(each: Outcome) -> Job:
        return Job("", 2, 1, MODELS["gpt"], 1, seed=each.subject.seed)

    monkeypatch.setattr(campaign, "job_of", seeded)
    programs = [Outcome(Subject("script", seed), "accepted") for seed in (5, 7, 13, 8, 13, 9)]
    found = list(World(FakeRanks).run(programs, 2))
    assert [each.subject.seed for each in found] == [5, 7, 13, 8, 13, 9]
    assert [each.what for each in found] == [
        "accepted", "the numbers are wrong", "running it fails", "accepted", "running it fails", "accepted"
    ]  # fmt: skip
    assert FakeRanks.started == 3
