"""The frameworks of published runs: which kernels they run, what those keep, and what overlaps.

Every figure here belongs to a framework and its version, none to a run. Passes count how often a pointwise kernel of
ours goes through memory where the framework runs several, or in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlab.models.kept import Kept
from shardlab.simulate.framework import Framework
from shardlab.validate.rows import GIB

FUSED: Mapping[str, tuple[float, float]] = {
    "residual": (3.5 / 4, 2.5 / 6),  # bias, dropout with masks of a byte, and sum in one kernel
    "dropout": (2.5 / 3, 2.5 / 3),
    "layer_norm": (1.0, 4 / 3),
    "bias": (0.0, 0.5),  # in the kernel that follows
    "cross_entropy": (15.0, 5.0),  # in float32, step by step: 30 bytes a logit, then 20
}
"""Megatron-LM's fused kernels (Narayanan et al. 2021, arXiv 2104.04473, section 4.2); its loss is not."""

EAGER: Mapping[str, tuple[float, float]] = {
    "layer_norm": (1.0, 4 / 3),
    "rms_norm": (4.0, 14 / 3),  # x in float32, squared, its mean, scaled, cast
    "rotary": (3.0, 4.0),  # complex products in float32
    "swiglu": (5 / 3, 8 / 5),  # silu, then the product
    "cross_entropy": (15.0, 5.0),
}
"""PyTorch without a compiler: each operation a kernel, norms and loss in float32."""

COMPILED: Mapping[str, tuple[float, float]] = {"layer_norm": (1.0, 4 / 3), "cross_entropy": (8.0, 2.5)}

AUTOCAST = dict(EAGER) | {"layer_norm": (3.5, 4.0), "residual": (5 / 3, 5 / 3)}
"""torch.autocast keeps the residual stream and the norms in float32."""

TRANSFORMER_ENGINE: Mapping[str, tuple[float, float]] = {
    "residual": (3.5 / 3, 2.5 / 3),
    "layer_norm": (1.0, 4 / 3),
    "bias": (0.0, 0.5),
    "cross_entropy": (8.0, 2.5),
}

MEGATRON_KEPT = Kept(mask=1.0, branch=False, gathered=False)


@dataclass(frozen=True)
class Stack:
    """A framework as published runs used it.

    Attributes:
        framework: how it runs a step.
        vocabulary: of its recipes, where a run does not say: the tokenizer of GPT-2, which Megatron-LM's use.
        bias: whether its GPTs' products have biases.
        dropout: whether its recipes drop out, so that attention goes step by step.
        reduce_bytes: of an element of a gradient when it is reduced.
        wide_bfloat16_gradients: whether gradients of bfloat16 add up, and are reduced, in float32.
        reduces_at_end: whether gradients are reduced when all backward passes are over.
        shards_optimizer: whether the optimizer's state is cut whatever the run says.
        context_bytes: what a GPU holds beyond the allocator's memory, as nvidia-smi shows it (CUDA's context, NCCL).
        reserved: what the allocator reserves for each byte that is allocated at its peak, where there is room.
        streams: whether gathers and reductions allocate on streams of their own (see `shardlab.validate.beyond`).
        gradients_stand: whether gradients have a buffer that stands from one step to the next.
    """

    framework: Framework
    vocabulary: int = 50257
    bias: bool = True
    dropout: bool = False
    reduce_bytes: int = 2
    wide_bfloat16_gradients: bool = False
    reduces_at_end: bool = False
    shards_optimizer: bool = False
    context_bytes: float = 0.0
    reserved: float = 1.0
    streams: bool = False
    gradients_stand: bool = False

    def running(self, **choices: Any) -> Stack:
        """This stack with other choices of its framework, by their names (see `Framework`)."""
        return replace(self, framework=replace(self.framework, **choices))


MEGATRON_2021 = Stack(
    Framework(
        "megatron-2021",
        "Megatron-LM and Megatron-DeepSpeed before 2022: arXiv 2104.04473; blocking messages, nothing overlaps",
        passes=FUSED,
        kept=MEGATRON_KEPT,
        logit_bytes=14.0,
        blocking_p2p=1.0,
        scatters_messages=True,
        carries_sum=True,
        update_bytes=46.0,
    ),
    dropout=True,
    wide_bfloat16_gradients=True,  # megatron/arguments.py: --bf16 sets accumulate_allreduce_grads_in_fp32
    gradients_stand=True,
    reduces_at_end=True,
)


MEGATRON_2022 = MEGATRON_2021.running(
    name="megatron-2022",
    source="Korthikanti et al. 2022, arXiv 2205.05198, sections 4.2.2 and 6.2: in the backward pass communication "
    "runs beside the weight's product; gradients add up in its kernel: Megatron-LM, gradient_accumulation_fusion",
    fused_accumulation=True,
    hidden={"tp": 0.2},
)

ZERO_BUBBLE = replace(
    MEGATRON_2021.running(
        name="zero-bubble",
        source="Qi et al. 2023, arXiv 2401.10241: a Megatron-LM of 2023, messages beside compute",
        blocking_p2p=0.0,
        scatters_messages=False,
        fused_accumulation=True,
    ),
    vocabulary=32000,  # a SentencePiece model's: with it, and only with it, 14.6B and 28.3B have that many parameters
)

FOUNDRY = Stack(
    Framework(
        "llm-foundry",
        "mosaicml/llm-foundry on FSDP: eager kernels, attn_impl triton or flash of 2023; gathers beside compute",
        attention="flash1",
        passes=EAGER,
        kept=Kept(branch=False),
        logit_bytes=6.0,
        update_bytes=34.0,
        contention=0.3,
        fused_accumulation=True,
    ),
    bias=False,
)

TORCHTITAN_EAGER = Stack(
    Framework(
        "torchtitan-eager",
        "pytorch/torchtitan on FSDP2, without torch.compile: parameters move in bfloat16, gradients in float32",
        attention="flash2",
        passes=EAGER,
        kept=Kept(branch=False, activated=True, unread=True),
        logit_bytes=14.0,  # logits, and three float32 blocks of their size: copy, log-softmax, gradient
        sliced_logit_bytes=18.0,  # `loss_parallel` is made of single operations, so that there are four
        update_bytes=34.0,
        contention=0.3,
        fused_accumulation=True,
    ),
    reduce_bytes=4,
    reserved=1.04,
    streams=True,
)
TORCHTITAN = TORCHTITAN_EAGER.running(
    name="torchtitan",
    source="pytorch/torchtitan on FSDP2, with torch.compile but for the RMSNorm",
    passes=dict(COMPILED) | {"rms_norm": (1.0, 4 / 3)},
    kept=Kept(branch=False),
)

TORCHTITAN_2025 = TORCHTITAN.running(
    name="torchtitan-2025",
    source="pytorch/torchtitan of 2025, which compiles the loss as well, so that it makes no float32 copies",
    logit_bytes=4.0,
    sliced_logit_bytes=0.0,
)

MEGATRON_CORE = Stack(
    Framework(
        "megatron-core",
        "NVIDIA NeMo and Megatron-Core with Transformer Engine: cuDNN attention, fused kernels, distributed optimizer, "
        "tensor-parallel communication cut into chunks beside the products, messages and gradients overlapped",
        attention="cudnn",
        passes=TRANSFORMER_ENGINE,
        kept=MEGATRON_KEPT,
        logit_bytes=14.0,
        fused_accumulation=True,
        hidden={"tp": 0.7, "dp_shard": 0.9, "cp": 0.7},
        carries_sum=True,
        bucket=160e6,
        update_bytes=46.0,
    ),
    shards_optimizer=True,
    gradients_stand=True,
    reserved=1.01,
)

NANOGPT = Stack(
    Framework(
        "nanogpt",
        "karpathy/nanoGPT's model under torch.autocast and DDP, buckets of 25 MB",
        attention="flash2",
        passes=AUTOCAST,
        logit_bytes=16.0,
        update_bytes=34.0,
        bucket=25e6,
    ),
    bias=False,
    reduce_bytes=4,
)

DEEPSPEED = replace(
    MEGATRON_2021.running(
        name="deepspeed-2021",
        source="DeepSpeed's ZeRO-3 of 2021 (compared with in arXiv 2104.04473, section 5.2)",
        contention=0.3,
        one_card=True,
    ),
    shards_optimizer=True,
)

MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021.running(
        name="megatron-deepspeed-2022",
        source="Megatron-DeepSpeed with DeepSpeed's pipeline: all-reduces gradients also with ZeRO-1, then gathers "
        "parameters; leaves a node at the speed of one card (Smith et al. 2022, arXiv 2201.11990, section 2.4: of its "
        "step times the part that does not shrink with the number of microbatches is 6 s)",
        all_reduces=True,
        one_card=True,
        half_gradients=True,
    ),
    context_bytes=7 * GIB,
    reserved=1.24,
)

STACKS = (
    ("Korthikanti", MEGATRON_2022),
    ("Zero Bubble", ZERO_BUBBLE),
    ("SC21", MEGATRON_2021),
    ("Smith et al", MEGATRON_DEEPSPEED),
    ("bigscience", MEGATRON_DEEPSPEED),
    ("vTrain", MEGATRON_2021),
    ("llm-foundry", FOUNDRY),
    ("torchtitan benchmarks/asyncTP_llama3_h100_2025", TORCHTITAN_2025),
    ("llama3-8b_h200_2025", TORCHTITAN_2025),
    ("torchtitan", TORCHTITAN),
    ("Megatron-Core", MEGATRON_CORE),
    ("dgxc", MEGATRON_CORE),
    ("NeMo", MEGATRON_CORE),
    ("Llama 3 Herd", TORCHTITAN),
    ("wordplay", NANOGPT),
    ("nanoGPT", NANOGPT),
)
"""What a run's source says of its framework: the first name that stands in it."""
