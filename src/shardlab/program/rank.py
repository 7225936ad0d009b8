"""One rank with all its verbs: the object that a strategy is written with."""

from __future__ import annotations

from shardlab.program.rank_communication import CommunicationVerbs
from shardlab.program.rank_compute import ComputeVerbs
from shardlab.program.rank_values import ValueVerbs


class Rank(ComputeVerbs, CommunicationVerbs, ValueVerbs):
    """One rank of a strategy program: its place and stores, the verbs that compute and those that communicate."""
