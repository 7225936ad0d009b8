"""Models by name have the sizes that were published; files change them; what is unknown is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.language import UserError
from shardlab.models import GPT, Llama, Mixtral, find_model
from shardlab.models.named import ARCHITECTURES, sources

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}
"""Parameters in the checkpoints of openai-community, meta-llama, mistralai, Qwen and deepseek-ai on Hugging Face,
without a second copy of a tied embedding."""

ROUNDED = {
    "gpt3-small": 125e6,
    "gpt3-medium": 350e6,
    "gpt3-large": 760e6,
    "gpt3-xl": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13.0e9,
    "gpt3-175b": 175.0e9,
    "qwen2-57b-a14b": 57.4e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
}
"""Brown et al. 2020, arXiv 2005.14165, table 2.1; Qwen team 2024, arXiv 2407.10671, table 1 (without the gate of shared
experts); OpenAI 2025, arXiv 2508.10925, table 1."""

ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "qwen2-57b-a14b": 14e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "deepseek-moe-16b": 2.8e9,
    "deepseek-v2-lite": 2.66e9,
    "deepseek-v3": 37.5e9,
}
"""Parameters that compute a token: arXiv 2401.04088, section 2; 2407.10671, table 1; 2505.09388, section 1 and the
model card of Qwen3-30B-A3B; 2401.06066, table 7; 2405.04434, appendix B.1 (2.4B without one embedding); 2412.19437,
section 1 (37B)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_models_parameters_are_those_of_its_checkpoint(name: str) -> None:
    model = find_model(name)
    assert isinstance(model, GPT)
    # a weight of its own for each normalised head, instead of one for all queries and one for all keys
    surplus = model.qk_norm * model.layers * model.head_size * (model.heads + (model.kv_heads or model.heads) - 2)
    assert model.parameter_count - surplus == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_model_has_the_papers_rounded_count(name: str) -> None:
    assert find_model(name).parameter_count == pytest.approx(ROUNDED[name], rel=0.02)


def test_every_name_is_counted_and_cites_its_source() -> None:
    assert set(sources()) == set(PUBLISHED) | set(ROUNDED)
    assert all(len(source) > 20 for source in sources().values())


def test_an_architecture_alone_is_a_small_one() -> None:
    assert find_model("gpt") == GPT()
    assert {type(find_model(name)) for name in ARCHITECTURES} == set(ARCHITECTURES.values())
    assert all(find_model(name).parameter_count < 1e6 for name in ARCHITECTURES)


def test_names_are_found_in_any_case() -> None:
    assert find_model("Llama3-8B") == find_model("llama3-8b")
    assert isinstance(find_model("LLAMA"), Llama)


def test_half_of_a_llamas_layer_is_its_attention_and_norms() -> None:
    """arXiv 2407.21783, table 3: 8B has 32 layers of width 4096, 32 heads, 8 key/value heads and 14336 features."""
    model = find_model("llama3-8b")
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096
    assert model.layout(1).parameter_count == attention + 3 * 4096 * 14336 + 4096


@pytest.mark.parametrize("name", ACTIVE)
def test_a_mixture_uses_the_published_parameters_for_a_token(name: str) -> None:
    model = find_model(name)
    assert isinstance(model, Mixtral)
    layers = model.layers - model.dense_layers
    idle = (model.experts - model.top_k) * 3 * model.hidden_size * model.hidden * layers
    assert model.parameter_count - idle == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.toml"


def test_a_file_changes_a_model_by_name(file: Path) -> None:
    file.write_text('source = "mine"\nmodel = "llama3-8b"\nlayers = 4\nkv_heads = 4\nrope_theta = 10000\n')
    model = find_model(str(file))
    assert isinstance(model, Llama)
    assert (model.layers, model.hidden_size, model.kv_heads, model.rope_theta) == (4, 4096, 4, 10000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 4", 'does not say which model it changes; write, for example, model = "llama"'),
        ('model = "lama"', "there is no model 'lama'; did you mean llama?"),
        ('model = "gpt"\nlayer = 4', r"a model of this kind \(GPT\) has no layer; did you mean layers?"),
        ('model = "gpt"\nexperts = 4', r"a model of this kind \(GPT\) has no experts"),
        ('model = "gpt"\nlayers = "four"', "layers is 'four'; give a whole number"),
        ('model = "gpt"\nlayers = true', "layers is True; give a whole number"),
        ('model = "gpt"\ntied = 1', "tied is 1; give true or false"),
        ('model = "gpt"\nkv_heads = 1.5', "kv_heads is 1.5; give a whole number"),
        ('model = "gpt"\nrope_theta = "big"', "rope_theta is 'big'; give a number"),
        ('model = "gpt"\nnorm = 3', "norm is 3; give one of layer, rms"),
        ('model = "gpt"\nhidden_size = 30', "hidden_size 30 does not divide by 4 heads"),
        ("model =", "is not TOML"),
    ],
)
def test_a_file_that_describes_no_model_is_refused_by_name(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        find_model(str(file))
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama3-8b", "did you mean llama3-8b?"),
        ("gpt3-175", "did you mean gpt3-175b?"),
        ("zzz", "there are gpt, mlp, moe, llama, mixtral, gpt2"),
        ("nowhere.toml", "nowhere.toml cannot be read: No such file"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model(name)
