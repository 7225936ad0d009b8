"""Proofs over tapes: each contribution is in the gradient once, collectives are in one order, and nothing deadlocks.

Read in this order: `report` (the entry points, and the order of the proofs), `dataflow` (the replay that derives every
value again), `communication` (the part of this replay for collectives and messages), `deadlock` (the channel models of
the backends), `checked` (the result). `in_place` and `buffers` find the values that share memory, and prove that this
is safe. `runnable` finds ops that no backend can run, and `replicas` the copies of a weight that may drift apart by
rounding.

The package itself is callable: `shardlab.check(...)` checks a strategy or a program (see `shardlab.api`).
"""

from shardlab.check.checked import BACKENDS, ChannelModel, Checked
from shardlab.check.replicas import Drift, drifts_of
from shardlab.check.report import check, check_forward
from shardlab.check.runnable import forward_only

__all__ = ["BACKENDS", "ChannelModel", "Checked", "Drift", "check", "check_forward", "drifts_of", "forward_only"]
