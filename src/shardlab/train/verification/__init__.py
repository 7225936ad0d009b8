"""Verification of strategies: the results of real ranks are compared with those of one device.

`cases.py` has the cases and the verdict. It does not import torch, which takes seconds, so a command can refuse a wrong
program quickly, before any rank starts. `reference.py` trains on one device. `verify.py` compares the ranks with it.
"""
