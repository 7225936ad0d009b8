"""Command lines parsed with what tyro has found out about options before, most of which it clears for each line.

Importing this module has that effect in a process and its forks. Options are those of classes, which live on, so that
what tyro has found stays true. In a process with pytest it also computes a tenth of its cached results a second time.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

caches: Any = import_module("tyro._unsafe_cache")
caches.clear_cache = lambda: None
caches.sys = SimpleNamespace(modules={})
