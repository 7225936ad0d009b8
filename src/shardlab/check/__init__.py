"""Proofs over tapes: the right gradient exactly once, no deadlock, one order of collectives.

The package itself is callable: `shardlab.check(...)` checks a strategy or a program (see `shardlab.api`).
"""

from shardlab.check.checked import BACKENDS, ChannelModel, Checked
from shardlab.check.replicas import Drift, drifts_of
from shardlab.check.report import check, check_forward
from shardlab.check.runnable import forward_only

__all__ = ["BACKENDS", "ChannelModel", "Checked", "Drift", "check", "check_forward", "drifts_of", "forward_only"]
