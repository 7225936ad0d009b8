"""Comparison of a strategy with PyTorch's implementation. Both alternate their steps in the same processes.

Read results.py (the pairs and the measured figures), contender.py (a GPT in plain PyTorch and its training loop),
pytorch.py (PyTorch's parallelisms) and sides.py (the alternation of the sides).
"""
