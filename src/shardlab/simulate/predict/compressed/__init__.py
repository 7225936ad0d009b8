"""The time and memory of a plan's step, without a tape of all its ops.

A tape of a large model has millions of ops, nearly all of them equal: blocks are identical, microbatches are, and so
are most ranks of a pipeline. So each piece of work is followed once, and its seconds and bytes are used again.

The passes of layers are measured on a sample, three blocks of the model that are traced and replayed (`sample`). Most
blocks in the middle of each stage are left out; what a rank does with the blocks around such a gap stands for them, if
the same collectives are in flight before and after a block (`short_model`). A `CompressedRank` has the verbs of a
traced rank and records only seconds and bytes, so the code that gathers weights and reduces gradients in traced
programs runs on it as it is (`rank`). It follows the rank's schedule, a sequence of step keys, of which equal ones do
the same (`runner`). The result of a step depends on its key and on the rank's state before it: the weights in flight,
and the gradients that are being reduced. So each pair of state and key is followed once, for all ranks of one kind
(`step`). Its `CompressedStep` has a few entries: seconds of compute, collectives, messages and waits (`clocks`). Only
these entries are replayed, on the event loop that also replays tapes (`shardlab.simulate.timeline.event_loop`).

The result equals the replay of the whole tape up to rounding, and the peaks of memory exactly; the tests compare both
on random plans. Read `step` first: it is the entrance.
"""
