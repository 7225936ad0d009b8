"""Refusals of expressions that work in torch but not on a rank. Each names the verb to write instead.

`ValueMisuse`, a base class of values, refuses operators such as `gradient * 0.5`. `HandleMisuse` refuses the operators
of values on a handle, which has to be awaited first. Type checkers do not see these methods, so they still report the
expressions. `why_no_attribute` explains a missing attribute such as `value.grad`, or a missing verb or store of a rank.
The message lists the names that exist, the most similar one first. `remedy_of_type_error` is for Python's errors about
operands of a wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from fractions import Fraction
from numbers import Rational
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from shardlab.common.errors import Rule
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.spec import Spec

Addend = TypeVar("Addend", bound="ValueMisuse")

GRADIENTS = frozenset(kind for kind in Kind if kind.value.startswith("grad_"))

NAME_OF = {
    "acts": "activations", "grad": "grad_weights", "gradients": "grad_weights", "grads": "grad_weights",
    "optim": "opt_states", "optimizer": "opt_states", "parameters": "weights", "params": "weights",
    "states": "opt_states",
    "abs": "norm", "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all", "apply": "update",
    "batch_isend_irecv": "batch_p2p", "bfloat16": "cast", "cat": "concatenate", "chunk": "slice",
    "clip_grad_norm_": "norm", "cpu": "offload", "cuda": "reload", "div": "scale", "div_": "scale", "float": "cast",
    "get_rank": "index", "get_world_size": "world", "half": "cast", "irecv": "recv", "isend": "send",
    "local_rank": "index", "mul": "scale", "mul_": "scale", "n_layers": "layers", "narrow": "slice",
    "num_layers": "layers", "rank": "index", "receive": "recv", "shard": "slice", "size": "world",
    "split": "slice", "stack": "concatenate", "step": "update", "sub": "scale", "sum": "add", "to": "cast",
    "view": "slice", "world_size": "world",
}  # fmt: skip
"""Names of torch, NumPy or MPI, each with the verb or store that does the same under a different name."""

NEAR = 0.6
"""Least similarity of two names, from 0 to 1, for one to be suggested in place of the other."""

NUMBERS = "a program is traced once, without numbers, so it must not depend on those in its tensors"


WRONG_TYPES = (
    (r"'method'", "a verb is called with parentheses, as in rank.share()"),
    (r"'Store' object is not callable", "a store takes its key in brackets, as in rank.weights[0]"),
    (r"Handle'", "await the handle first: its result is the value"),
    (r"\bValue\b", f"verbs of the rank compute with values: {NUMBERS}"),
)
"""Patterns of Python's errors about types, each with what to write instead."""

ATTRIBUTES = ("index", "world", "mesh", "layers", "microbatches")
"""Attributes of a rank that a program may call by mistake, since torch has functions for them."""

NOT_CALLABLE = re.compile("'(.*)' object is not callable")


class RefusingRank(Protocol):
    """The part of a rank that this module uses."""

    def refuse(self, rule: Rule, about: str, fault: str, remedy: str) -> NoReturn: ...


def why_no_attribute(error: AttributeError, families: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return why a program cannot read an attribute that a value or a rank does not have, and what to write instead.

    It runs only after Python has raised the error. A `__getattr__` of values and ranks would double the time of every
    attribute look-up in Python 3.11.

    Args:
        error: Python's error, about an attribute of a value or a rank.
        families: names of a rank's attributes by family; the keys are nouns such as "verbs".

    Returns:
        The fact and the remedy: the two halves of the sentence.
    """
    name = str(error.name)
    if isinstance(error.obj, ValueMisuse):
        return f"{cast(Any, error.obj).spec} has no `{name}`", _instead_of_tensors(name)
    equivalent = NAME_OF.get(name.lower())
    likeness = {
        (other == equivalent, SequenceMatcher(None, name.lower(), other).ratio()): (noun, other)
        for noun, names in families.items()
        for other in names
    }
    best_score = max(likeness)
    noun, nearest = likeness[best_score]
    first, others = f"did you mean rank.{nearest}? Other", [entry for entry in families[noun] if entry != nearest]
    if best_score < (False, NEAR):
        first, noun, others = "the", "verbs", families["verbs"]
    return f"rank.{name} does not exist", f"{first} {noun} are {', '.join(others)}"


def remedy_of_type_error(error: TypeError, rank: RefusingRank) -> str:
    """Return what to write in place of an expression with operands of a wrong type ("": the error is not about a rank,
    its stores, values or handles).
    """
    for pattern, remedy in WRONG_TYPES:
        if re.search(pattern, str(error)):
            return remedy
    match = NOT_CALLABLE.fullmatch(str(error))
    type_names = {name: type(value).__name__ for name, value in vars(rank).items() if name in ATTRIBUTES}
    names = [f"rank.{name}" for name, type_name in type_names.items() if match and type_name == match[1]]
    return f"an attribute such as {' or '.join(names)} is read without parentheses" if names else ""


class ValueMisuse:
    """Base class of values: operators that tensors have and values do not. Each is refused."""

    __slots__ = ()

    def __radd__(self: Addend, other: int | Addend) -> Addend:
        return self if other.__class__ is int and other == 0 else cast(Any, self) + other  # `sum` starts with 0

    if not TYPE_CHECKING:

        def __mul__(self, other: object) -> NoReturn:
            _refuse_product(self, "*", other, other)

        __rmul__ = __mul__

        def __truediv__(self, other: object) -> NoReturn:
            by = 1 / Fraction(other) if isinstance(other, int | float) and other else None
            _refuse_product(self, "/", other, by)

        def __neg__(self) -> NoReturn:
            _refuse_product(self, "*", -1, -1)

        def __sub__(self, other: object) -> NoReturn:
            remedy = "gradients are only added, write a + b"
            if self.spec.kind is Kind.WEIGHT:
                remedy = "rank.update(layer, gradient, weight, opt_state) takes the optimizer's step"
            _refuse_operator(self, "-", remedy, other)

        __rsub__ = __sub__

        def __matmul__(self, other: object) -> NoReturn:
            _refuse_operator(self, "@", "rank.forward(layer, activation, weight) computes a layer", other)

        def __pow__(self, other: object) -> NoReturn:
            _refuse_operator(self, "**", "rank.norm(layer, gradient) is a gradient's sum of squares", other)

        def __abs__(self) -> NoReturn:
            _refuse_operator(self, "in abs()", "rank.norm(layer, gradient) is a gradient's sum of squares")

        def __getitem__(self, index: object) -> NoReturn:
            _refuse_operator(self, f"[{index!r:.40}]", "rank.slice(value, index, of) cuts one of `of` equal slices")

        def __iter__(self) -> NoReturn:
            remedy = "it is one value, and rank.slice(value, index, of) cuts one of `of` equal slices"
            _refuse_operator(self, "unpacked, or in a loop,", remedy)

        def __len__(self) -> NoReturn:
            _refuse_operator(self, "in len()", "value.elements is the number of its elements")

        def __bool__(self) -> NoReturn:
            remedy = f"`value is not None` tells whether there is a value: {NUMBERS}"
            _refuse_operator(self, "as a condition", remedy)

        def __float__(self) -> NoReturn:
            _refuse_operator(self, "as a number", NUMBERS)

        __int__ = __float__

        def __lt__(self, other: object) -> NoReturn:
            _refuse_operator(self, "in a comparison", NUMBERS)

        __le__ = __gt__ = __ge__ = __lt__

        def __eq__(self, other: object) -> bool:
            if isinstance(other, int | float):
                _refuse_operator(self, "in a comparison", NUMBERS)
            return self is other

        __hash__ = object.__hash__

        def __await__(self) -> NoReturn:
            fault = f"{self.spec} is a value already, and only communication is awaited"
            self.rank.refuse("awaited something else", "", fault, "leave out `await`")


class HandleMisuse:
    """Base class of handles: operators that values have. Each is refused, since the handle was not awaited."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def _refuse(self, *_: object) -> NoReturn:
            self.refuse_use()

        __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = __neg__ = __getitem__ = __iter__ = _refuse


def _instead_of_tensors(name: str) -> str:
    """Return what to write in place of an attribute of torch's tensors."""
    if name == "grad":
        return "rank.backward returns the gradients of the weight and of the input"
    if name in {"item", "tolist", "numpy", "max", "min", "mean", "isnan", "isinf", "any", "all"}:
        return NUMBERS
    if name in {"numel", "shape", "size"}:
        return "value.elements is the number of its elements"
    if name in NAME_OF:
        return f"rank.{NAME_OF[name]} is what a program writes for it"
    return "it has `elements`, `bytes` and `spec`, and the verbs of the rank compute with it"


def _refuse_product(value: Any, operation: str, other: object, by: object) -> NoReturn:
    spec: Spec = value.spec
    if spec.kind not in GRADIENTS:
        remedy = "layers compute with it, and only gradients are multiplied, by rank.scale"
    elif isinstance(by, Rational | float) and (factor := Fraction(by).limit_denominator(1000)):
        text = str(factor) if factor.denominator == 1 else f"Fraction({factor.numerator}, {factor.denominator})"
        remedy = (
            f"write rank.scale(value, {text}) if it is meant. Gradients are shares of the step's mean already, and "
            "their sum needs no factor"
        )
    else:
        remedy = "rank.scale(value, by) multiplies a gradient by a Fraction, or by token counts (rank.tokens)"
    _refuse_operator(value, operation, remedy, other)


def _refuse_operator(value: Any, operation: str, remedy: str, other: object = "") -> NoReturn:
    rank: RefusingRank = value.rank
    operand = other if isinstance(other, str) else str(getattr(other, "spec", repr(other)))
    expression = f"{value.spec} {operation} {operand:.80}".rstrip()
    rank.refuse("no operator", "", f"{expression} is no operation on values", remedy)
