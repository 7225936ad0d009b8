"""Weights in the folders of runs and in Hugging Face's format: read, converted, and used as first weights.

Read families.py (config.json and the names of tensors of GPT-2, Llama and Mixtral), sources.py (a folder of weights of
which any rows can be read) and convert.py (one format into the other).
"""
