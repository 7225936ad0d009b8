"""Verification of strategies: the results of real ranks are compared with those of one device.

`cases.py` has the cases and the verdict. It needs no torch, so that a command can refuse a program before any rank
starts. `reference.py` trains on one device, and `verify.py` compares the ranks with it.
"""
