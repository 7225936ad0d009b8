"""The algebra of values: the pieces that a value holds, the contributions summed into it, and the rule of every op.

It knows neither ranks nor tapes: its rules are pure functions from specs to specs. Read in this order: `kinds` (kinds
of value, indices, bit sets of pieces), `spec` (the spec of a value), `arithmetic` and `collectives` (sums, and pieces
side by side), `layer_graph` and `layer_rules` (passes of layers), `attention`, `optimizer_step` (loss, norm and
update). `refusals` has the conditions that several rules share.
"""
