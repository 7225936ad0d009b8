"""Proofs over tapes: the right gradient exactly once, no deadlock, one order of collectives.

Read in this order: `report` (the entry points, and the order of the proofs), `dataflow` (the replay that derives every
value again), `communication` (its half for collectives and messages), `deadlock` (the channel models of the backends),
`checked` (the result). `in_place` and `buffers` say which values share memory, and prove it safe. `runnable` finds what
no backend can run, and `replicas` which copies of a weight may drift apart by rounding.

The package itself is callable: `shardlab.check(...)` checks a strategy or a program (see `shardlab.api`).
"""

from shardlab.check.checked import BACKENDS, ChannelModel, Checked
from shardlab.check.replicas import Drift, drifts_of
from shardlab.check.report import check, check_forward
from shardlab.check.runnable import forward_only

__all__ = ["BACKENDS", "ChannelModel", "Checked", "Drift", "check", "check_forward", "drifts_of", "forward_only"]
