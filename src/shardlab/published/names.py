"""Known names in the text of a row that has no field for what it names: what is found is an assumption, and told."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardlab.hardware import LINKS

NETWORKS = {"efa": ("efa-100", 4)}
"""Networks that are called by a family's name: the link, and how many of them a device has (AWS p5: 32 of 100 Gb/s)."""


def network_in(text: str | None) -> tuple[str, int] | None:
    """The link that a text names, and how many of them a device has (None: it names none that is known here).

    >>> network_in("NVLink; EFA"), network_in("a fast network")
    (('efa-100', 4), None)
    """
    if (family := named(text, NETWORKS)) is not None:
        return NETWORKS[family]
    link = named(text, LINKS)
    return None if link is None else (link, 1)


def named(text: str | None, names: Iterable[str]) -> str | None:
    """The known name whose words all stand in a text: the first one, and of those that begin alike the longest.

    The end of a compound does not begin a name: Megatron-DeepSpeed is not DeepSpeed.

    >>> named("A100-SXM4-40GB (Polaris)", ["a100", "a100-40gb", "h100"])
    'a100-40gb'
    >>> named("amp_fp8 / bf16", ["bf16", "fp8"]), named("H1000", ["h100"])
    ('fp8', None)
    """
    joined = re.sub(r"(\d+) ?gb\b", r"\1gb", (text or "").lower())
    words = {match[0] for match in re.finditer(r"[a-z0-9]+", joined)}
    starts = {match[0]: match.start() for match in reversed([*re.finditer(r"(?<![a-z0-9-])[a-z0-9]+", joined)])}
    found = [
        (starts[first], -len(name), name)
        for name in names
        if (first := name.partition("-")[0]) in starts and words.issuperset(name.split("-"))
    ]
    return min(found)[2] if found else None
