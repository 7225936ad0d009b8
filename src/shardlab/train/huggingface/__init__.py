"""Weights in the folders of runs and in Hugging Face's format: read, converted, and used as first weights.

Read families.py (config.json and the names of tensors of GPT-2, Llama and Mixtral), sources.py (a folder of weights of
which any rows can be read) and convert.py (one format into the other).
"""

from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import Form, Source, initial_from, open_source

__all__ = ["Form", "Source", "convert_weights", "initial_from", "open_source"]
