"""Search of pipeline schedules that fit unequal stages and a memory limit.

Read `problem` (costs, limits and the lower bound), `timing` (times and memory of an order of passes), `greedy` and
`improve` (how orders are made and changed), then `search`, which puts them together. `exact` proves bounds of small
problems, and `from_workload` takes the costs from a predicted step of a model on a cluster.
"""
