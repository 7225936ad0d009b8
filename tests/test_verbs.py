"""docs/verbs.md: every verb of a rank is there, as its docstring describes it today."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The script beside the page."""
    spec = importlib.util.spec_from_file_location("verbs", ROOT / "docs" / "verbs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_docstrings_say_today(writer: ModuleType) -> None:
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "python docs/verbs.py writes the page again"


def test_every_public_method_of_a_rank_is_on_the_page_unless_tracing_alone_calls_it(writer: ModuleType) -> None:
    grouped = [name for names in writer.GROUPS.values() for name in names.split()]
    assert len(grouped) == len(set(grouped))
    assert set(writer.verbs()) == {*grouped, *writer.MACHINERY}


def test_every_verb_has_a_docstring_and_every_type_of_a_signature_is_explained(writer: ModuleType) -> None:
    for name, method in writer.verbs().items():
        assert inspect.getdoc(method), name
        if name not in writer.MACHINERY:
            used = set(re.findall(r"\b[A-Z]\w+\b", writer.signature(name, method)))
            assert used - {"None", "True", "False"} <= set(writer.TYPES), name


def test_every_argument_that_is_described_is_one_of_the_signature(writer: ModuleType) -> None:
    for name, method in writer.verbs().items():
        described = writer.parsed(inspect.getdoc(method)).sections.get("Args", [])
        arguments = {argument for names, _ in described for argument in names.split(", ")}
        assert arguments <= set(inspect.signature(method).parameters), name
