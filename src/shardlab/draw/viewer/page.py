"""Page of a step as one HTML file: the packed tables, and the scripts and the style from `assets`.

The scripts are modules that import each other, so that Node can test each of them. A page opened from a disk may not
import other files, so `joined_scripts` joins them into one module, in the order of `SCRIPTS`. Top-level names of
different scripts must therefore differ. The content security policy of the page forbids the page to load anything.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from shardlab.common.files import atomic_file
from shardlab.draw.viewer.columns import encode

SCRIPTS = ("model", "scale", "layout", "colors", "words", "figures", "values", "paint", "viewer", "start")
"""Scripts of a page. Each comes after the scripts that it imports."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


def save_page(packed: bytes, title: str, path: Path) -> None:
    """Write a page to a file atomically.

    Args:
        packed, title: see `page_html`.
        path: path of the file.
    """
    with atomic_file(path) as part:
        part.write_text(page_html(packed, title), encoding="utf-8")


def page_html(packed: bytes, title: str, scripts: tuple[str, ...] = SCRIPTS, policy: str = "connect-src 'none'") -> str:
    """Return the HTML of a page with packed tables.

    Args:
        packed: tables from `step_tables` or `trace_tables`.
        title: title of the window.
        scripts: names of the scripts, each after the scripts that it imports.
        policy: part of the content security policy about connections.
    """
    return (
        asset("page.html")
        .replace("{{policy}}", policy)
        .replace("{{title}}", escape(title))
        .replace("{{style}}", asset("page.css"))
        .replace("{{data}}", encode(packed))
        .replace("{{script}}", joined_scripts(scripts))
    )


def joined_scripts(names: tuple[str, ...] = SCRIPTS) -> str:
    """Return the scripts as one module without imports and exports."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", asset(f"{name}.js"))) for name in names)


@cache
def asset(name: str) -> str:
    """Return the text of a file in `assets`."""
    return (files("shardlab.draw.viewer") / "assets" / name).read_text(encoding="utf-8")
