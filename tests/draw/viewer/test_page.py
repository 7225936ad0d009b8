"""The page: one file that loads nothing, into which no text of a program can break."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shardlab.draw.viewer.columns import decode
from shardlab.draw.viewer.page import SCRIPTS, asset, page_html, save_page
from shardlab.draw.viewer.step_tables import step_tables
from tests.draw.viewer.steps import step_of


def data_of(page: str) -> str:
    (data,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page, re.DOTALL)
    return data


def test_the_page_has_the_tables(tmp_path: Path) -> None:
    packed = step_tables(step_of("gpipe"))
    save_page(packed, "gpipe", tmp_path / "page.html")
    header, _ = decode(data_of((tmp_path / "page.html").read_text(encoding="utf-8")))
    assert header["title"] == "gpipe"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_page_refers_to_nothing_else() -> None:
    page = page_html(step_tables(step_of("fsdp")), "fsdp")
    for word in ("src=", "href=", "http://", "https://", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in page.replace(data_of(page), ""), word
    assert "connect-src 'none'" in page
    assert "default-src 'none'" in page


def test_a_title_cannot_break_out_of_the_page() -> None:
    evil = '</script><script>alert(1)</script>"&'
    page = page_html(step_tables(replace(step_of("gpipe"), title=evil, note=evil)), evil)
    assert "alert(1)" not in page.replace("&lt;script&gt;alert(1)", "")
    assert page.count("</script>") == 2


def test_texts_of_the_page_are_never_parsed_as_html() -> None:
    for name in SCRIPTS:
        assert "innerHTML" not in asset(f"{name}.js")
        assert "eval(" not in asset(f"{name}.js")


def test_the_assets_are_part_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"shardlab.draw.viewer" = ["assets/*"]' in text
    folder = Path(__file__).parents[3] / "src" / "shardlab" / "draw" / "viewer" / "assets"
    assert {path.stem for path in folder.glob("*.js")} >= set(SCRIPTS)
