"""Training data: documents become tokens, in memory or in memory-mapped files, and a seed determines their order.

Nothing here needs torch. Read documents.py (text, JSONL, Parquet and token files), tokenizers.py (text to tokens and
back), prepare.py (documents to a folder of tokens), prepared_folder.py (the format of that folder), stream.py (the
order in which a run sees its sequences) and corpus.py (what a run trains on, from all of these). evaluation_text.py and
chat.py prepare the inputs of `shardlab eval` and of conversations.
"""

from shardlab.train.data.corpus import Corpus, DataSource, parse_sources
from shardlab.train.data.documents import Documents, Input
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "Corpus", "DataSource", "Documents", "Input", "Tokenizer", "parse_sources"]
