"""Tests of the site of `make docs`: its navigation, the pages that it adds, and links to files outside docs/.

MkDocs itself checks all links and anchors when it builds the site.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import shardlab

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("shardlab_site", DOCS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_once_in_the_navigation(site: Any) -> None:
    sections: list[dict[str, list[str]]] = site.navigation(PAGES["README.md"])
    assert sorted(name for section in sections for names in section.values() for name in names) == sorted(
        PAGES.keys() - {"README.md"}
    )
    assert [title for section in sections for title in section] == [
        *("Tutorials", "Course", "How-tos", "Reference", "Explanations")
    ]


def test_files_outside_docs_have_pages_and_links_lead_there(site: Any) -> None:
    link_count = 0
    for name, text in PAGES.items():
        for target, path in site.outside(f"docs/{name}", text).items():
            page = site.page_of(path)
            link = site.LINK.sub(r"\2", f"]({site.target_of(name, target, {target: path})})").removesuffix(")")
            assert (DOCS / name).parent.joinpath(link).resolve() == DOCS / page, (name, target)
            assert path == "README.md" or site.source_page(DOCS.parent / path).count("\n") > 5
            link_count += 1
    assert link_count > 50


def test_the_page_of_the_readme_has_its_links_and_pictures_in_docs(site: Any) -> None:
    text = site.moved((DOCS.parent / "README.md").read_text(encoding="utf-8"))
    assert "](docs/" not in text
    assert "](pictures/" in text


def test_the_reference_has_every_function_of_the_package(site: Any) -> None:
    page: str = site.api_page((DOCS.parent / "src" / "shardlab" / "api.py").read_text(encoding="utf-8"))
    for name in ("trace", "check", "simulate", "predict", "plan", "verify", "train", "draw"):
        assert callable(getattr(shardlab, name))
        assert f"## shardlab.{name}\n" in page, name


def test_a_docstring_becomes_prose_code_and_lists(site: Any) -> None:
    text = "Add.\n\n>>> add(1, 2)\n3\n\nArgs:\n    one, two: numbers,\n        added.\n\nReturns:\n    The sum."
    assert list(site.described(text)) == [
        "Add.",
        "```pycon\n>>> add(1, 2)\n3\n```",
        "**Args**\n\n- `one`, `two`: numbers, added.",
        "**Returns**\n\n- The sum.",
    ]
