"""Data to train on: documents to tokens, memory-mapped, and the order in which a run sees them. It needs no torch."""

from shardlab.data.corpus import Corpus
from shardlab.data.sources import DataSource, sources_of

__all__ = ["Corpus", "DataSource", "sources_of"]
