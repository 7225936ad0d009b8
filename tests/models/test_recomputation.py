"""Recomputation inside blocks: what is kept and what runs again, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.language import Mesh
from shardlab.language.recompute_names import MODULES, POLICIES, is_inside_blocks, modules_of
from shardlab.models import GPT, Llama, Model, cut_for
from shardlab.models.architectures import Mixtral
from shardlab.models.matrices import AUTOGRAD, kept_activations, kept_elements
from shardlab.models.primitives import Primitive
from shardlab.models.recomputation import recomputation

S, H, F, ROWS = 64, 128, 512, 3
"""Tokens, features, features inside the feed-forward part, and sequences of a microbatch."""

T = ROWS * S

LLAMA = Llama(layers=3, hidden_size=H, heads=4, kv_heads=2, ffn_hidden_size=F, seq_len=S)
LATENT = replace(LLAMA, kv_heads=None, head_dim=32, kv_rank=16, q_rank=24, rope_dim=8)
MIXTURE = Mixtral(
    layers=3, hidden_size=H, heads=4, ffn_hidden_size=F, seq_len=S, experts=4, top_k=2, capacity_factor=1.0,
    shared_experts=1,
)  # fmt: skip
BUFFERS = 2 * T
"""Tokens in the buffers of all experts."""


def block_of(model: Model) -> tuple[Primitive, ...]:
    return tuple(model.runs[at].all_steps[number].primitive for at, number in model.steps_of_blocks[1])


def recomputed_names(model: Model, word: str) -> list[str]:
    """Names of the primitives that run again."""
    block = block_of(model)
    numbers = sorted(recomputation(block, word).again)
    return [getattr(block[number], "name", type(block[number]).__name__) for number in numbers]


def elements(model: Model, word: str) -> int:
    """Elements kept of the second block, with what enters its layers; or of all layers, if the model is cut."""
    setting = replace(AUTOGRAD, branch=False, again=word)
    layers = [1] if model.layers == 3 else range(model.layers)
    entering = kept_activations(model, ROWS, setting, 1)
    return sum(kept_elements(model, layer, ROWS, setting, 2) + entering[layer] for layer in layers)


@pytest.mark.parametrize(
    ("model", "word", "difference"),
    [
        (LLAMA, "mlp", 3 * T * F),  # gates and ups, and what the activation function makes of them
        (LLAMA, "core_attn", T * 4),  # the sums of four heads' scores; queries, keys and values are the inputs
        (LLAMA, "layernorm", 0),  # which Transformer Engine computes inside the product
        (LLAMA, "moe", 0),
        (LATENT, "layernorm", T * (H + 1)),
        (LATENT, "mla_up_proj", T * 4 * (40 + 40 + 32)),  # 32 + 8 features of queries and keys, 32 of values
        (MIXTURE, "layernorm", T * (H + 1)),
        (MIXTURE, "moe_act", BUFFERS * F),
        (MIXTURE, "shared_experts", 3 * T * F),
        # buffers and results of the experts; probabilities, choices, gates and slots
        (MIXTURE, "moe", 3 * T * F + BUFFERS * (2 * H + 3 * F) + T * (4 + 2) + 2 * T * 2),
        (MIXTURE, "mlp", 0),
    ],
)
def test_a_module_keeps_its_inputs_and_not_what_it_makes_inside(model: Model, word: str, difference: int) -> None:
    assert elements(model, "") - elements(model, word) == difference


def test_modules_together_save_as_much_as_each() -> None:
    alone = sum(elements(MIXTURE, "") - elements(MIXTURE, word) for word in ("layernorm", "moe_act", "core_attn"))
    assert elements(MIXTURE, "") - elements(MIXTURE, "layernorm+moe_act+core_attn") == alone
    assert elements(MIXTURE, "moe+shared_experts") == elements(MIXTURE, "moe"), "which holds them"


def test_the_forward_pass_of_a_module_runs_again_as_a_whole() -> None:
    assert recomputed_names(LLAMA, "mlp") == ["mlp.c_fc", "Activate", "mlp.c_proj"]
    assert recomputed_names(LLAMA, "core_attn") == ["Attend"]
    assert recomputed_names(LATENT, "mla_up_proj+layernorm") == ["ln_1", "LatentProjection"]
    assert recomputed_names(MIXTURE, "moe_act") == ["ExpertActivate"]
    experts = ["Route", "Place", "Dispatch", "mlp.experts.c_fc", "ExpertActivate", "mlp.experts.c_proj", "Combine"]
    assert recomputed_names(MIXTURE, "moe") == ["mlp.shared.c_fc", "Activate", "mlp.shared.c_proj", *experts]


HEADS = 4 * 32 + 2 * 2 * 32
"""Features of queries, keys and values."""


@pytest.mark.parametrize(
    ("word", "kept_features", "computed"),
    [
        ("minimal", HEADS + H + 2 * F, ["ln_1", "Attend", "Add", "ln_2", "Activate"]),
        ("minimal_with_context", HEADS + 2 * H + 4 + 2 * F, ["ln_1", "Add", "ln_2", "Activate"]),
        ("save_dot_with_context_except_mlp", HEADS + 2 * H + 4, ["ln_1", "Add", "ln_2", "mlp.c_fc", "Activate"]),
        ("save_dot_except_mlpwi", HEADS + H, ["ln_1", "Attend", "Add", "ln_2", "mlp.c_fc", "Activate"]),
        ("save_dot_except_mlp", HEADS + H, ["ln_1", "Attend", "Add", "ln_2", "mlp.c_fc", "Activate"]),
        ("save_qkv_proj", HEADS, ["ln_1", "Attend", "attn.c_proj", "Add", "ln_2", "mlp.c_fc", "Activate"]),
        ("save_out_proj", H, ["ln_1", "Projection", "Attend", "Add", "ln_2", "mlp.c_fc", "Activate"]),
    ],
)
def test_a_policy_keeps_what_it_names_if_that_is_needed_and_computes_the_rest(
    word: str, kept_features: int, computed: list[str]
) -> None:
    """The feed-forward's last product is never needed: its result is added, and a sum has no need of its terms."""
    assert recomputed_names(LLAMA, word) == computed
    assert elements(LLAMA, word) == T * (kept_features + H), "with the block's input"


@pytest.mark.parametrize("word", [*POLICIES, "mlp", "core_attn", "layernorm", "mla_up_proj", "moe_act", "moe"])
@pytest.mark.parametrize(
    "model", [LLAMA, LATENT, replace(MIXTURE, shared_experts=0)], ids=["dense", "latent", "mixture"]
)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=2, cp=2)], ids=str)
def test_a_model_in_more_layers_keeps_and_computes_the_same(model: Llama, word: str, mesh: Mesh) -> None:
    """But for what passes between an attention that is an op and its neighbours, which programs keep in any case."""
    cut = cut_for(model, mesh, planned=True)
    assert recomputed_names(cut, word) == recomputed_names(cut_for(model, Mesh(tp=2), planned=True), word)
    difference, whole = (elements(cut, "") - elements(cut, word), 3 * (elements(model, "") - elements(model, word)))
    assert difference == pytest.approx(whole, abs=0 if mesh.cp == 1 else whole)


def test_words_of_predictions() -> None:
    assert modules_of("+".join(MODULES)) == MODULES
    assert modules_of("mlp+mlp") == modules_of("mlp+magic") == modules_of("") == modules_of((1, 2)) == ()
    assert all(map(is_inside_blocks, ["per-op", "minimal", "mlp+moe"]))
    assert not any(map(is_inside_blocks, ["none", "full", "selective", "first-2", (0, 1)]))


def test_dropout_of_scores_is_not_kept_if_attention_is_computed_again() -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, section 5: 5 a s^2 b bytes a layer, of which masks take one each."""
    model = GPT(layers=3, hidden_size=H, heads=4, seq_len=S, dropout=0.1)
    assert elements(model, "") - elements(model, "core_attn") >= 3 * ROWS * 4 * S * S
