"""Frameworks' names for recomputation of parts of a block.

Programs recompute whole blocks, or only attention's scores. Frameworks can also recompute other parts of a block. Such
recomputation can be predicted (`shardlab.models.recomputation`), but not executed:

- `PER_OP` recomputes everything except attention's result and every second matrix product, which are kept
  (torchtitan's selective activation checkpointing, torchtitan/distributed/activation_checkpoint.py at b5bcd76c).
- `MODULES`, joined by +, recompute the named modules (Megatron-LM's --recompute-modules,
  megatron/core/transformer/transformer_config.py at d98e8a64).
- `POLICIES` recompute everything except the results listed for the policy (MaxText's remat_policy,
  src/maxtext/layers/nnx_decoders.py, get_remat_policy, at e591f30c).
"""

from __future__ import annotations

from collections.abc import Mapping

PER_OP = "per-op"

MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts")
"""Modules that Megatron-LM can recompute, in Shardlab's order. Modules of models that Shardlab does not have are left
out."""

_DOTS = frozenset({"qkv_proj", "out_proj"})

POLICIES: Mapping[str, frozenset[str]] = {
    "minimal": _DOTS | {"mlpwi", "mlpwo"},
    "minimal_with_context": _DOTS | {"mlpwi", "mlpwo", "context"},
    "save_dot_with_context_except_mlp": _DOTS | {"context"},
    "save_dot_except_mlpwi": _DOTS | {"mlpwo"},
    "save_dot_except_mlp": _DOTS,
    "save_qkv_proj": frozenset({"qkv_proj"}),
    "save_out_proj": frozenset({"out_proj"}),
}
"""Results that each of MaxText's policies keeps, by MaxText's names: the queries, keys and values that attention reads
(`qkv_proj`), attention's result (`context`), its output projection (`out_proj`), and the first and the last product of
the feed-forward (`mlpwi`, `mlpwo`)."""


def modules_of(recompute: object) -> tuple[str, ...]:
    """Return the modules in a name such as `layernorm+moe_act` (empty: the name is not a list of modules).

    >>> modules_of("layernorm+moe_act"), modules_of("full")
    (('layernorm', 'moe_act'), ())
    """
    names = tuple(recompute.split("+")) if isinstance(recompute, str) else ()
    return names if set(names) <= set(MODULES) and len(set(names)) == len(names) else ()


def is_inside_blocks(recompute: object) -> bool:
    """Return whether a recomputation has one of the names of this module."""
    return recompute == PER_OP or recompute in POLICIES or bool(modules_of(recompute))
