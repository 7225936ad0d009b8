"""Proofs over tapes: the right gradient exactly once, no deadlock, one order of collectives."""

from shardlab.check.checked import BACKENDS, ChannelModel, Checked
from shardlab.check.drift import Drift
from shardlab.check.forward_only import forward_only
from shardlab.check.report import check, check_forward

__all__ = ["BACKENDS", "ChannelModel", "Checked", "Drift", "check", "check_forward", "forward_only"]
