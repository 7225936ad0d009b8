"""Format of checkpoints: folders that are complete or not there, and that any plan can read.

Read `write.py` first: the files of a checkpoint, and the order in which they are written. `contents.py` says what a
rank keeps from step to step, and which rank writes which part of it. `read.py` opens a checkpoint, and restores the
state of a rank under a plan that may differ from the plan that wrote it. `distributed.py` reads and writes the weights
of torch.distributed.checkpoint. `train/checkpoints.py` decides when to save.
"""
