"""Which way a collective goes between processes on gloo."""

from __future__ import annotations

BY_MESSAGES = 2 * 2**20
"""Bytes that a member may receive for a sum by messages; more is summed around a ring."""
