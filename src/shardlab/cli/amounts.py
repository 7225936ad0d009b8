"""Amounts that a user writes with a unit: bytes, and tokens."""

from __future__ import annotations

import re

from shardlab.program import UserError

NUMBER = r"\d+(?:\.\d+)?(?:e\d+)?"

BYTES = {"b": 1} | {
    f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))
}

TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
"""Units of tokens, powers of 1,024 as batches are commonly named: 4M tokens are 512 sequences of 8,192."""


def read_bytes(text: str, flag: str) -> float:
    """So many bytes: `72GiB`, `80GB`, `5e9B`; a number alone is refused, since it may be meant as GiB.

    Raises:
        UserError: it is no amount above 0, or it has no unit.
    """
    if re.fullmatch(NUMBER, text.strip().lower()):
        raise UserError(f"{flag} {text} has no unit; write {text}GiB, {text}GB, or {text}B for bytes")
    return _amount(text, BYTES, f"{flag} {text}: give bytes above 0 with their unit, such as 72GiB or 80GB")


def read_tokens(text: str, flag: str) -> int:
    """So many tokens: `4M`, `512k`, `4194304`.

    Raises:
        UserError: it is no whole number above 0.
    """
    wrong = f"{flag} {text}: give a whole number of tokens, such as 4M (4 x 1024 x 1024) or 500000"
    amount = _amount(text, TOKENS, wrong)
    if amount != int(amount):
        raise UserError(wrong)
    return int(amount)


def _amount(text: str, units: dict[str, int], wrong: str) -> float:
    found = re.fullmatch(rf"({NUMBER})\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units or not float(found[1]):
        raise UserError(wrong)
    return float(found[1]) * units[found[2]]
