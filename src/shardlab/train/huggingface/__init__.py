"""Weights in the folders of runs, in Hugging Face's format and in torchtitan's: read, converted, and trained further.

Read families.py (config.json and the names of tensors of GPT-2, Llama and Mixtral), torchtitan.py (the names of tensors
in torchtitan's checkpoints), sources.py (folders of weights, from which any rows can be read), convert.py (one format
into another) and adam.py (the state of AdamW in a conversion).
"""
