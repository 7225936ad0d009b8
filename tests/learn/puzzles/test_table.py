"""The eight puzzles give the published figures, and other sizes what unit costs say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.learn.puzzles import Model, Puzzle, find
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import figures, run

TABLE = {  # ranks, layers, batches; steps, end, peak memory
    "standard": ((1, 2, 4), (16.5, 17.0, 2621440)),
    "grad_accum": ((1, 2, 4), (16.5, 17.0, 1966080)),
    "ddp": ((4, 2, 4), (5.1, 5.6, 1835008)),
    "wsdp": ((4, 6, 4), (19.9, 20.4, 2752512)),
    "fsdp": ((4, 6, 4), (19.9, 20.4, 2359296)),
    "pipeline": ((4, 8, 4), (66.9, 67.4, 3145728)),
    "gpipe": ((4, 8, 4), (33.3, 33.8, 4194304)),
    "pipeline_fsdp": ((16, 4, 4), (15.5, 16.0, 966656)),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_puzzle_gives_the_published_figures_to_the_digit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, expected = TABLE[name]
    models = run(getattr(solutions, name), *sizes)
    assert figures(models) == expected
    Model.check(models)
    assert capsys.readouterr().out == "Correct!\n"


@pytest.mark.parametrize("name", TABLE)
def test_the_statements_know_these_figures(name: str) -> None:
    puzzle: Puzzle = find(name)
    assert (puzzle.ranks, puzzle.layers, puzzle.batches) == TABLE[name][0]
    assert (puzzle.known_steps, puzzle.known_memory) == (TABLE[name][1][0], TABLE[name][1][2])


@given(layers=st.integers(1, 6), batches=st.integers(1, 8))
def test_on_one_rank_time_is_two_passes_over_every_microbatch_and_the_updates(layers: int, batches: int) -> None:
    for solution in (solutions.standard, solutions.grad_accum):
        assert figures(run(solution, 1, layers, batches))[1] == 2 * layers * batches + layers / 2


@given(ranks=st.integers(1, 9), layers=st.integers(1, 5))
def test_data_parallel_time_does_not_depend_on_the_ranks(ranks: int, layers: int) -> None:
    assert figures(run(solutions.ddp, ranks, layers, ranks))[1] == round(2 * layers + 0.8 * layers, 6)
    assert figures(run(solutions.fsdp, ranks, layers, ranks))[1] == round((2 + 0.9 + 0.5) * layers, 6)


@given(ranks=st.integers(1, 6), each=st.integers(1, 3), batches=st.integers(1, 6))
def test_a_pipeline_passes_the_batch_once_forward_and_once_back(ranks: int, each: int, batches: int) -> None:
    layers = ranks * each
    end = 2 * layers * batches + 2 * (ranks - 1) * 0.4 + each / 2
    assert figures(run(solutions.pipeline, ranks, layers, batches))[1] == round(end, 6)


@given(ranks=st.integers(1, 7))
def test_memory_of_shards_adds_up_to_the_whole(ranks: int) -> None:
    models = run(solutions.fsdp, ranks, 1, ranks)
    assert sum(model.weights[0].memory() for model in models) == pytest.approx(512 * 512)
