"""Time and memory of a plan's step, without a tape of all its ops.

A tape of a large model has millions of ops, most of them repetitions: blocks are identical, microbatches are, and so
are most ranks of a pipeline. So each piece of work is simulated once, and its seconds and bytes are reused.

The passes of layers are measured on a sample, three blocks of the model that are traced and replayed (`sample`). Most
middle blocks of each stage are left out. The work on the blocks around such a gap is repeated for the missing blocks,
provided that the same collectives are in flight before and after a block (`short_model`). A `CompressedRank` has the
verbs of a traced rank but records only seconds and bytes, so the same code gathers weights and reduces gradients here
and in traced programs (`rank`). It follows the rank's schedule as a sequence of step keys; equal keys mean equal work
(`runner`). The result of a step depends on its key and on the rank's state before it: the weights in flight, and the
gradients that are being reduced. So each pair of state and key is run once, for all ranks of one kind (`step`). Its
`CompressedStep` has a few entries: seconds of compute, collectives, messages and waits (`clocks`). Only these entries
are replayed, on the event loop that also replays tapes (`shardlab.simulate.timeline.event_loop`). They also
know what a rank does (compute, or wait for which communication), so the parts of a step's time need no tape either.

The result equals the replay of the whole tape up to rounding, and the peaks of memory are equal exactly; tests compare
both on random plans. Read `step` first: it has the entry point.
"""
