"""Plans: strategies given by settings, and the one program that follows any plan.

Read `plan` (the settings), then `program` (the loop over the actions of a schedule). `resolve` computes the details for
one rank, which `rank_plan` defines: its layers, slices, collectives and schedule actions. `layer_passes` runs the
forward and backward passes of layers with tensor and expert parallelism. `context_parallel` runs attention over
sequences that are split, and `sharding` gathers and prefetches weights and reduces gradients.
"""
