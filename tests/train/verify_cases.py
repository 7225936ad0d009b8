"""Cases that train on real processes and are compared with one device, and the purpose of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardlab.language import Mesh
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, MoE
from shardlab.strategies import Plan
from shardlab.strategies.schedules.pytorch_csv import CsvFormat
from shardlab.train.job import Job
from shardlab.train.verification.cases import ALONE, CASES, FSDP, NO_PIPELINE, PIPELINES, SHARD, SHARDINGS, Case

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
CHECK = HERE.parent / "check"
BY_HAND = HERE / "user_programs.py"
COMMUNICATING = HERE / "communicating_programs.py"
ROOTED = HERE / "rooted_programs.py"


@dataclass(frozen=True)
class Verified:
    """A strategy on a model, trained on as many processes as it takes.

    Attributes:
        shows: what this case alone shows.
        strategy: a name, a file's function, or a plan.
        model: what is trained, in float64.
        microbatches: of the step.
        ranks: processes (0: the plan's mesh).
        steps: optimizer steps; two show that state is carried over.
        uneven: leave out some targets, other ones of each microbatch.
        exported: the form of CSV file through which the plan's schedule goes.
        clip: the largest norm of the gradient (None: so small that programs that clip always do).
    """

    shows: str
    strategy: str | Plan
    model: Blocks
    microbatches: int
    ranks: int = 0
    steps: int = 2
    uneven: bool = False
    exported: CsvFormat | None = None
    clip: float | None = None

    @property
    def world(self) -> int:
        """How many processes it takes."""
        return self.strategy.mesh.world if isinstance(self.strategy, Plan) else self.ranks

    def job(self) -> Job:
        return Job(self.strategy, self.world, self.microbatches, self.model, 2, "fp64")


small = partial(GPT, hidden_size=16, heads=2, seq_len=8)
wide = partial(small, ffn_hidden_size=1024)
"""Its feed-forwards' products are large."""
grouped = partial(GPT, layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=16, vocab_size=39)
llama = partial(Llama, layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=16, vocab_size=40)
moe = partial(MoE, layers=3, hidden_size=16, heads=2, seq_len=8, auxiliary=0.1)
mixtral = partial(Mixtral, layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=16, vocab_size=40)

MATRICES = MLP(layers=2, hidden_size=16, seq_len=8, vocab_size=39, dropout=0.1)
ODD = GPT(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8, vocab_size=51)
"""A vocabulary that does not divide, and two heads for each key and value."""
DROPS = grouped(dropout=0.2)
NEMOTRON = GPT(
    layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=16, vocab_size=40,
    activation="squared_relu", rope_theta=1e4, bias=False, ffn_hidden_size=48,
)  # fmt: skip
USERS = small(layers=3, dropout=0.1)
TIED = GPT(layers=3, hidden_size=16, heads=2, seq_len=8, vocab_size=51, dropout=0.2, tied=True)
DROPLESS, SWITCH = moe(capacity_factor=None), moe(top_k=1, capacity_factor=1.0)
DROPPING = moe(capacity_factor=0.7, dropout=0.2)

BOTH, SEQUENCE = ("dp_shard", "dp_replicate"), ("dp_shard", "cp")
SP = partial(Plan, sequence_parallel=True)
GATHERED = partial(Plan, context="all_gather")
HSDP = replace(FSDP, mesh=Mesh(dp_replicate=2, dp_shard=2))


def everywhere(plan: Plan, axes: tuple[str, ...]) -> Plan:
    """Weights, gradients and optimizer states cut along some axes."""
    return replace(plan, shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes)


BY_NAME = [
    Verified("an odd number of owners broadcast", "wsdp", small(layers=3), 3, 3),
    Verified("a flat weight is padded to three slices", "fsdp", wide(layers=2, dropout=0.2), 6, 3),
    Verified("a rank's own microbatches have their own masks", "ddp", wide(layers=2, dropout=0.2), 8, 4),
    Verified("whole matrices of an MLP are gathered", "fsdp", MLP(layers=4, hidden_size=16, seq_len=8), 4, 2),
    Verified("one microbatch passes four stages", "pipeline", small(layers=4), 1, 4),
    Verified("stages of two layers", "gpipe", small(layers=8, dropout=0.2), 4, 4),
    Verified("fewer microbatches than stages, and an uneven last stage", "1f1b", wide(layers=5), 3, 4),
    Verified("microbatches that do not divide by ranks", "interleaved-1f1b", small(layers=4), 5, 2),
    Verified("chunks that are uneven", "breadth-first", small(layers=5), 2, 2),
    Verified("less work than fills the pipeline", "zb-h2", wide(layers=4), 2, 4),
    Verified("two directions at once with uneven chunks", "dualpipe-v", small(layers=6), 3, 2),
    Verified("masks of stages that are sharded", "pipeline-fsdp", small(layers=4, dropout=0.2), 4, 4),
    Verified("columns of four ranks", "column-parallel", MATRICES, 2, 4),
    Verified("a mixture's weight is gathered whole", "fsdp", moe(layers=4, dropout=0.1), 4, 2),
    Verified("mixtures on stages", "gpipe", moe(layers=4, dropout=0.1), 4, 2),
    Verified("microbatches go through experts together", "expert-parallel", DROPPING, 8, 4),
    Verified("a norm that clips nothing", "zero-3", small(layers=2), 4, 2, steps=3, clip=1e6),
]

PROGRAMS = [
    Verified("what is computed twice counts once", f"{COMMUNICATING}:losses_computed_twice", USERS, 3, 2),
    Verified("an all-reduce in two levels", f"{COMMUNICATING}:scattered_twice", USERS, 4, 4),
    Verified("what was sent is added to", f"{COMMUNICATING}:ring", USERS, 2, 2),
    Verified("what is being sent is read", f"{COMMUNICATING}:sent_while_it_accumulates", USERS, 4, 2),
    Verified("gathers ahead, slices in turned order", f"{COMMUNICATING}:prefetched", USERS, 4, 4),
    Verified("exchanges of activations", f"{COMMUNICATING}:crossing", USERS, 4, 2),
    Verified("a batch gathered in turned order", f"{COMMUNICATING}:gathered_microbatches", USERS, 4, 4),
    Verified("weights that a rank does not keep arrive", f"{COMMUNICATING}:sent_weights", USERS, 4, 2),
    Verified("new slices are gathered into the kept weight", f"{BY_HAND}:zero_1", USERS, 3, 3),
    Verified("all new slices are gathered at once", f"{BY_HAND}:zero_2", USERS, 4, 2),
    Verified("new slices are put in order", f"{BY_HAND}:zero_2_in_turned_order", USERS, 3, 3),
    Verified("a state finer than its weight", f"{BY_HAND}:partly_sharded", USERS, 4, 4),
    Verified("weights' halves in another order", f"{BY_HAND}:split", USERS, 4, 2),
    Verified("a weight's half outlives the gathered weight", f"{BY_HAND}:split_fsdp", USERS, 3, 3),
    Verified("a weight's half of what was recomputed", f"{BY_HAND}:split_fsdp_recomputed", USERS, 2, 2),
    Verified("halves on stages, and a norm that goes round", f"{BY_HAND}:split_pipeline", USERS, 2, 3),
    Verified("halves of embedding and head in one layer", f"{BY_HAND}:split_fsdp", wide(layers=1, tied=True), 2, 2),
    Verified("halves without biases", f"{BY_HAND}:split_fsdp", wide(layers=2, bias=False), 2, 2),
    Verified("halves of an MLP", f"{BY_HAND}:split_fsdp", MLP(layers=2, hidden_size=16, seq_len=8), 2, 2),
    Verified("a server reduces and broadcasts", f"{EXAMPLES}/parameter_server.py:parameter_server", USERS, 3, 3),
    Verified("a server alone", f"{EXAMPLES}/parameter_server.py:parameter_server", USERS, 2, 1),
    Verified("scatter and gather on two axes", f"{ROOTED}:by_root", USERS, 4, 4),
    Verified("roots on a mesh of one axis", f"{ROOTED}:by_root", USERS, 4, 2),
    Verified("replicas that take turns", f"{ROOTED}:replicas", USERS, 3, 3),
    Verified("a kept weight steps beside its copy",
             f"{CHECK}/unsound_programs.py:stepped_while_it_arrived_apart",
             small(layers=1, dropout=0.1), 4, 2, steps=3),
    Verified("gathered microbatches meet slices", f"{CHECK}/sliced_programs.py:microbatches_together",
             small(layers=2, heads=4, dropout=0.1), 4, 2, steps=3),
    Verified("gathered microbatches meet a slice of one head", f"{CHECK}/sliced_programs.py:microbatches_together",
             small(layers=1, heads=4, dropout=0.1), 4, 4, steps=3),
    Verified("parts of the experts that lie apart", f"{CHECK}/expert_programs.py:combined_apart", DROPPING, 4, 4),
    Verified("layers without parameters are moved and stepped",
             f"{CHECK}/empty_programs.py:layers_without_parameters", moe(), 2, 2),
    Verified("the last rank has nothing to do", f"{CHECK}/empty_programs.py:last_rank_is_idle", USERS, 4, 3),
    Verified("another rank than the first does all", f"{CHECK}/empty_programs.py:first_rank_is_idle", USERS, 2, 2),
    *(Verified(f"kept elsewhere: {name.replace('_', ' ')}", f"{CHECK}/offloading_programs.py:{name}", USERS, 2, 2,
               steps=3)
      for name in ("slice_outlives_the_update", "slices_are_stepped_one_by_one", "two_copies_are_stepped",
                   "rounded_on_its_way")),
]  # fmt: skip

SCHEDULES_OF_ONES_OWN = [
    Verified("a user's schedule", Plan(Mesh(pp=2, dp_replicate=2), f"{EXAMPLES}/my_schedule.py:one_at_a_time"),
             small(layers=3, dropout=0.1), 4),
    Verified("an imported order of actions", Plan(Mesh(pp=2, dp_shard=2), "1f1b"), small(layers=5), 6,
             exported="compute_only"),
    Verified("an imported order of messages and gathers", replace(FSDP, mesh=Mesh(pp=2, dp_shard=2), schedule="1f1b"),
             small(layers=5), 6, exported="compute_comms"),
    Verified("an imported order of halves", replace(FSDP, mesh=Mesh(pp=2, dp_shard=2), schedule="zb-v"),
             small(layers=5), 6, exported="compute_only"),
    Verified("an imported order of halves and messages", Plan(Mesh(pp=2, dp_shard=2), "zb-v"), small(layers=5), 6,
             exported="compute_comms"),
]  # fmt: skip

DATA = [
    Verified("slices reduced over replicas, each by its tokens", HSDP, ODD, 8, uneven=True),
    Verified("states over both axes", replace(HSDP, shard_optimizer=BOTH), ODD, 8, uneven=True),
    Verified("gradients reduced at once and kept whole",
             Plan(Mesh(dp_replicate=2, dp_shard=2), shard_parameters=SHARD, shard_optimizer=BOTH,
                  reduce_every_microbatch=SHARD),
             ODD, 8, uneven=True),
    Verified("gradients reduced when all passes are over",
             Plan(Mesh(pp=2, dp_shard=2), shard_optimizer=SHARD, reduce_every_microbatch=(), reduce_at="step"), ODD, 8),
    Verified("two chunks a rank, recomputed", Plan(Mesh(pp=2, dp_shard=2), "interleaved-1f1b", 2, recompute="full"),
             replace(DROPS, layers=4), 4),
    Verified("weights freed after forward passes alone",
             replace(FSDP, mesh=Mesh(pp=2, dp_shard=2), schedule="1f1b", reshard_after="forward"), USERS, 6),
    Verified("stages of given sizes", Plan(Mesh(pp=2), layers_per_stage=(1, 3)), small(layers=4), 2),
    Verified("rotary positions, swiglu and rms norms in one weight", FSDP, llama(), 4),
    Verified("halves of rotary positions, swiglu and rms norms", Plan(Mesh(pp=2), "zb-h1"), llama(), 2),
]  # fmt: skip

TENSOR = [
    Verified("one head a rank, no biases", Plan(Mesh(tp=2)), small(layers=1, bias=False), 2),
    Verified("an MLP's halves, recomputed", Plan(Mesh(tp=2), recompute="full"),
             MLP(layers=2, hidden_size=16, seq_len=8), 2),
    Verified("slices of a vocabulary, padded", SP(Mesh(tp=2)), ODD, 1),
    Verified("masks of slices of a sequence, each by its tokens", SP(Mesh(tp=2)),
             GPT(layers=2, hidden_size=16, heads=4, seq_len=8, dropout=0.2), 2, uneven=True),
    Verified("slices that are sharded and gathered", replace(FSDP, mesh=Mesh(dp_shard=2, tp=2), schedule="gpipe"),
             ODD, 4),
    Verified("halves of slices on stages", SP(Mesh(pp=2, tp=2), "zb-h1"), replace(DROPS, layers=3, seq_len=8), 3),
    Verified("pp, dp and tp", SP(Mesh(pp=2, dp_shard=2, tp=2), "1f1b", None, (), SHARD, SHARD, SHARD),
             replace(ODD, dropout=0.2), 4),
    Verified("attention alone recomputed", Plan(Mesh(tp=2), recompute="selective"), DROPS, 2),
    Verified("attention alone recomputed, in halves", SP(Mesh(pp=2, tp=2), "zb-h1", recompute="selective"), DROPS, 2),
    Verified("chunks recomputed whole, in halves", SP(Mesh(pp=2, tp=2), "zb-v", recompute="full"),
             replace(DROPS, layers=4), 2),
    Verified("two blocks recomputed from one input", SP(Mesh(tp=2), recompute="uniform-2"),
             replace(DROPS, layers=3), 2),
    Verified("one block recomputed, on replicas", Plan(Mesh(tp=2, dp_replicate=2), recompute=(1,)), DROPS, 4),
    Verified("slices of rotary positions and swiglu", Plan(Mesh(tp=2)), llama(), 2),
    Verified("slices of a tied Llama", SP(Mesh(tp=2)), llama(dropout=0.2, tied=True), 2),
    Verified("states of slices sharded", SP(Mesh(tp=2, dp_shard=2), shard_optimizer=SHARD), NEMOTRON, 4),
    Verified("scores of rotary positions recomputed", Plan(Mesh(tp=2), recompute="selective"), NEMOTRON, 2),
]  # fmt: skip

CONTEXT = [
    Verified("a ring of four, more than one microbatch", Plan(Mesh(cp=4)), grouped(), 2),
    Verified("masks of a ring", Plan(Mesh(cp=2)), grouped(seq_len=12, kv_heads=4, dropout=0.2), 2),
    Verified("masks of gathered keys", GATHERED(Mesh(cp=2)), grouped(seq_len=12, kv_heads=4, dropout=0.2), 2),
    Verified("a ring without attention", Plan(Mesh(cp=2)), MLP(layers=2, hidden_size=16, seq_len=8), 2),
    Verified("gathered keys gathered again", GATHERED(Mesh(cp=2), recompute="full"), grouped(), 3),
    Verified("slices of sequences exchanged for heads", Plan(Mesh(cp=2), context="ulysses"), grouped(kv_heads=2), 2),
    Verified("halves and masks of exchanged heads", SP(Mesh(cp=2, tp=2), "zb-h1", context="ulysses"),
             GPT(layers=2, hidden_size=16, heads=4, seq_len=16, vocab_size=40, dropout=0.2), 2),
    Verified("as few heads as neighbours exchange", Plan(Mesh(cp=4), ulysses_degree=2), grouped(heads=2), 2),
    Verified("neighbours' heads meet gathered keys, masked",
             SP(Mesh(cp=4, tp=2), context="all_gather", ulysses_degree=2),
             GPT(layers=2, hidden_size=16, heads=4, seq_len=16, vocab_size=40, dropout=0.2), 1),
    Verified("a tied Llama's neighbours exchange heads in a ring, recomputed",
             Plan(Mesh(cp=4), ulysses_degree=2, recompute="full"), llama(dropout=0.2, tied=True), 2),
    Verified("halves of heads exchanged in a ring", Plan(Mesh(cp=4), "zb-h1", ulysses_degree=2), NEMOTRON, 2),
    Verified("stripes of learned positions in a ring, masked", Plan(Mesh(cp=2), stripes=3),
             grouped(seq_len=12, dropout=0.2), 2),
    Verified("stripes of rotary positions, gathered", GATHERED(Mesh(cp=2), stripes=8), llama(), 2),
    Verified("stripes of heads", SP(Mesh(cp=2, tp=2), "zb-h1", stripes=4), grouped(), 2),
    Verified("stripes of neighbours that exchange heads", Plan(Mesh(cp=4), ulysses_degree=2, stripes=2),
             llama(tied=True), 1),
    Verified("states cut over cp", GATHERED(Mesh(cp=4), shard_optimizer=("cp",)), grouped(), 1),
    Verified("everything cut over dp and cp",
             everywhere(Plan(Mesh(cp=2, dp_shard=2), reshard_after="stage"), SEQUENCE), grouped(), 4),
    Verified("replicas of slices of a sequence", GATHERED(Mesh(cp=2, dp_replicate=2)), grouped(), 2),
    Verified("chunks cut over cp", everywhere(GATHERED(Mesh(pp=2, cp=2), "interleaved-1f1b", reshard_after="stage"),
             ("cp",)), grouped(), 3),
    Verified("rotary positions of slices of a sequence", Plan(Mesh(cp=2)), llama(), 2),
    Verified("a tied Llama, recomputed", GATHERED(Mesh(cp=2), recompute="full"), llama(dropout=0.2, tied=True), 2),
    Verified("halves of a ring", Plan(Mesh(cp=2, pp=2), "zb-h1"), NEMOTRON, 2),
    Verified("heads in a ring", Plan(Mesh(cp=2, tp=2)), DROPS, 2),
    Verified("heads of gathered keys", SP(Mesh(cp=2, tp=2), context="all_gather"), DROPS, 2),
    Verified("heads in a ring, recomputed", SP(Mesh(cp=2, tp=2), recompute="full"), DROPS, 2),
    Verified("heads of rotary positions in a ring, tied", SP(Mesh(cp=2, tp=2), recompute="full"),
             llama(dropout=0.2, tied=True), 2),
    Verified("cp, tp and dp", everywhere(Plan(Mesh(cp=2, tp=2, dp_shard=2)), SEQUENCE), grouped(), 4),
    Verified("pp, cp and tp", SP(Mesh(pp=2, cp=2, tp=2), "zb-h1", recompute="full"), grouped(), 2),
]  # fmt: skip

EXPERTS = [
    Verified("a mixture cut into layers on one rank", Plan(), DROPLESS, 2),
    Verified("tokens that no expert has room for", Plan(Mesh(ep=2)), DROPPING, 4),
    Verified(
        "all but experts reduced at each microbatch", Plan(Mesh(ep=2), reduce_every_microbatch=("ep",)), SWITCH, 4
    ),
    Verified("experts recomputed", Plan(Mesh(ep=2), recompute="full"), DROPPING, 4),
    Verified("an expert a rank", Plan(Mesh(ep=4)), DROPPING, 8),
    Verified("experts sharded", replace(FSDP, mesh=Mesh(dp_shard=2, ep=2)), DROPPING, 8),
    Verified("states of experts sharded", Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD), DROPLESS, 8),
    Verified("replicas of experts", Plan(Mesh(dp_replicate=2, ep=2)), DROPPING, 8),
    Verified("a Mixtral's experts", Plan(Mesh(ep=2)), mixtral(), 4),
    Verified("hidden features of all experts", Plan(Mesh(tp=2)), DROPPING, 2),
    Verified(
        "hidden features of each rank's experts, recomputed", Plan(Mesh(ep=2, tp=2), recompute="full"), DROPPING, 4
    ),
    Verified("gates of a Mixtral cut twice", Plan(Mesh(ep=2, tp=2)), mixtral(), 4),
    Verified("attention of a mixture computed again", Plan(Mesh(ep=2), recompute="selective"), DROPPING, 4),
    Verified("pp, ep and tp", Plan(Mesh(pp=2, ep=2, tp=2), "zb-v"), moe(layers=4), 4),
    Verified("experts shared among the ranks of a ring", Plan(Mesh(cp=2)), DROPPING, 2),
    Verified("experts dealt over cp and ep", GATHERED(Mesh(cp=2, ep=2), shard_optimizer=()), DROPPING, 4),
    Verified(
        "exchanged heads before shared experts",
        Plan(Mesh(cp=2, ep=2), context="ulysses", recompute="full"),
        mixtral(),
        4,
    ),
    Verified("whole sequences for the router, slices for the rest", SP(Mesh(tp=2)), DROPPING, 2),
    Verified("halves of a router of whole sequences", SP(Mesh(pp=2, ep=2, tp=2), "zb-h1"), DROPPING, 4),
    Verified("ep, cp and tp", SP(Mesh(ep=2, cp=2, tp=2), recompute=(1,)), moe(seq_len=16, capacity_factor=0.7), 4),
    Verified("experts that every token is sent to", Plan(Mesh(ep=2)), moe(shared_experts=2, dropout=0.2), 4),
    Verified("shared experts beside slices of others", SP(Mesh(ep=2, tp=2)), mixtral(shared_experts=1), 4),
    Verified(
        "shared experts of slices of sequences, in halves",
        Plan(Mesh(ep=2, cp=2), "zb-h1"),
        mixtral(shared_experts=2),
        4,
    ),
    Verified(
        "shared experts of whole tokens beside slices of others",
        Plan(Mesh(tp=2), recompute="full"),
        moe(shared_experts=1, dropout=0.1),
        2,
    ),
    Verified("experts' results go home as terms", f"{CHECK}/term_programs.py:terms_exchanged", moe(layers=2), 4, 4),
    Verified("a dropless Mixtral on stages", Plan(Mesh(pp=2, ep=2)), mixtral(capacity_factor=None), 4),
]

REWRITTEN = [
    Verified("large products after all passes", replace(FSDP, passes="all"), wide(layers=4), 4),
    Verified("shards of four ranks in buckets", replace(SHARDINGS["partial"], passes="bucket=2,defer=2"), USERS, 4),
    Verified("all passes on stages of shards", everywhere(Plan(Mesh(pp=2, dp_shard=2), passes="all"), SHARD), USERS, 4),
    Verified("a tied weight gathered ahead in buckets", replace(FSDP, passes="prefetch=2,bucket=1"), TIED, 6),
    Verified("experts after all passes", Plan(Mesh(ep=2), passes="all"), DROPPING, 4),
]  # fmt: skip

TIES = [
    Verified("both uses of a tied weight on one rank", Plan(), TIED, 3),
    Verified("a tied weight reduced over replicas", Plan(Mesh(dp_shard=2)), TIED, 6),
    Verified("a tied weight gathered once for both uses", replace(FSDP, reshard_after="step"), TIED, 6),
    Verified("slices of a tied weight", Plan(Mesh(tp=2)), TIED, 3),
    Verified("uses on the first and the last stage", Plan(Mesh(pp=2)), TIED, 3),
    Verified("halves of both uses", Plan(Mesh(pp=2), "zb-h1"), TIED, 3),
    Verified("both uses on one rank of a vee, recomputed", Plan(Mesh(pp=2), "zb-v", recompute="full"), TIED, 1),
    Verified("stages between the uses", Plan(Mesh(pp=4)), TIED, 3),
    Verified("both uses of a sharded weight", replace(FSDP, mesh=Mesh(pp=2, dp_shard=2)), TIED, 6),
    Verified("both uses of a scattered gradient",
             Plan(Mesh(pp=2, dp_shard=2), "zb-v", shard_gradients=SHARD, shard_optimizer=SHARD), TIED, 6),
    Verified("both uses of slices on stages", SP(Mesh(pp=2, tp=2), "zb-h1"), TIED, 3),
    Verified("a tied weight in a ring with heads", Plan(Mesh(cp=2, tp=2), recompute="full"), grouped(tied=True), 2),
    Verified("a tied weight of a vee, attention recomputed", Plan(Mesh(pp=2), "zb-v", recompute="selective"),
             grouped(tied=True, layers=4), 2),
]  # fmt: skip


def sharded_pipelines() -> Iterator[Case]:
    """Of the table of `verify --all`: every sharding, and every schedule with three microbatches a rank, which makes
    its stages uneven, and every other one with four, or with two.

    Each schedule meets two shardings of two ranks, so that these come round; those of four ranks have no pipeline.
    """
    cases = {
        (case.row, case.column, case.microbatches // case.strategy.data_ranks): case
        for case in CASES
        if isinstance(case.strategy, Plan)
    }
    two, four = ([name for name, plan in SHARDINGS.items() if plan.mesh.world == count] for count in (2, 4))
    for i, row in enumerate(PIPELINES):
        for microbatches in (3, 2 if i % 2 else 4):
            yield cases[row, two[(3 * i + microbatches) % len(two)], microbatches]
    for i, column in enumerate(four):
        yield cases[NO_PIPELINE, column, 2 + i % 3]
    yield cases["zb-v", "hsdp", 3]


def verified(case: Case, shows: str) -> Verified:
    """A case of the table of `verify --all`."""
    job = case.job()
    return Verified(shows, job.strategy, job.model, job.microbatches, job.ranks)


BY_THEIR_NAMES = [verified(case, f"{case.row} by its name") for case in CASES if case.column == ALONE]
PAIRS = [
    verified(case, f"{case.column} on {case.row}, {case.microbatches} microbatches") for case in sharded_pipelines()
]
BY_HAND_AND_PLANS = [*BY_NAME, *PROGRAMS, *DATA, *TENSOR, *CONTEXT, *EXPERTS, *TIES]

TABLE = [*BY_THEIR_NAMES, *PAIRS, *SCHEDULES_OF_ONES_OWN, *REWRITTEN, *BY_HAND_AND_PLANS]
"""One line for each thing that only a run on processes shows. What a case shows beside, no other case need show."""

ALONE_OF_THEIR_KIND = {
    "all but experts reduced at each microbatch",
    "slices of a vocabulary, padded",
    "stripes of rotary positions, gathered",
    "attention of a mixture computed again",
}
"""What the suite trains in no other case: gradients reduced at each microbatch, a padded vocabulary in slices, gathered
keys, stripes, and exchanged experts with recomputation."""

SAMPLE = [
    *BY_THEIR_NAMES,
    PAIRS[0],
    *PAIRS[1::8],
    *SCHEDULES_OF_ONES_OWN[::3],
    *REWRITTEN[::3],
    *BY_HAND_AND_PLANS[::16],
    *(case for case in BY_HAND_AND_PLANS if case.shows in ALONE_OF_THEIR_KIND),
]
"""What the suite runs; `make verify-all` runs the whole table. Of the pairs, the first one alone has wide layers."""
