"""Proofs over tapes: the right gradient exactly once, no deadlock, one order of collectives."""

from shardlab.check.checked import BACKENDS, ChannelModel, Checked
from shardlab.check.drift import Drift
from shardlab.check.report import check

__all__ = ["BACKENDS", "ChannelModel", "Checked", "Drift", "check"]
