"""The time and memory of a plan's step, without a tape of all its ops.

A tape of a large model has millions of ops, nearly all of them equal: blocks are identical, microbatches are, and so
are most ranks of a pipeline. So work that is equal is done once:

1. `sample`: the passes of the layers are measured on three blocks of the model. This sample is traced on one pipeline
   rank and replayed, and each forward or backward pass gives its seconds, its collectives and its bytes.
2. `rank`: a `CompressedRank` has the verbs of a traced rank, but records only seconds and bytes. The code that gathers
   weights and reduces gradients in traced programs runs on it as it is.
3. `runner`: a `CompressedRunner` follows the rank's schedule. Layers' passes are taken from the sample. The schedule is
   a sequence of step keys: steps with equal keys do the same.
4. `step`: the result of a step depends on its key and on the rank's state before it (weights in flight, gradients that
   are being reduced). So each pair of state and key is computed once, and its `CompressedStep` is used again.
5. `clocks`: only what ranks of different pipeline stages do together is replayed: collectives and messages between
   rows. All else of a step is a few entries of seconds.

The result equals the replay of the whole tape; the tests compare both on random plans. Read `step` first: it is the
entrance, and then the parts in the order of this list.
"""
