"""Published runs: errors of predicted seconds and bytes relative to published measurements.

Read `records` (the fields of a run in a file), `reading` (conversion of a run to model, plan, cluster and recipe) and
`predict` (predictions and their errors).
"""
