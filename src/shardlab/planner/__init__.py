"""The planner: search for the fastest plan that fits, with reasons.

Read `problem` (what is planned), `lines` (what the search moves between), `search` (how it moves) and `choose` (the
complete answer). `guesses` and `pass_costs` estimate a plan in a millisecond, `workers` are the processes that guess
and simulate, and `space` lists all plans of small problems. The answer is explained by `alternatives`, `explain`,
`describe` and, if no plan fits, `nothing_fits`. `error_model` corrects predictions by measured steps. `grade` and
`published` compare predictions with published runs. `schedule_search` finds pipeline schedules for unequal stages.
"""
