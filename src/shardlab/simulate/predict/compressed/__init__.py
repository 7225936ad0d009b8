"""Time and memory of a plan's step, without a tape of all its ops.

A tape of a large model has millions of ops, but most of them are repetitions: a model's blocks are identical, its
microbatches are equally large, and many ranks of a pipeline have the same kinds of layers. So each piece of work is
simulated once, and its seconds and bytes are reused.

The passes of layers are measured on a sample, three blocks of the model that are traced and replayed (`sample`). Most
middle blocks of each stage are left out. The work on a block beside such a gap is repeated for the missing blocks,
provided that the same collectives are in flight before and after the block (`short_model`). A `CompressedRank` has the
verbs of a traced rank but records only seconds and bytes, so the same code gathers weights and reduces gradients here
and in traced programs (`rank`).

A `CompressedRunner` runs the actions of the rank's schedule, called steps here. Each has a key; steps with equal keys
do the same work (`runner`). The seconds and bytes of a step depend on its key and on the rank's state before the step:
the weights in flight, and the gradients that are being reduced. So each pair of state and key is run once, for all
ranks of one kind (`step`). The result is a `CompressedStep` with a few entries: seconds of compute, collectives,
messages and waits (`clocks`). Only these entries are replayed, on the event loop that also replays tapes
(`shardlab.simulate.timeline.event_loop`). An entry tells whether the rank computes, or for which communication it
waits, so the time is also divided into compute, exposed communication and idle time without a tape.

The time equals that of a replay of the whole tape up to rounding, and the peaks of memory are exactly equal; tests
compare both on random plans. Read `step` first: it has the entry point.
"""
