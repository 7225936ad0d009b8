"""Comparison of a strategy with PyTorch's own implementation, step by step in the same processes.

Read results.py (the pairs, and what is measured), contender.py (a GPT in plain PyTorch and its training loop),
pytorch.py (PyTorch's parallelisms) and sides.py (the sides take turns).
"""
