"""Whatever is wrong with a request: a sentence on stderr, nothing on stdout, nothing written, and the right status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardlab.cli import main

Captured = pytest.CaptureFixture[str]

USER = """
def gradients(rank):
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        yield l, grad_weight


async def right(rank):
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def plain(rank):
    pass


async def two(rank, more):
    pass


def divide():
    return 1 / 0  # divides


async def raises(rank):
    rank.load_batch([0])
    if rank.index == 2:
        divide()


async def forgets_the_update(rank):
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)  # loads


async def waits_in_a_circle(rank):
    await rank.recv(source=(rank.index + 1) % rank.world)  # receives


async def reduces_twice(rank):
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        total = await rank.all_reduce(total)  # again


async def sends_too_much(rank):
    await right(rank)
    if rank.index == 0:
        rank.send(rank.load_batch([0]), to=1)  # surplus


async def swaps_two_sends(rank):
    if rank.index == 0:
        for m in (1, 0):
            rank.send(rank.load_batch([m]), to=1)
    if rank.index == 1:
        for m in (0, 1):
            await rank.recv(source=0, expect=("activations", 0, m))  # swapped


async def does_nothing(rank):  # empty
    pass


async def sleeps(rank):
    import asyncio

    await asyncio.sleep(1)  # asleep
"""


def line_of(mark: str) -> int:
    """The line of the user's file that carries a comment."""
    return next(number for number, line in enumerate(USER.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's file in it, as the current one."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: Captured, *arguments: str) -> tuple[int, str]:
    """The status and what stands on stderr; stdout stays empty."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.endswith("\n")
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("simulate fdsp", "there is no strategy 'fdsp'; did you mean fsdp?"),
        (
            "simulate qqq",
            "there are single, grad-accum, ddp, wsdp, fsdp, column-parallel, tensor-parallel, expert-parallel",
        ),
        ("simulate none.py:right", "none.py is not a file"),
        ("simulate folder.py:right", "folder.py is not a file"),
        ("simulate user.py:rigth", "user.py has no function 'rigth'; did you mean right?"),
        ("simulate user.py", "say which function of user.py: user.py:NAME"),
        ("simulate user.py:", "say which function of user.py: user.py:NAME"),
        ("simulate user.py:plain", "plain in user.py is not a strategy; write it as `async def plain(rank): ...`"),
        ("simulate user.py:two", "two cannot be called with the rank alone"),
        ("simulate fsdp --ranks 3", "4 microbatches do not divide among 3 ranks; give a multiple of 3 microbatches"),
        ("simulate gpipe --layers 3", "3 layers do not reach 4 pipeline stages; give at most 3 stages, or more layers"),
        ("simulate user.py:right --microbatches 6", "6 microbatches do not divide among 4 ranks"),
        ("simulate single --ranks 2", "one device, but 2 ranks were asked for; give 1"),
        (
            "simulate",
            "no strategy is given; give a name (shardlab strategies lists them), --plan FILE, or flags such as",
        ),
        ("simulate fsdp --pp 2", "fsdp is a program, which flags cannot change; leave out the name, or"),
        ("simulate user.py:right --recompute full", "user.py:right is a program, which flags cannot change"),
        ("simulate zb-h1 --plan plan.toml", "both zb-h1 and --plan plan.toml were given; give one of them"),
        ("simulate --plan plan.toml", "plan.toml cannot be read: No such file or directory"),
        ("simulate --plan user.py", "user.py is not TOML: "),
        ("simulate zb-h1 --pp 8 --ranks 4", "the plan's mesh pp 8 does not fit on 4 ranks; leave out --ranks"),
        ("simulate hsdp --dp-replicate 2", "dp_shard is left out; give every axis, such as --dp-repl"),
        ("simulate --pp 2 --schedule 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("simulate --pp 2 --schedule qqqqq", "there are gpipe, 1f1b, interleaved-1f1b, breadth-first, zb-h1, zb-h2"),
        ("simulate --pp 2 --schedule none.csv", "none.csv cannot be read as a pipeline CSV: No such file"),
        ("simulate --pp 2 --schedule none.py:mine", "none.py is not a file"),
        ("simulate --pp 2 --schedule user.py:right", "right in user.py is not a schedule; write it as a generator of"),
        ("simulate --pp 2 --schedule user.py:rigth", "user.py has no function 'rigth'; its generators are: gradients"),
        ("simulate zb-v --pp 2 --stages-per-rank 3", "zb-v has 2 stages on each rank, but stages_per_rank is 3"),
        ("simulate --layers-per-stage 3 9", "are to be cut into 1 stage; give 1 number of 1 or more that add up to 12"),
        ("simulate --pp 2 --layers-per-stage 1 2 3", "layers_per_stage is 1, 2, 3, but 6 layers are to be cut into 2"),
        ("simulate --pp 2 --layers-per-stage 3 -1", "give 2 numbers of 1 or more that add up to 2"),
        ("simulate --dp-shard 2 --shard-parameters dp_shard", "let shard_optimizer begin with dp_shard"),
        ("simulate --dp-shard 2 --shard-optimizer pp", "shard_optimizer is pp; give some of dp_shard, dp_replicate"),
        (
            "simulate --dp-shard 2 --reduce-every-microbatch tp",
            "reduce_every_microbatch is tp; give some of dp_shard, dp_replicate",
        ),
        ("simulate --dp-shard 3", "4 microbatches do not divide among 3 data-parallel ranks; give a multiple of 3"),
        ("simulate hsdp --ranks 3", "3 ranks do not make two replicas; give an even number, or a mesh by"),
        ("schedule 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("schedule zb-v --stages-per-rank 1", "zb-v has 2 stages on each rank, but stages_per_rank is 1"),
        ("schedule 1f1b --csv missing/a.csv", "--csv missing/a.csv: the folder missing does not exist"),
        ("schedule 1f1b --csv folder.py", "--csv folder.py: this is a folder; give a file in it, such as"),
        ("verify --all ddp", "verify --all uses its own strategies and sizes; give only --steps, --passes"),
        ("verify --all --pp 2", "verify --all uses its own strategies and sizes; give only --steps, --passes"),
        ("verify --pp 2 --ranks 3", "the plan's mesh pp 2 does not fit on 3 ranks"),
        ("train --strategy ddp --pp 2", "ddp is a program, which flags cannot change"),
        ("simulate fsdp --svg missing/fsdp.svg", "--svg missing/fsdp.svg: the folder missing does not exist"),
        ("simulate fsdp --svg folder.py", "--svg folder.py: this is a folder"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence_and_exits_with_2(
    arguments: str, sentence: str, folder: Path, capsys: Captured
) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert err.startswith("shardlab: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["folder.py", "user.py"]


@pytest.mark.parametrize("option", ["--ranks", "--layers", "--microbatches"])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("four", "'four' is not a whole number; give 1 or more"),
        ("1.5", "'1.5' is not a whole number; give 1 or more"),
    ],
)
def test_counts_are_whole(option: str, value: str, sentence: str, capsys: Captured) -> None:
    status, err = refused(capsys, "simulate", "pipeline-fsdp", option, value)
    assert status == 2
    assert err == f"shardlab: {option}: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("simulate pipeline-fsdp --ranks 0", "--ranks: 0 is too few; give 1 or more"),
        ("simulate pipeline-fsdp --layers -4", "--layers: -4 is too few"),
        ("simulate zero-3 --model gpt2 --cluster h100x8 --micro-batch-size -1", "--micro-batch-size: -1 is too few"),
        ("simulate --dp-replicate 0", "--dp-replicate: 0 is too few"),
        ("train --kv-heads 0", "--kv-heads: 0 is too few"),
        ("schedule 1f1b --pp 0", "--pp: 0 is too few"),
        ("bench collectives --factor 0", "--factor: 0 is too few"),
        ("collectives show all --ranks 0", "--ranks: 0 is too few"),
    ],
)
def test_counts_are_at_least_one_which_one_sentence_says(arguments: str, sentence: str, capsys: Captured) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert err.startswith(f"shardlab: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("simulate fsdp --rankz 4", "there is no option --rankz; did you mean --ranks?"),
        ("simulate fsdp ddp", "unexpected argument 'ddp'"),
        ("simulat fsdp", "there is no command 'simulat'; did you mean simulate?"),
        ("", "no command is given; there are strategies, simulate, schedule"),
        ("train --optimizer admw", "--optimizer is 'admw'; did you mean adamw?"),
        ("train --precision int8", "--precision is 'int8'; there are bf16, bf16-fp32-grads, fp16, fp32, fp64"),
        ("train --steps", "missing value for argument '--steps'. Expected 1 values"),
        ("convert", "missing from shardlab convert: FROM, TO; --help tells more"),
        ("sample run --top-p much", "--top-p: could not convert string to float: 'much'; --help tells more"),
        ("simulate --pp 2 --reshard-after never", "--reshard-after is 'never'"),
        ("simulate --pp 2 --recompute half", "half"),
        ("simulate --pp two", "'two' is not a whole number; give 1 or more"),
        ("schedule", "SCHEDULE"),
        ("schedule 1f1b --form csv", "compute_only"),
        ("strategies --svg x", "--svg"),
        ("simulate fsdp --svg", "--svg"),
    ],
)
def test_a_wrong_option_exits_with_2(arguments: str, words: str, capsys: Captured) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert words in err
    assert err.startswith("shardlab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "user.py:<divides>: rank 2, op 1: the program raised ZeroDivisionError: division by zero"),
        ("forgets_the_update", "user.py:<loads>: rank 0, op 0 load_weight(layer 0): the step ends without weights[0]"),
        ("reduces_twice", "user.py:<again>: rank "),
        ("reduces_twice", "microbatches 0-3 would be counted twice"),
        ("sends_too_much", "user.py:<surplus>: rank 0, op "),
        ("sends_too_much", "no receive on rank 1 takes this message"),
        (
            "swaps_two_sends",
            "user.py:<swapped>: rank 1, op 0 recv from rank 0: expected activations[0] of microbatch 0",
        ),
        ("does_nothing", "user.py:<empty>: weights[0]: no rank loads slice 0"),
        ("sleeps", "user.py:<asleep>: rank 0, op 0: the program awaited something else"),
    ],
)
def test_a_refused_program_names_the_line_at_fault_and_exits_with_1(
    function: str, sentence: str, folder: Path, capsys: Captured
) -> None:
    status, err = refused(capsys, "simulate", f"user.py:{function}")
    assert status == 1
    assert re.sub("<(.*?)>", lambda mark: str(line_of(mark[1])), sentence) in err
    assert err.count("\n") == 1


def test_json_has_the_fields_of_a_refusal(folder: Path, capsys: Captured) -> None:
    assert main(["simulate", "user.py:reduces_twice", "--json"]) == 1
    captured = capsys.readouterr()
    told = json.loads(captured.out)["refused"]
    assert captured.err == f"shardlab: {told['text']}\n"
    assert (told["layer"], told["doubled"], told["line"]) == (3, [0, 1, 2, 3], f"user.py:{line_of('again')}")


def test_a_deadlock_names_the_whole_cycle_and_the_lines_where_ranks_wait(folder: Path, capsys: Captured) -> None:
    status, err = refused(capsys, "simulate", "user.py:waits_in_a_circle", "--ranks", "3")
    assert status == 1
    for rank in range(3):
        assert f"rank {rank} waits in recv from rank {(rank + 1) % 3}" in err
    assert f"\n  ranks 0-2 wait at user.py:{line_of('receives')}\n" in err


def test_a_refused_program_draws_nothing(folder: Path, capsys: Captured) -> None:
    assert refused(capsys, "simulate", "user.py:reduces_twice", "--svg", "picture.svg")[0] == 1
    assert not (folder / "picture.svg").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n1 / 0\n", "bad.py:2 cannot be run: ZeroDivisionError: division by zero"),
        ("async def right(rank)\n", "bad.py:1 cannot be run: SyntaxError"),
        ("import no_such_module_anywhere\n", "bad.py:1 cannot be run: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(text: str, sentence: str, folder: Path, capsys: Captured) -> None:
    Path("bad.py").write_text(text)
    status, err = refused(capsys, "simulate", "bad.py:right")
    assert status == 2
    assert sentence in err
