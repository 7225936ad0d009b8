"""Published runs: how far predicted seconds and bytes are from those that others have measured.

Read `records` (the fields of a run in a file), `reading` (a run as model, plan, cluster and recipe) and `predict`
(predictions and their errors).
"""
