"""Execution of a checked program on torch.distributed.

Read `executor` first: it turns each op of a rank's tape into one call. `state` has the rank's tensors, and
`tape_analysis` the facts of the tape that are known before it runs. `compute_ops`, `update_ops` and `communication_ops`
have the call of each kind of op. `optimizers` updates slices of parameters, `transport` moves tensors between ranks,
and `recording` measures real steps. `progress`, `requirements` and the settings of optimizers need no torch.
"""
