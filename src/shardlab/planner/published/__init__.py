"""Comparison of predictions with published runs: of time, of memory, and of the configurations that they choose.

Read `records` (the fields of a run in a file), `reading` (conversion of a run to model, plan, cluster and recipe),
`predict` (predictions and their errors) and `grade` (measured speed of the configuration with the best prediction).
"""
