"""Ranks that die or hang: who has noticed what, and one report of where all of them were."""

from shardlab.faults.watch import Watch, Watching

__all__ = ["Watch", "Watching"]
