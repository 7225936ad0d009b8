"""`shardlab plan`: search the plans of a model on a cluster for the fastest one that fits.

Read `command.py` first: the options, the search, and what follows it. `report.py` prints the choice and its reasons.
`measure.py` suggests plans to measure and reads measured steps, which correct the predictions. `grade.py` compares
predicted choices with published runs. The search itself is in `shardlab.planner`.
"""
