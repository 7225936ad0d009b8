"""Places in a student's program."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from shardlab.common import user_code
from shardlab.common.errors import UserError
from shardlab.common.user_code import (
    SourceLine,
    Stalled,
    Stoppable,
    load_module,
    run_stoppable,
    trace_limits,
    user_line_of,
)
from shardlab.language import Rank, trace
from shardlab.learn.puzzles import Model, PuzzleRefused
from shardlab.strategies.ddp import ddp
from shardlab.strategies.load import load
from tests.support.processes import until
from tests.support.refusing import refuses


def test_a_file_is_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "mine.py")
    assert str(SourceLine(file, 3)) == f"{file}:3"
    monkeypatch.chdir(tmp_path)
    assert str(SourceLine(file, 3)) == "mine.py:3"
    assert str(SourceLine("<stdin>", 3)) == "<stdin>:3"


def test_a_notebooks_cell_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"/tmp/ipykernel_1/2.py": ("Cell", "In[7]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(SourceLine("/tmp/ipykernel_1/2.py", 4)) == "In[7]:4"
    assert str(SourceLine("<stdin>", 4)) == "<stdin>:4"


def test_a_refusal_names_the_innermost_line_of_the_students_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def twice(gradient):\n    return gradient + gradient\n\ntwice(model.fake_grad(0, [0]))\n"
    with refuses("counted twice", rank=0, op=0, layer=0, doubled=(0,), error=PuzzleRefused):
        exec(compile(text, str(tmp_path / "mine.py"), "exec"), {"model": Model(rank=0)})


def test_between_two_lines_a_place_is_that_of_the_function() -> None:
    code = SimpleNamespace(co_filename="mine.py", co_firstlineno=7)
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_globals={}, f_back=None)
    assert str(user_line_of(frame)) == "mine.py:7"


def test_a_line_is_the_students_own_although_the_standard_library_runs() -> None:
    lines: list[SourceLine | None] = []

    def note(_: re.Match[str]) -> str:
        caller = sys._getframe().f_back
        assert caller is not None
        assert caller.f_code.co_filename == re.__file__
        lines.append(user_line_of(caller))
        return ""

    re.sub("x", note, "x")
    assert lines[0] is not None
    assert lines[0].file == __file__
    assert "re.sub(" in Path(__file__).read_text(encoding="utf-8").splitlines()[lines[0].number - 1]


def test_a_named_tuple_being_made_is_not_the_students_line() -> None:
    lines: list[SourceLine | None] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == "<string>":
            lines.append(user_line_of(frame))

    sys.setprofile(profile)
    try:
        SourceLine("mine.py", 3)
    finally:
        sys.setprofile(None)
    assert [line and line.file for line in lines] == [__file__]


# What a user's program may take its time for, and what it may not.


def spend(seconds: float) -> None:
    """CPU time of this thread."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    error = TimeoutError("mine")

    def work() -> None:
        raise error

    with pytest.raises(TimeoutError, match="mine") as caught:
        run_stoppable(work, 5, lambda _: None)
    assert caught.value is error


def test_the_time_counts_for_each_op_and_not_for_all() -> None:
    def loading_after(seconds: float) -> Callable[[Rank], Coroutine[Any, Any, None]]:
        async def slow(rank: Rank) -> None:
            for l in rank.layers:
                spend(seconds)
                rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

        return slow

    with trace_limits(seconds=0.3):
        trace(loading_after(0.05), 2, 4, 2)
    with trace_limits(seconds=0.05), refuses("stalled", error=Stalled):
        trace(loading_after(60.0), 2, 4, 2)  # however late a busy machine looks at the clock
    with trace_limits(seconds=math.inf):
        trace(loading_after(0.05), 1, 1, 1)


def test_a_program_that_takes_the_memory_that_is_left_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def grows(rank: Rank) -> None:
        while True:
            time.sleep(0.01)

    peaks = iter([0])
    monkeypatch.setattr(user_code, "available_memory", lambda: 2**30)
    monkeypatch.setattr(user_code, "resident_memory", lambda: 0)
    monkeypatch.setattr(user_code, "peak_memory", lambda: next(peaks, 2**30 - 2**20))
    with refuses("stalled", error=Stalled) as refused:
        trace(grows, 2, 2, 2)
    assert "the program has taken 1,023.00 MiB of the 1.00 GiB of memory left" in str(refused.value)
    assert refused.value.line.startswith(f"{Path(__file__).relative_to(Path.cwd())}:")


def test_a_program_that_sleeps_takes_no_cpu_time() -> None:
    async def sleeps(rank: Rank) -> None:
        time.sleep(0.6)
        await ddp(rank)

    with trace_limits(seconds=0.3):
        trace(sleeps, 2, 2, 2)


@pytest.mark.parametrize("wait", ["time.sleep(2)", "[time.sleep(0.05) for _ in range(1200)]"])
def test_a_program_that_only_waits_is_stopped_with_its_line(wait: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        f"import time\n\n\nasync def waits(rank):\n    rank.load_batch(rank.share())\n    {wait}\n"
    )
    with trace_limits(seconds=0.1), refuses("stalled", error=Stalled) as refused:
        trace(load(f"{tmp_path}/waits.py:waits").program, 1, 1, 1)
    assert "op 1 has not come, since the program has waited for 0.5 s" in str(refused.value)
    assert refused.value.line.endswith("waits.py:6")


def test_a_debugger_may_wait() -> None:
    async def debugged(rank: Rank) -> None:
        exec("import time; time.sleep(0.6)", {"__name__": "pdb"})
        await ddp(rank)

    with trace_limits(seconds=0.1):
        trace(debugged, 1, 1, 1)


def test_a_program_that_has_ended_has_no_clock_and_that_is_no_error() -> None:
    program = Stoppable(lambda: spend(0.01))
    program.start()
    program.join()
    if hasattr(time, "pthread_getcpuclockid"):
        until(lambda: program.cpu_seconds() == 0)  # its thread ends soon after the join


def test_an_import_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_long.py").write_text("from tests.common.test_user_code import spend\nspend(0.4)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    async def imports(rank: Rank) -> None:
        import takes_long  # pyright: ignore[reportMissingImports]

        del takes_long
        await ddp(rank)

    with trace_limits(seconds=0.2):
        trace(imports, 2, 2, 2)
    assert "takes_long" in sys.modules


def test_a_stopped_program_does_not_continue() -> None:
    turns = [0]

    async def endless(rank: Rank) -> None:
        while True:
            turns[0] += 1

    with trace_limits(seconds=0.2), pytest.raises(Stalled):
        trace(endless, 2, 2, 2)
    turns_at_stop = turns[0]
    time.sleep(0.1)
    assert turns[0] == turns_at_stop > 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("async def f(rank: Rank): ...\n", r"f\.py:1 cannot be run: NameError: name 'Rank' is not defined"),
        ("def f(rank):\n    await rank\n", r"f\.py:2 .*'await' outside async function; write `async def`$"),
    ],
)
def test_a_file_runs_as_python_runs_it(text: str, sentence: str, tmp_path: Path) -> None:
    """Annotations are evaluated, although the module that compiles the file postpones its own."""
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_module(tmp_path / "f.py")
