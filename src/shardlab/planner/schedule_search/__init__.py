"""Search for pipeline schedules for unequal stages and a memory limit.

Read `problem` (costs, limits and the lower bound), `timing` (times and memory of an order of passes), `greedy` and
`improve` (construction and local search of orders), then `search`, which combines them. `exact` proves lower bounds of
small problems, `from_workload` takes the costs from a predicted step of a model on a cluster, and `for_plans` searches
for schedules of the planner's best plans.
"""
