"""Explanation of a choice by three questions: does it fit, which batch, how fast. The answers have numbers."""

from __future__ import annotations

from shardlab.common.text import bytes_text, counted, memory_text, seconds_text
from shardlab.planner.alternatives import Topic, alternative_text
from shardlab.planner.choose import PlanChoice
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.problem import Candidate
from shardlab.simulate.predict.memory import model_state, zero_plan
from shardlab.strategies.plan.plan import Plan


def explain_choice(choice: PlanChoice) -> dict[str, list[str]]:
    """Return the lines that answer each question behind a choice, in the order in which an expert asks them."""
    return {
        "1. Does it fit?": [*_state(choice), *_alternative_lines(choice, "fit")],
        "2. What batch?": [*_batch(choice), *_alternative_lines(choice, "batch")],
        "3. How fast?": [*_speed(choice), *_alternative_lines(choice, "speed")],
    }


def _state(choice: PlanChoice) -> list[str]:
    """Return lines about memory: the model state without and with ZeRO, the activations, and the chosen plan."""
    problem, precision = choice.problem, choice.best.candidate.precision
    capacity, devices, count = problem.cluster.device.memory, problem.cluster.size, problem.model.parameter_count
    zero = [
        model_state(zero_plan(devices, stage), count, precision, problem.recipe, problem.optimizer)
        for stage in range(4)
    ]
    weights, gradients, optimizer = zero[0]
    total = weights + gradients + optimizer
    comparison = "more than" if total > capacity else "of"
    count_text = f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count:,}"
    lines = [
        f"{count_text} parameters in {precision.name}: weights {bytes_text(weights, 1)}, gradients "
        f"{bytes_text(gradients, 1)}, {problem.optimizer}'s state {bytes_text(optimizer, 1)}; together "
        f"{bytes_text(total, 1)}, {comparison} the {memory_text(capacity)} of a device"
    ]
    if devices > 1:
        zero_text = ", ".join(f"ZeRO-{stage} {bytes_text(sum(zero[stage]), 1)}" for stage in (1, 2, 3))
        lines.append(f"shared over {devices:,} devices: {zero_text} on each")
    costs, single = PassCosts(problem), Candidate(Plan(), 1, precision)
    none, full = costs.of(single, "none"), costs.of(single, "full")
    lines.append(
        f"a sequence of {problem.model.seq_len:,} tokens keeps {bytes_text(none.saved_bytes, 1)} of activations, and "
        f"{bytes_text(none.logits, 1)} at the loss; {bytes_text(full.saved_bytes + full.block, 1)} if every block "
        "is computed again"
    )
    memory, misses = choice.best.forecast.memory, choice.results.misses()
    lines.append(f"the chosen plan holds {bytes_text(memory.total, 1)} on the fullest device")
    for name, (bytes, _) in misses.items():
        lines.append(f"no plan of {name} was found that fits; the smallest one needs {bytes_text(bytes, 1)}")
    return lines


def _batch(choice: PlanChoice) -> list[str]:
    problem, candidate = choice.problem, choice.best.candidate
    ranks, size = candidate.plan.data_ranks, candidate.micro_batch_size
    rank_sequences = problem.sequences // ranks
    lines = [
        f"{counted(problem.sequences, 'sequence')} a step are {problem.tokens:,} tokens; at most "
        f"{counted(problem.sequences, 'data-parallel rank')} can share them; more devices must also split the model or "
        "the sequences",
        f"{counted(ranks, 'data-parallel rank')} get{'s' * (ranks == 1)} {counted(rank_sequences, 'sequence')}"
        f"{' each' * (ranks > 1)}, in {counted(rank_sequences // size, 'microbatch')} of {size}",
    ]
    if "batch" in choice.helps:
        lines.append(f"twice the batch would give this very plan {choice.helps['batch']:+.1%} tokens/s")
    return lines


def _speed(choice: PlanChoice) -> list[str]:
    problem, best, shares = choice.problem, choice.best, choice.answer.shares
    workload = problem.workload(best.candidate)
    ideal = workload.mfu(1.0)  # the MFU of a step of 1 s is the seconds of the step at peak FLOP/s
    lines = [
        f"at the peak of {problem.cluster.size:,} {problem.cluster.device.name} the model's matrix products would take "
        f"{seconds_text(ideal)}; the step takes {seconds_text(best.seconds)}, an MFU of {ideal / best.seconds:.1%}",
        f"its time goes to {shares}" if shares else f"what its time goes to is not known: {choice.unknown}",
    ]
    for outcome, answer in choice.families:
        if outcome.candidate != best.candidate:
            slower = outcome.seconds / best.seconds - 1
            limit = "; {} {:.1%} of its step".format(*answer.shares.limit) if answer.shares else ""
            lines.append(f"best of {outcome.family}: step {slower:+.1%}{limit}")
    return lines


def _alternative_lines(choice: PlanChoice, topic: Topic) -> list[str]:
    """Return one line for each alternative about a topic."""
    alternatives = [alternative for alternative in choice.alternatives if alternative.topic == topic]
    return [
        f"{alternative.choice}: {alternative_text(alternative, choice.answer, choice.problem)}"
        for alternative in alternatives
    ]
