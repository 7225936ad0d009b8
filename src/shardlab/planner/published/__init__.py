"""Published runs: errors of predictions, and of the choices that they make, relative to published measurements.

Read `records` (the fields of a run in a file), `reading` (conversion of a run to model, plan, cluster and recipe),
`predict` (predictions and their errors) and `grade` (how fast the configurations that predictions choose are).
"""
