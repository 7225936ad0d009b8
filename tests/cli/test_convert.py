"""`shardlab convert`: a run's folder to Hugging Face's form and back, as a user sees it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from shardlab.cli import main
from shardlab.models import GPT, Llama, Mixtral
from shardlab.train.checkpoint.distributed import DistributedFiles
from shardlab.train.data.prepared_folder import find_tokenizer
from shardlab.train.data.tokenizers import Characters, HuggingFace
from tests.support.tokenizer_files import byte_level, of_transformers
from tests.train.huggingface.folders import random_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random_run(tmp_path / "run", GPT(layers=2, hidden_size=16, heads=2, seq_len=8))
    return tmp_path


def test_a_run_goes_out_and_back(folder: Path, capsys: Captured) -> None:
    assert main(["convert", "run", "hf"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model           gpt, 14,912 parameters in 29 tensors",
        "folder          hf",
        "files           config.json, model.safetensors",
    ]
    assert main(["convert", "hf", "back", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": "back",
        "form": "shardlab",
        "model": "gpt",
        "parameters": 14912,
        "tensors": 29,
        "files": ["run.json", "weights.safetensors"],
        "left_out": [],
    }
    assert main(["convert", "back", "again"]) == 0
    assert (folder / "hf" / "model.safetensors").read_bytes() == (folder / "again" / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_to_torchtitan_and_back(folder: Path, capsys: Captured) -> None:
    random_run(folder / "llama", Llama(layers=2, hidden_size=16, heads=2, seq_len=8), tokenizer=Characters("abc"))
    assert main(["convert", "llama", "dcp", "--to", "dcp"]) == 0
    said = capsys.readouterr().out
    assert ".metadata, __0_0.distcp, config.json" in said
    assert "left out" not in said
    (folder / "dcp" / "config.json").unlink()
    assert main(["convert", "dcp", "back"]) == 2
    assert "name it, as by shardlab convert --model llama3-8b" in capsys.readouterr().err
    flags = ["--model", "llama", "--layers", "2", "--hidden-size", "16", "--heads", "2", "--seq-len", "8"]
    assert main(["convert", "dcp", "back", *flags]) == 0
    ours, back = (load_file(folder / subfolder / "weights.safetensors") for subfolder in ("llama", "back"))
    assert ours.keys() == back.keys()
    assert all(ours[name].equal(back[name]) for name in ours)
    files = DistributedFiles(folder / "dcp")
    state = {name: files.read(name) for name in files.names} | {"optimizer": {"state.norm.weight.step": torch.ones(1)}}
    save(state, checkpoint_id=folder / "trained", no_dist=True)
    assert main(["convert", "trained", "weights", *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out optimizer: only weights are converted; --settings also converts the state of AdamW" in shown


def test_the_tokens_of_a_run_are_those_of_transformers(folder: Path, capsys: Captured) -> None:
    tokenizer = Characters.from_texts(["to be or not"])
    random_run(folder / "chars", GPT(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=9), tokenizer=tokenizer)
    assert main(["convert", "chars", "hf"]) == 0
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (folder / "hf").iterdir()}
    theirs = of_transformers("AutoTokenizer").from_pretrained(folder / "hf")
    assert theirs("not to be")["input_ids"] == tokenizer.encode([b"not to be"])[0].tolist()
    assert main(["sample", "hf", "--prompt", "to be", "--tokens", "3"]) == 0


def test_an_export_knows_which_token_ends_a_document_and_has_every_file_of_its_tokenizer(folder: Path) -> None:
    beside = {"added_tokens.json": b"{}", "chat_template.jinja": b"{{ messages }}", "special_tokens_map.json": b"{}"}
    tokenizer = HuggingFace(HuggingFace.train(["to be or not"], 260).files()["tokenizer.json"], companions=beside)
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=tokenizer.vocab_size)
    random_run(folder / "words", model, tokenizer=tokenizer)
    assert main(["convert", "words", "hf"]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / "hf" / name).read_text())["eos_token_id"] == tokenizer.end
    assert main(["convert", "hf", "back"]) == 0
    assert main(["convert", "back", "again"]) == 0
    for name, content in tokenizer.files().items():
        for subfolder in ("hf", "back", "again"):
            assert (folder / subfolder / name).read_bytes() == content


def test_the_end_that_only_a_model_s_configuration_names_survives_conversions(folder: Path) -> None:
    library_tokenizer = byte_level(["<a>", "<b>"], first=True)
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=258)
    random_run(folder / "words", model, tokenizer=HuggingFace(library_tokenizer.to_str().encode()))
    assert main(["convert", "words", "hf"]) == 0
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert config["eos_token_id"] is None
    (folder / "hf" / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    assert main(["convert", "hf", "back"]) == 0
    for name in ("hf", "back"):
        tokenizer = find_tokenizer(folder / name)
        assert tokenizer is not None
        assert tokenizer.end == 1


def test_flags_change_the_model(folder: Path, capsys: Captured) -> None:
    random_run(folder / "experts", Mixtral(layers=1, hidden_size=16, heads=2, seq_len=8))
    assert main(["convert", "experts", "hf"]) == 2
    assert "capacity_factor is 1.25, not None" in capsys.readouterr().err
    assert main(["convert", "experts", "hf", "--capacity-factor", "none"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "run"], "run exists; name a new folder, so that nothing is overwritten"),
        (["nowhere", "hf"], "nowhere does not exist; name the folder of a run, or one in Hugging Face's form"),
        (["run", "hf", "--heads", "3"], "hidden_size 16 does not divide by 3 heads"),
        (["run", "hf", "--layers", "3"], "run lacks 15 tensors of its model's 41: layers.2.attn.c_attn.bias"),
        (["run", "hf", "--shard-mb", "0"], "--shard-mb: 0 is too few; give 1 or more"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    folder: Path, capsys: Captured, arguments: list[str], said: str
) -> None:
    assert main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shardlab: ")
    assert said in err
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_a_training_takes_the_model_of_the_folder_that_it_begins_with(folder: Path, capsys: Captured) -> None:
    assert main(["convert", "run", "hf"]) == 0
    assert main(["train", "--init", "hf", "--seq-len", "4", "--strategy", "single", "--print-config", "--json"]) == 0
    written = capsys.readouterr().out
    config = json.loads(written[written.index("{") :])
    assert config["train"]["init"] == "hf"
    assert [config["model"][name] for name in ("model", "layers", "hidden_size", "seq_len")] == ["gpt", 2, 16, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--init", "nowhere"], "nowhere does not exist; name the folder of a run"),
        (["--init", "run", "--seq-len", "9"], "run has the weights of another model: seq_len is 8, less than 9"),
        (
            ["--init", "run", "--model", "llama", "--layers", "2", "--hidden-size", "16", "--heads", "2"],
            "run has the weights of another model: bias is True, not False; activation is 'gelu', not 'swiglu'",
        ),
    ],
)
def test_a_training_from_weights_of_another_model_is_refused(
    folder: Path, capsys: Captured, arguments: list[str], said: str
) -> None:
    assert main(["train", "--strategy", "single", *arguments, "--out", "new"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_settings_make_a_run_of_a_checkpoint_of_torchtitan(folder: Path, capsys: Captured) -> None:
    """docs/checkpoints.md runs the commands; here is what they refuse."""
    random_run(folder / "llama", Llama(layers=1, hidden_size=16, heads=2, seq_len=8))
    assert main(["convert", "llama", "again", "--settings", "llama"]) == 2
    assert "llama has no complete checkpoint; name the folder of a run" in capsys.readouterr().err
    (folder / "settings").mkdir()
    (folder / "settings" / "state.json").write_text("{}")
    (folder / "settings" / "config.toml").write_text("")
    assert main(["convert", "llama", "again", "--settings", "settings"]) == 2
    assert (
        "needs the state of an optimizer, which only checkpoints have; leave out --settings" in capsys.readouterr().err
    )
    assert main(["convert", "llama", "again", "--settings", "settings", "--to", "hf"]) == 2
    assert "--settings is for a run, and --to hf writes none" in capsys.readouterr().err
    assert not (folder / "again").exists()
