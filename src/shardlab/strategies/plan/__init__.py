"""Plans: strategies given by settings, and the one program that follows any plan.

Read `plan` (the settings), then `program` (the loop over the steps of a schedule). `resolve` computes the details for
one rank, which `rank_plan` defines: its layers, slices, collectives and steps. `layer_passes` runs layers and attention
with tensor, expert and context parallelism. `sharding` gathers and prefetches weights and reduces gradients.
"""
