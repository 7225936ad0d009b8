"""Examination of hosts and of the links between ranks: what is present, what is wrong, and the remedy.

Read checks.py (a single host) and network.py (all ranks together, and the smoke test).
"""
