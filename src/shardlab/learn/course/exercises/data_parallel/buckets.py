"""Exercise 4: buckets, and how many.

   one reduction for each layer     B7 B6 B5 B4 B3 B2 B1 B0
                                       [7--][6--][5--][4--][3--][2--][1--][0--]
   one for all                      B7 B6 B5 B4 B3 B2 B1 B0
                                                           [all---------------]
   some buckets of a few layers     B7 B6 B5 B4 B3 B2 B1 B0
                                          [7,6-][5,4-][3,2-][1,0-]

An all-reduce over n ranks takes 2 (n - 1) hops around the ring. Every hop costs a
latency however small the gradient is, so on many ranks a reduction of one layer is
mostly latency. PyTorch's DistributedDataParallel therefore joins the gradients of
several layers in a bucket, 25 MB by default, and reduces them as one (Li et al. 2020,
arXiv 2006.15704, section 3.2.3). But a bucket is reduced only when its last gradient
is complete: a large one starts late, and the last one has no backward pass to hide
behind.

The solution is not a program but a plan: the settings from which Shardlab generates the
program. Here 64 ranks train 8 layers with data parallelism. These settings matter:

    passes="bucket=2,defer=2"  join the reductions into at least 2 buckets, and await
                               each of them just before the second bucket after it
                               starts (defer=1: before the next bucket starts)
    reduce_at="layer"          reduce while backward passes continue ("step": after)

A reduction that is awaited later hides behind more backward passes, but its gradients
stay in memory longer. In teaching costs a layer's backward pass takes 2. An all-reduce
over 64 ranks takes 2.52 of latency, and 0.71 for each layer in it.
"""

from shardlab.language import Kind, Mesh, OpKind
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import BACKWARDS, reduces_in_buckets, starts_before_last
from shardlab.strategies import Plan


def buckets() -> Plan:
    # BEGIN SOLUTION
    return Plan(Mesh(dp_shard=64), passes="bucket=4,defer=1")
    # START
    # return Plan(Mesh(dp_shard=64), passes="none", reduce_at="step")
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=4,
    name="buckets",
    title="Buckets, and how many",
    goals=Goals("the reference solution", time=29.5375, memory=6_815_749, sent=4_128_768),
    mesh=Mesh(dp_shard=64),
    kind="plan",
    layers=8,
    microbatches=64,
    techniques=(
        starts_before_last(
            frozenset({OpKind.ALL_REDUCE}),
            "no all-reduce starts before the last backward pass.",
            of=Kind.GRAD_WEIGHT,
            passes=BACKWARDS,
        ),
        reduces_in_buckets(1, 7, "each rank makes {found} all-reduces, one for each layer."),
    ),
    mistakes=(
        Mistake(
            "each layer is reduced by itself",
            ("bucket=4,defer=1", "defer=1"),
            "makes 8 all-reduces",
            "compare the latency of a reduction with the backward pass that it hides behind. Which is longer?",
        ),
        Mistake(
            "all gradients are one bucket",
            ("bucket=4,defer=1", "bucket=1"),
            "no all-reduce starts",
            "a bucket starts when its last gradient is complete. When is that, and what does it hide behind?",
        ),
        Mistake(
            "nothing says when the buckets are awaited",
            ("bucket=4,defer=1", "bucket=4"),
            r"too slow: time 35\.35",
            "without `defer`, each bucket is awaited after a single backward pass. Which setting awaits it later?",
        ),
        Mistake(
            "the buckets are too large",
            ("bucket=4,defer=1", "bucket=2,defer=1"),
            "too slow.*too much memory",
            "the last bucket has nothing to hide behind, so it should be small. How many layers are in it?",
        ),
        Mistake(
            "the buckets are awaited too late",
            ("bucket=4,defer=1", "bucket=4,defer=2"),
            "^too much memory",
            "a reduction that has ended still holds its gradients until it is awaited. How late is late enough?",
        ),
    ),
    hints=(
        "Reductions run one after the other. Without buckets they take 8 x 3.2; the backward passes take 8 x 2.",
        "With k layers in a bucket, a reduction takes 2.52 + 0.71 k, and the backward passes beside it take 2 k. From "
        "which k on is the first smaller? The last bucket is not hidden, so take the smallest such k.",
        "Two layers in a bucket are 4 buckets, `bucket=4`. Try 1, 2 and 4 for `defer`, and keep the one that is fast "
        "with the least memory.",
    ),
)
