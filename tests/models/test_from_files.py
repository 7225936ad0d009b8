"""Models in users' files: found by FILE.py:NAME, carried to other processes, and refused with a sentence."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlab.cli import main
from shardlab.cli.model_options import ModelOptions
from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.models import GPT, Llama, cut, find_model
from shardlab.models.named import name_of, with_fields
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks

FILE = '''
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shardlab.models import GPT, Blocks, Llama, Parameter
from shardlab.models.primitives import Primitive
from shardlab.models.tensors.compute import Given, compute

@dataclass(frozen=True, kw_only=True)
class Mine(GPT):
    """With a size of its own."""
    hidden_size: int = 48
    more: int | None = None

@dataclass(frozen=True, kw_only=True)
class Empty(Blocks):
    pass

@dataclass(frozen=True, kw_only=True)
class Needy(GPT):
    more: int

@dataclass(frozen=True, kw_only=True)
class Twice(GPT):
    def block_parts(self):
        attention, mlp = super().block_parts()
        return attention, mlp, mlp

@dataclass(frozen=True, kw_only=True)
class Broken(GPT):
    def block_parts(self):
        return 1 // 0

class Odd(Primitive):
    einsum: ClassVar[str] = "x(width) -> x(width)"

    def features(self, tensor):
        return 64

    def kernels(self, sequences, tokens, pieces):
        return ()

class Elsewhere(Odd):
    einsum: ClassVar[str] = "y(width) -> x(width)"

class Other(Odd):
    einsum: ClassVar[str] = "x(ffn) -> x(ffn)"

class Unknown(Odd):
    einsum: ClassVar[str] = "x({inner}) -> x(width)"

class Keeps(Odd):
    def keeps(self):
        return ("z",)

class Shapeless(Primitive):
    einsum: ClassVar[str] = "x(width) -> x(width)"

    def kernels(self, sequences, tokens, pieces):
        return ()

class Makes(Odd):
    einsum: ClassVar[str] = "x(width) -> x(width) g(width)"

class Takes(Odd):
    einsum: ClassVar[str] = "x(width) g(width) -> x(width)"

@compute.register
def makes(primitive: Makes, given: Given) -> tuple[Tensor, ...]:
    return given.x.clone(), given.x.sigmoid()

@compute.register
def takes(primitive: Takes, given: Given) -> tuple[Tensor, ...]:
    return (given.x * given.tensors["g"],)

class Flat(Odd):
    def parameters(self):
        return (Parameter("mlp.flat.weight", (64,), False, ()),)

class Again(Flat):
    made_again = True

class Squash(Odd):
    def keeps(self):
        return ("x",)

@compute.register
def squash(primitive: Squash, given: Given) -> tuple[Tensor, ...]:
    return (given.x.tanh(),)

def with_(kind):
    @dataclass(frozen=True, kw_only=True)
    class With(GPT):
        def block_parts(self):
            attention, (name, (*first, add)) = super().block_parts()
            return attention, (name, (*first, kind(tokens=self.seq_len), add))
    return With

Reads, Differs, Names, Keeping, Unsaid, Short = map(with_, (Elsewhere, Other, Unknown, Keeps, Shapeless, Flat))
Alone, Squashed, Remade = map(with_, (Odd, Squash, Again))

@dataclass(frozen=True, kw_only=True)
class Gated(GPT):
    """A gate of the feed-forward part, made before it and read after it, or at once."""
    early: bool = True

    def block_parts(self):
        attention, (name, (norm, up, activate, down, add)) = super().block_parts()
        makes, takes = (kind(tokens=self.seq_len) for kind in (Makes, Takes))
        inside = (makes, up, activate, down, takes) if self.early else (makes, takes, up, activate, down)
        return attention, (name, (norm, *inside, add))

@dataclass(frozen=True, kw_only=True)
class Biased(GPT):
    """The last linear map adds its bias itself, in every slice."""
    def block_parts(self):
        attention, (name, (norm, up, activate, down, add)) = super().block_parts()
        return attention, (name, (norm, up, activate, replace(down, bias=True), replace(add, bias="")))

small = Llama(layers=2, hidden_size=32, heads=2)
ours = Mine(layers=3)
def function(): ...
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_class_of_a_file_is_an_architecture_that_keeps_the_sizes_it_says(file: Path) -> None:
    model = ModelOptions(f"{file}:Mine").make(7, hidden_size=16, heads=2)
    assert (model.layers, model.hidden_size, getattr(model, "heads", None)) == (7, 48, 2)
    assert ModelOptions(f"{file}:Mine", hidden_size=64).make(7).hidden_size == 64


def test_a_model_of_a_file_has_the_sizes_that_it_was_made_with(file: Path) -> None:
    assert ModelOptions(f"{file}:small").make(7) == Llama(layers=2, hidden_size=32, heads=2)
    assert ModelOptions(f"{file}:ours").make(7).layers == 3


def test_a_model_of_a_file_goes_to_other_processes_by_its_name(file: Path) -> None:
    """Which cannot import it; what it has computed of itself stays behind."""
    for name in ("Mine", "ours", "small"):
        model = find_model(f"{file}:{name}")
        assert model.signatures
        again = pickle.loads(pickle.dumps(Job("ddp", 2, 4, model, 2))).model
        assert {field: getattr(again, field) for field in ("layers", "hidden_size", "heads")} == {
            field: getattr(model, field) for field in ("layers", "hidden_size", "heads")
        }
        assert type(again).__name__ == type(model).__name__
    assert name_of(type(find_model(f"{file}:Mine"))) == f"{file}:Mine"
    assert name_of(GPT) == "gpt"


def test_a_toml_file_says_fields_of_their_types_whether_annotations_are_text_or_not(file: Path) -> None:
    toml = file.with_suffix(".toml")
    toml.write_text(f'model = "{file}:Mine"\nmore = 3\nlayers = 2\n')
    assert getattr(find_model(str(toml)), "more", None) == 3
    toml.write_text(f'model = "{file}:Mine"\nmore = "three"\n')
    with pytest.raises(UserError, match="more is 'three'; give a whole number"):
        find_model(str(toml))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "say which model of mine.py: mine.py:NAME; its models are: Mine, Empty, Needy, Twice, Broken,"),
        ("Min", "mine.py has no model 'Min'; did you mean Mine?"),
        ("function", "function in mine.py is not a model; write it as a subclass of shardlab.models.Blocks, or as an"),
        ("Odd", "Odd in mine.py is not a model"),
        ("Empty", "Empty in mine.py does not say its block_parts; define that as GPT does"),
        ("Needy", "Needy in mine.py has no default for more; every field of a model has one"),
        ("Twice", "block 0, feed-forward: Norm has a parameter ln_2.weight, and block 0 has one of that name"),
        ("Broken", "mine.py:35 cannot be run: ZeroDivisionError"),
        ("Reads", "block 0, feed-forward: Elsewhere reads y, which nothing before it makes; there are kv, q, s, x"),
        ("Differs", "block 0, feed-forward: Other reads x(ffn), but Linear made x(width); they must be the same"),
        ("Names", "Unknown has the einsum 'x({inner}) -> x(width)', which cannot be read: KeyError('inner')"),
        ("Keeping", "Keeps keeps z, which it neither reads nor makes; it has x, x"),
        ("Unsaid", "Shapeless makes x, but does not say how many features it has; define features(tensor)"),
        ("Remade", "Again says made_again, but has parameters or makes several tensors; leave it out"),
        ("Short", "mlp.flat.weight has the shape (64,) and the indices (); give an index for each dim"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(
    file: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["verify", "ddp", "--model", f"mine.py:{name}" if name else "mine.py"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("shardlab: ")
    assert error.count("\n") == 1


def test_a_missing_file_and_a_field_that_a_model_lacks_are_one_sentence(file: Path) -> None:
    with pytest.raises(UserError, match=r"none\.py is not a file; give path/to/file\.py:NAME"):
        find_model("none.py:Mine")
    with pytest.raises(UserError, match=r"a model of this kind \(Mine\) has no experts"):
        ModelOptions(f"{file}:Mine", experts=2).make(4)


def test_without_a_function_on_torch_a_primitive_is_simulated_and_no_more(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["simulate", "--tp", "2", "--model", "mine.py:Alone", "--cluster", "h100x2"]) == 0
    capsys.readouterr()
    assert main(["verify", "ddp", "--ranks", "2", "--model", "mine.py:Alone"]) == 2
    assert "nothing computes Odd on torch; register a function (primitive: Odd" in capsys.readouterr().err


def test_a_parameter_that_every_slice_would_have_is_refused_where_it_is_cut(file: Path) -> None:
    model = find_model(f"{file}:Biased")
    assert cut(model, tp=1).layers
    with pytest.raises(UserError, match=r"mlp\.c_proj\.bias has no index ffn, along which Linear is cut"):
        cut(model, tp=2)


def test_a_tensor_with_a_name_of_its_own_is_read_in_the_layer_that_makes_it(
    file: Path, ranks: Callable[[int], Ranks]
) -> None:
    model = replace(find_model(f"{file}:Gated"), layers=2, seq_len=8)
    assert model.sizes(1, 4).layers == 2  # whole blocks are layers
    with pytest.raises(UserError, match="block 0, feed-forward reads g, which is made in an earlier layer"):
        cut(model, tp=2)
    job = Job(Plan(Mesh(tp=2)), 2, 2, with_fields(model, {"early": False}, "Gated"), 2, "fp64")
    assert ranks(2).call(verify_rank, torch.device("cpu"), job, 2)[0].ok


def test_what_comes_after_a_sum_over_slices_is_in_the_next_layer(file: Path, ranks: Callable[[int], Ranks]) -> None:
    """Where the terms have been added: tanh of a term is no term of a tanh."""
    model = find_model(f"{file}:Squashed")
    of_mlp = [layer for layer in cut(model, tp=2).signatures if any(node.name == "squash" for node in layer.nodes)]
    assert [(layer.nodes[0].name, layer.sliced) for layer in of_mlp] == [("squash", False)] * model.layers
    job = Job(Plan(Mesh(tp=2)), 2, 2, replace(model, layers=2, seq_len=8), 2, "fp64")
    assert ranks(2).call(verify_rank, torch.device("cpu"), job, 2)[0].ok
