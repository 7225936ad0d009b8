"""The planner: search for the fastest plan that fits, with reasons.

Read `problem` (what is planned), `space` (which plans there are), `search` (which of them are simulated) and `choose`
(the complete answer). `bounds` has the lower bounds that let the search skip most plans, and `workers` the processes
that simulate the others. The answer is explained by `alternatives`, `explain`, `describe` and, if no plan fits,
`nothing_fits`. `error_model` corrects predictions by measured steps. `grade` and `published` compare predictions with
published runs.
"""
