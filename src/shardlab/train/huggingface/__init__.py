"""Weights that come from and go to other folders: a run's own, and those of Hugging Face."""

from shardlab.train.huggingface.convert import converted
from shardlab.train.huggingface.sources import Form, Source, initial_from, open_source

__all__ = ["Form", "Source", "converted", "initial_from", "open_source"]
