"""What all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a worker; torch reads it when it is imported

import gc
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, util
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from shardlab.common.user_code import Stoppable
from shardlab.train.launch import interrupt
from tests.support.processes import PATIENCE, left_processes, mark_processes, stop_ignoring_signals
from tests.support.thorough import examples
from tests.support.warm import WarmStarts

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

ENDING_SECONDS = 30.0
"""Time that processes have to end by themselves after the last test: ranks that notice that their starter has gone."""

_mark = mark_processes()
stop_ignoring_signals()

if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("MPLCONFIGDIR", f"{_cache}/matplotlib")  # fonts and pyright's Node stay where they are
    os.environ.setdefault("PYRIGHT_PYTHON_CACHE_DIR", _cache)
    _own_cache = tempfile.TemporaryDirectory(prefix="shardlab-tests-")
    os.environ["XDG_CACHE_HOME"] = _own_cache.name  # no test reads or writes what was measured on this machine

TESTS = Path(__file__).parent
WARM = pytest.StashKey[WarmStarts]()

SLOW = (
    "attack/",
    "chaos/",
    "check/test_deadlock",
    "check/test_group_programs",
    "check/test_mutations",
    "check/test_properties",
    "check/test_replicas",
    "check/test_right_programs",
    "check/test_runnable",
    "cli/bench/test_strategies",
    "cli/explain/",
    "cli/learn/test_train",
    "cli/plan/test_command",
    "cli/plan/test_measure",
    "cli/plan/test_write",
    "cli/simulate/",
    "cli/test_console",
    "cli/test_input",
    "cli/test_launch_submit",
    "cli/test_listings",
    "cli/test_options",
    "cli/test_passes",
    "cli/test_plan_options",
    "cli/test_step_request",
    "cli/test_validate",
    "cli/train/test_auto_plan",
    "cli/train/test_choose_passes",
    "cli/train/test_config",
    "cli/train/test_from_python",
    "cli/view/test_editing",
    "common/test_text",
    "common/test_user_code",
    "draw/",
    "execute/optimizers/test_algorithms",
    "execute/test_tape_analysis",
    "execute/transport/test_neighbours",
    "frameworks/writers/",
    "language/rules/test_kinds",
    "language/test_world",
    "learn/course/",
    "learn/puzzles/",
    "measure/side_by_side/",
    "measure/test_collectives",
    "measure/test_fits",
    "measure/test_layers",
    "measure/test_profile",
    "measure/test_progress",
    "models/tensors/",
    "models/test_architectures",
    "models/test_layout",
    "planner/",
    "simulate/hardware/test_device",
    "simulate/passes/test_bucket",
    "simulate/passes/test_run",
    "simulate/predict/",
    "strategies/plan/test_context_parallel",
    "strategies/schedules/test_pytorch_csv",
    "strategies/test_builtin",
    "strategies/test_formulas",
    "test_adding",
    "test_api",
    "test_hands_on",
    "test_readme",
    "test_trainers",
    "train/checkpoint/",
    "train/huggingface/test_convert",
    "train/launch/test_commands",
    "train/launch/test_environment",
    "train/launch/test_ranks_wakeups",
    "train/test_batches",
    "train/test_optimizers",
    "train/test_passes",
    "train/test_report",
)
"""Beginnings of the paths of tests that take long in all, although few of them start ranks."""

LONGEST = (
    "test_readme.py",
    "test_types.py",
    "train/test_ends.py",
    "test_hands_on.py",
    "train/launch/test_ranks.py",
    "train/test_hangs.py",
    "test_benchmarks.py",
    "planner/schedule_search/test_from_workload.py",
    "train/checkpoint/test_resharding.py",
    "train/huggingface/test_adam.py",
    "train/test_passes.py",
    "train/test_optimizers.py",
    "train/test_tracing.py",
    "train/verification/test_verify.py",
    "cli/test_launch.py",
)
"""Files whose tests take longest, the longest first."""

# The machine is noisy, so there is no deadline; results repeat. `make verify-all` draws five times as many examples.
settings.register_profile("shardlab", deadline=None, derandomize=True, max_examples=examples(100))
settings.load_profile("shardlab")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker by which `make check` leaves tests out, and collect garbage seldom."""
    gc.set_threshold(20_000, 20, 20)
    config.addinivalue_line("markers", "slow: starts ranks, or its path begins as one of SLOW")


def place_of(path: Path) -> str:
    """Return a path in this folder, and an empty text for one elsewhere."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three workers for two cores: tests of launches and of hangs mostly wait. `make check` has none of them."""
    cores = len(os.sched_getaffinity(0))
    return cores if "not slow" in config.option.markexpr else max(1, cores * 3 // 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that `make check` leaves out."""
    if "not slow" not in config.option.markexpr or not collection_path.is_relative_to(TESTS):
        return None
    return True if f"{place_of(collection_path)}/".startswith(SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and begin with the files that take longest, so that no worker waits for another in the end."""
    for item in items:
        shares_processes = {"ranks", "warm"} & set(getattr(item, "fixturenames", ()))
        place = place_of(item.path)
        if shares_processes or item.get_closest_marker("starts_ranks") or place.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONGEST.index(place) if (place := place_of(item.path)) in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Leave what modules and tests are made of, a million objects, out of all later collections of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the server of programs, kill what tests have left running, and fail the session if that is anything."""
    if WARM in session.stash:
        session.stash[WARM].close()
    if hasattr(session.config, "workerinput"):  # a worker, whose processes the controller sees too
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for process in left_processes(_mark, ENDING_SECONDS):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        if reporter is not None:
            reporter.write_line(f"\n{process}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@contextmanager
def silent() -> Generator[None]:
    """Let processes that start meanwhile write nowhere: what ranks print would be among pytest's own lines."""
    copies = {number: os.dup(number) for number in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in copies:
            os.dup2(null, number)
        yield
    finally:
        for number, copy in copies.items():
            os.dup2(copy, number)
        for number in (null, *copies.values()):
            os.close(number)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the servers of programs and of ranks, while this process is as new as its imports allow."""
    options = session.config.option
    if options.collectonly or (getattr(options, "numprocesses", 0) and "PYTEST_XDIST_WORKER" not in os.environ):
        return
    import_module("tests.support.parsed_lines")
    from tests.support.ranks import PRELOAD  # imports torch, without which the process that hands out tests does
    from tests.support.warm_server import fork_forkserver

    forkserver.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch, silent():
        session.stash[WARM] = WarmStarts()
        patch.setattr(util, "spawnv_passfds", fork_forkserver)
        forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def _one_server_forks_all_ranks() -> Iterator[None]:
    """Import what any ranks need in the server that forks them, whichever command or test starts that server again.

    A server that `shardlab verify` has started would leave the imports of training to each rank.
    """

    def ignore(context: BaseContext, names: list[str]) -> None:
        """Leave the imports as they are."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseContext, "set_forkserver_preload", ignore)
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_busy_machine_adds_no_lines() -> Iterator[None]:
    """Leave out the lines that say what is under way for long, which a test's output has on a busy machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "SILENCE", PATIENCE)
        yield


@pytest.fixture(autouse=True)
def _training_ends_soon() -> None:
    """Leave pictures and long samples out of training in this process, once a test has imported it."""
    if "shardlab.train.report" in sys.modules:
        import_module("tests.support.short_runs")


@pytest.fixture(autouse=True)
def _random_numbers_repeat() -> None:
    """Seed torch's generator, so that a test draws the same numbers whichever tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_program_goes_on() -> Iterator[None]:
    """What a test's program leaves running would take a core from all tests after it."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, Stoppable):
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a program of this test goes on; let a process of its own run it"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Worlds of processes by size, each started at its first use and shared by the tests of a file.

    Waiting ranks take half a percent of a core each, for gloo's polling, and starting a world takes 0.2 s of one.
    """
    from tests.support import ranks

    worlds: dict[int, Ranks] = {}

    def world(size: int) -> Ranks:
        if size not in worlds or not worlds[size].usable:
            worlds[size] = ranks.Ranks(size)
        return worlds[size]

    yield world
    for processes in worlds.values():
        if processes.usable:
            processes.close()


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest) -> WarmStarts:
    """Starts of Python programs that have their imports already."""
    return request.session.stash[WARM]
