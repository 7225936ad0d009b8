"""A conversation is written down as the model's folder says, or plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.train.data.chat import chat_template
from shardlab.train.data.tokenizers import ByteTokenizer, Characters, HuggingFace
from tests.support.tokenizer_files import byte_fallback, of_transformers

TALK = [
    {"role": "user", "content": "Who art thou?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "Stand."},
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% generation %}{{ message['content'] | trim }}{% endgeneration %}{{ '<|im_end|>\\n' }}{% endfor %}\n"
    "{%- if tools is not none or documents is not none %}{{ raise_exception('no tools here') }}{% endif %}"
    "{%- if tools is defined %}{{ {'é': 1} | tojson(indent=1) }}{% endif %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WRITTEN = (
    "<s><|im_start|>user\nWho art thou?<|im_end|>\n<|im_start|>assistant\nA friend.<|im_end|>\n"
    '<|im_start|>user\nStand.<|im_end|>\n{\n "é": 1\n}<|im_start|>assistant\n'
)


def config(folder: Path, **fields: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, **fields}))
    return folder


def test_without_a_template_the_sides_have_names(tmp_path: Path) -> None:
    template = chat_template(tmp_path, ByteTokenizer())
    assert template.render(TALK) == "User: Who art thou?\nAssistant: A friend.\nUser: Stand.\nAssistant:"
    assert (template.stop, template.ends) == ("\nUser:", frozenset())


def test_a_vocabulary_without_the_plain_template_s_characters_is_refused_before_anyone_types(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the plain one.*':'.*give --prompt TEXT"):
        chat_template(tmp_path, Characters.from_texts(["User Assistant \n"]))


@pytest.mark.parametrize("form", ["config", "named", "file"])
def test_a_folder_s_template_is_followed_wherever_it_stands(tmp_path: Path, form: str) -> None:
    if form == "config":
        config(tmp_path, chat_template=CHATML)
    elif form == "named":
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
        config(tmp_path, chat_template=named)
    else:
        config(tmp_path, chat_template="no")
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    template = chat_template(tmp_path, ByteTokenizer())
    assert (template.render(TALK), template.stop) == (WRITTEN, "")


def test_it_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    written = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer = HuggingFace.train([WRITTEN], 270)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.files()["tokenizer.json"])
    config(tmp_path, chat_template=written)
    fast = of_transformers("PreTrainedTokenizerFast")
    theirs = fast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>")
    theirs.chat_template = written
    shown = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert chat_template(tmp_path, tokenizer).render(TALK) == shown


@pytest.mark.parametrize("place", ["checkpoints/step-000004", "ema.safetensors"])
def test_a_run_s_template_is_followed_for_its_checkpoints(tmp_path: Path, place: str) -> None:
    config(tmp_path, chat_template=CHATML)
    assert chat_template(tmp_path / place, ByteTokenizer()).render(TALK) == WRITTEN


def test_special_tokens_of_an_older_folder_stand_in_a_map(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert chat_template(tmp_path, ByteTokenizer()).render(TALK) == WRITTEN


def test_the_plain_template_begins_as_every_text_does(tmp_path: Path) -> None:
    tokenizer = HuggingFace(byte_fallback(["is"], bos=True).to_str().encode())
    assert chat_template(tmp_path, tokenizer).begin == tokenizer.begin == (1,)
    config(tmp_path, chat_template=CHATML)
    assert chat_template(tmp_path, tokenizer).begin == ()


def test_an_answer_ends_with_any_token_that_the_folder_calls_an_end(tmp_path: Path) -> None:
    tokenizer = HuggingFace.train([WRITTEN], 270)
    config(tmp_path, eos_token="a")
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    (a,) = tokenizer.encode_spelled("a")
    assert tokenizer.end is not None
    assert chat_template(tmp_path, tokenizer).ends == {tokenizer.end, 7, 8, 9, a}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "cannot be rendered"),
        ("{{ raise_exception('turns must alternate') }}", r"cannot be rendered \(turns must alternate\); correct it"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
    ],
)
def test_a_template_that_cannot_be_followed_is_one_sentence(tmp_path: Path, template: str, said: str) -> None:
    config(tmp_path, chat_template=template)
    with pytest.raises(UserError, match=said):
        chat_template(tmp_path, ByteTokenizer()).render(TALK)
