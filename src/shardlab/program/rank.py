"""One rank with all its verbs: the object that a strategy is written with."""

from __future__ import annotations

from shardlab.program.rank_communication import CollectiveVerbs
from shardlab.program.rank_compute import AttentionVerbs
from shardlab.program.rank_values import CopyingVerbs, ScalingVerbs, SlicingVerbs


class Rank(AttentionVerbs, CollectiveVerbs, CopyingVerbs, ScalingVerbs, SlicingVerbs):
    """One rank of a strategy program: its place and stores, the verbs that compute and those that communicate."""
