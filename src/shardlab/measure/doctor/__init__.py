"""Examination of hosts, and of the links between ranks: what is there, what is wrong, and the remedy."""
