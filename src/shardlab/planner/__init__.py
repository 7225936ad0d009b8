"""The planner: search for the fastest plan that fits, with reasons.

Read `problem` (the input), `lines` (the sets of plans between which the search moves), `search` and `choose` (the
complete answer). `guesses` and `pass_costs` estimate a plan in a millisecond, `workers` has the processes that guess
and simulate, and `space` defines the space of plans. The answer is explained by `alternatives`, `explain`, `describe`
and, if no plan fits, `nothing_fits`. `error_model` corrects predictions by measured steps. `published` compares
predictions, and the choices that they make, with published runs. `schedule_search` finds pipeline schedules for unequal
stages.
"""
