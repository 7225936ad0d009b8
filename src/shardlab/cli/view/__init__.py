"""`shardlab view`: an interactive page of a step, of a traced run or of a trace.

Read `command.py` first. `report.py` prints the figures that the page shows, and `edit.py` serves the page in which a
schedule or a program is edited.
"""
