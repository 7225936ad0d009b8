"""`make test-browser`: pages of the viewer in headless Chromium, driven as a person would.

`python -m tests.browser.run` writes the pages and starts Node, which runs the files `*.test.mjs` of this folder. It
needs a Chromium. The tests of pytest do not start it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shardlab.draw.viewer.page import save_page
from shardlab.draw.viewer.step_tables import Step, step_tables
from tests.draw.viewer.steps import large_step, step_of, tables_of_trace, two_timelines
from tests.support.node import node_path

HERE = Path(__file__).parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOW = (
    "make test-browser: there is no Chromium here; install one, such as Debian's (apt-get install "
    "chromium-headless-shell), or set CHROMIUM to the path of one"
)


def chromium() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def write_pages(folder: Path) -> None:
    """Write the pages that the tests open."""
    steps: dict[str, Step] = {"gpipe": step_of("gpipe"), "fsdp": step_of("fsdp"), "two": two_timelines()}
    steps["large"] = large_step()
    for name, step in steps.items():
        save_page(step_tables(step), name, folder / f"{name}.html")
    save_page(tables_of_trace(folder / "trace.json"), "trace", folder / "trace.html")


def main() -> int:
    """Run the tests, and return the exit status."""
    found = chromium()
    if found is None:
        print(HOW, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        files = [str(path) for path in sorted(HERE.glob("*.test.mjs"))]
        environment = {**os.environ, "CHROMIUM": found, "SHARDLAB_PAGES": folder, "SHARDLAB_PYTHON": sys.executable}
        return subprocess.run([node_path(), "--test", *files], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
