"""Weights that come from and go to other folders: a run's own, and those of Hugging Face."""

from shardlab.exchange.convert import Form, converted
from shardlab.exchange.initial import initial_from
from shardlab.exchange.source import Source, open_source

__all__ = ["Form", "Source", "converted", "initial_from", "open_source"]
