"""Logs and figures of runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.frameworks.logs import read_log, read_measured

GIB = 2**30

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

TORCHTITAN = (
    "\x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[33mmemory: 70.10GiB(88.5%)  \x1b[34mtps: 411  mfu: 2.4%\n"
    "step: 10  loss:  9.84  memory: 71.00GiB(89.6%)  tps: 6,000  tflops: 348.2  mfu: 35.2%\n"
    "step: 20  loss:  8.12  memory: 71.00GiB(89.6%)  tps: 6,100  tflops: 350.9  mfu: 35.4%\n"
)

NANOTRON = "".join(
    f"09/18/2025 [INFO|DP=0|PP=1|TP=0]: iteration: {step} / 100 | consumed_tokens: 1.05M | "
    f"time_per_iteration_ms: {ms} | tokens_per_sec: 53.3K | tokens_per_sec_per_gpu: 6.66K | lm_loss: 9.1\n"
    for step, ms in ((1, "9.87K"), (2, "2.5K"), (3, "2.41K"), (4, "2.46K"))
)


def test_a_log_of_torchtitan_gives_speed_and_reserved_memory() -> None:
    measured = read_log(TORCHTITAN, "log")
    assert measured.tokens_per_device == 6050
    assert (measured.memory, measured.kind, measured.mfu) == (71 * GIB, "reserved", 0.353)
    assert measured.step_seconds(6050 * 16, 8) == 2.0
    assert "after step 1, which is warm-up" in measured.notes[0]


def test_a_log_of_nanotron_has_numbers_with_letters() -> None:
    assert read_log(NANOTRON, "log").seconds == pytest.approx(2.46)


def test_a_log_of_megatron_may_be_truncated_and_of_several_ranks() -> None:
    measured = read_measured([str(EXAMPLES / "train_70b_log.txt")])
    assert measured.seconds == pytest.approx(15.89, abs=0.001)
    assert (measured.memory, measured.kind, measured.sequences) == (26624 * 2**20, "reserved", 128)


def test_the_slowest_rank_counts_where_all_log_each_step() -> None:
    line = "{rank}: step: {step}  loss: 1.0  memory: {gib}GiB(1%)  tps: {tps}  mfu: 30%\n"
    text = "".join(
        line.format(rank=rank, step=step, gib=40 + rank, tps=1000 - rank) for step in (1, 2, 3) for rank in (0, 1)
    )
    measured = read_log(text, "log")
    assert (measured.tokens_per_device, measured.memory) == (999, 41 * GIB)


def test_a_last_line_without_an_end_is_left_out() -> None:
    whole, cut = read_log(TORCHTITAN, "log"), read_log(TORCHTITAN + "step: 30  memory: 99.00GiB(9%)  tps: 6", "log")
    assert (cut.tokens_per_device, cut.memory) == (whole.tokens_per_device, whole.memory)
    assert "is left out" in cut.notes[0]


def test_figures_have_units() -> None:
    measured = read_measured(["step=2400ms", "reserved=71GiB"])
    assert (measured.seconds, measured.memory, measured.kind) == (2.4, 71 * GIB, "reserved")
    assert read_measured(["tokens/s=52,000"]).step_seconds(104_000, 8) == 2
    assert read_measured(["mfu=38%"]).mfu == 0.38


@pytest.mark.parametrize("word", ["step=fast", "steps=2", "memory=71", "nothing", "step=0s", "tokens/s=3s"])
def test_other_words_are_refused_in_a_sentence(word: str) -> None:
    with pytest.raises(UserError, match=r"step=2\.4s"):
        read_measured([word])


def test_a_text_without_steps_is_refused() -> None:
    with pytest.raises(UserError, match="no line of a step"):
        read_log("hello\nworld\n", "log")


@given(st.text(st.sampled_from("step: 1iteration/|GiBmemory ps,.0K\n"), max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(UserError):
        read_log(text, "log")
