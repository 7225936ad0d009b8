"""Data to train on: documents to tokens, memory-mapped, and the order in which a run sees them. It needs no torch.

Read documents.py (files and iterables), tokenizers.py, encoded.py (documents to tokens), prepare.py (a folder of
them), corpus.py (what a run trains on) and stream.py (the order of its sequences).
"""

from shardlab.train.data.corpus import Corpus, DataSource, sources_of
from shardlab.train.data.documents import Documents, Input
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "Corpus", "DataSource", "Documents", "Input", "Tokenizer", "sources_of"]
