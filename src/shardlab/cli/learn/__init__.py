"""`shardlab learn`: the course in a terminal.

Read `command.py` (the subcommands), `show.py` (what they print) and `train.py` (training with a student's program).
"""
