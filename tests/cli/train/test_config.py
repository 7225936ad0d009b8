"""`shardlab train`'s configuration: presets, a file, flags and one dial, and which of them prevails."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardlab.cli import main
from shardlab.common.fields import field_types
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import GPT, MoE
from shardlab.strategies.plan.plan import Plan
from shardlab.train.config import SECTIONS, LoggingConfig, LoopConfig, StrategyConfig, TrainingConfig

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which nothing may be trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "shardlab.train.launch.ranks._start_local", Mock(side_effect=AssertionError("ranks were started"))
    )
    return tmp_path


def config_of(capsys: Captured, words: str) -> dict[str, Any]:
    """The configuration, which is printed also where a run is refused for want of the data that a preset is for."""
    main(["train", *words.split(), "--print-config", "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return json.loads(printed.out)


def test_flags_prevail_over_the_file_and_the_file_over_the_preset(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "mine.toml").write_text("[optimizer]\nlearning_rate = 1\nweight_decay = 0.2\n[model]\nheads = 2\n")
    config = config_of(capsys, "--preset shakespeare-cpu --config mine.toml --learning-rate 0.5 --no-bias")
    assert [config["optimizer"][name] for name in ("learning_rate", "weight_decay", "clip")] == [0.5, 0.2, 1.0]
    assert [config["model"][name] for name in ("heads", "hidden_size", "bias")] == [2, 128, False]
    assert config["train"] == {
        "steps": 2000, "microbatches": 2, "micro_batch_size": 6, "seed": 0, "init": None, "non_finite": "stop",
        "batch_ramp": None,
        "compile": False, "cuda_graph": False,
        "timeout": 600.0, "audit_every": None,
    }  # fmt: skip


def test_a_time_has_a_unit_or_is_in_seconds(elsewhere: Path, capsys: Captured) -> None:
    for words, seconds in {"90s": 90, "10m": 600, "1.5h": 5400, "7": 7}.items():
        assert config_of(capsys, f"--passes none --timeout {words}")["train"]["timeout"] == seconds
    for written in ('"2m"', "120"):
        (elsewhere / "mine.toml").write_text(f"[train]\ntimeout = {written}\n")
        assert config_of(capsys, "--passes none --config mine.toml")["train"]["timeout"] == 120


def test_without_words_it_is_as_ever(capsys: Captured) -> None:
    config = config_of(capsys, "")
    assert config["plan"] == {"strategy": "fsdp", "ranks": 4, "passes": "all"}
    assert config["train"] == {
        "steps": 200, "microbatches": 4, "micro_batch_size": 4, "seed": 0, "init": None, "non_finite": "stop",
        "batch_ramp": None,
        "compile": False, "cuda_graph": False,
        "timeout": 600.0, "audit_every": None,
    }  # fmt: skip
    assert config["optimizer"] == {
        "optimizer": "adamw", "momentum": 0.95,
        "learning_rate": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": None,
        "learning_rate_schedule": "cosine", "schedule_steps": 200, "warmup_steps": 10, "decay_steps": 190,
        "min_learning_rate_ratio": 0.1, "ema": None,
    }  # fmt: skip
    assert config["parameters"]["parameters"] == 236_928


def test_wordplay_has_the_parameters_of_its_model(capsys: Captured) -> None:
    assert config_of(capsys, "--preset wordplay")["parameters"] == {
        "parameters": 85_790_208,
        "decayed": 85_771_008,
        "decayed_tensors": 50,
        "not_decayed": 19_200,
        "not_decayed_tensors": 25,
        "without_positions": 85_003_776,
    }
    assert main(["train", "--preset", "wordplay", "--print-config"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "hidden_size 768 wordplay" in printed
    assert "nanoGPT's count 85,003,776 without position embeddings" in printed


def test_a_model_or_a_strategy_that_is_named_takes_nothing_from_earlier_ones(capsys: Captured) -> None:
    config = config_of(capsys, "--preset shakespeare-cpu --model llama --strategy ddp")
    assert (config["model"]["hidden_size"], config["model"]["vocab_size"]) == (64, 256)
    assert config["plan"] == {"strategy": "ddp", "ranks": 4, "passes": "all"}
    assert config_of(capsys, "--preset shakespeare-cpu --tp 2")["plan"]["mesh"] == {"tp": 2}


def test_the_norm_that_a_preset_clips_to_may_be_taken_back(capsys: Captured) -> None:
    assert config_of(capsys, "--preset wordplay --clip none")["optimizer"]["clip"] is None


def test_the_schedule_follows_the_steps_unless_it_is_given(capsys: Captured) -> None:
    optimizer = config_of(capsys, "--steps 1000 --learning-rate-schedule wsd --passes none")["optimizer"]
    assert [optimizer[f"{name}_steps"] for name in ("schedule", "warmup", "decay")] == [1000, 50, 100]
    optimizer = config_of(capsys, "--steps 10 --schedule-steps 1000 --warmup-steps 0 --passes none")["optimizer"]
    assert [optimizer[f"{name}_steps"] for name in ("schedule", "warmup", "decay")] == [1000, 0, 1000]


def test_one_dial_sets_sizes_batch_steps_and_learning_rate(capsys: Captured) -> None:
    config = config_of(
        capsys, "--depth 12 --model gpt --seq-len 1024 --vocab-size 50304 --microbatches 64 --passes none"
    )
    assert [config["model"][name] for name in ("layers", "hidden_size", "heads")] == [12, 768, 6]
    assert config["optimizer"]["learning_rate"] == 6e-4
    tokens = 20 * config["parameters"]["without_positions"]
    batch = 64 * config["train"]["micro_batch_size"] * 1024
    assert batch == 2**19  # nearest to 2**19 * (3.2e9 / 1.32e9) ** 0.383
    assert config["train"]["steps"] == config["optimizer"]["schedule_steps"] == -(-tokens // batch)
    small = config_of(capsys, "--depth 2 --steps 7 --hidden-size 96 --passes none")
    assert [small["model"][name] for name in ("layers", "hidden_size", "heads")] == [2, 96, 1]
    assert (small["train"]["steps"], small["optimizer"]["learning_rate"]) == (7, 0.0017)


def test_a_batch_ramp_and_a_number_of_microbatches_prevail_over_each_other(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "mine.toml").write_text('[train]\nbatch_ramp = "0:2,5:8"')
    train = config_of(capsys, "--config mine.toml")["train"]
    assert (train["batch_ramp"], train["microbatches"]) == ("0:2,5:8", 8)
    train = config_of(capsys, "--config mine.toml --microbatches 3 --passes none")["train"]
    assert (train["batch_ramp"], train["microbatches"]) == (None, 3)
    train = config_of(capsys, "--config mine.toml --batch-ramp 0:1,7:4 --passes none")["train"]
    assert (train["batch_ramp"], train["microbatches"]) == ("0:1,7:4", 4)
    train = config_of(capsys, "--config mine.toml --batch-ramp none --passes none")["train"]
    assert (train["batch_ramp"], train["microbatches"]) == (None, 8)


def test_every_switch_that_a_file_turns_on_is_turned_off_by_a_flag(elsewhere: Path, capsys: Captured) -> None:
    switches = {
        section: [name for name, field in field_types(kind).items() if field.words is bool]
        for section, kind in {**SECTIONS, "plan": Plan}.items()
    }
    assert {"tensorboard", "wandb", "trace"} <= set(switches["logging"])
    assert switches["plan"] == ["sequence_parallel"]
    tables = {**switches, "plan": [*switches["plan"], "mesh"], "model": ["bias", "tied"]}
    lines = {name: "{ tp = 2 }" if name == "mesh" else "true" for names in tables.values() for name in names}
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {lines[name]}\n" for name in names) for section, names in tables.items()
    )
    (elsewhere / "mine.toml").write_text(text)
    flags = " ".join(f"--no-{name.replace('_', '-')}" for names in switches.values() for name in names)
    for words, value in (("", True), (f" {flags} --no-bias --untied", False)):
        config = config_of(capsys, "--config mine.toml" + words)
        names = [(section, name) for section, names in tables.items() for name in names if name != "mesh"]
        assert [config[section][name] for section, name in names] == [value] * len(names)
        assert config["plan"]["mesh"] == {"tp": 2}


def test_a_vocabulary_that_nobody_chooses_is_that_of_the_data(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "text.txt").write_text("".join(map(chr, range(0x100, 0x100 + 300))) * 4)
    assert main(["data", "prepare", "text.txt", "--tokenizer", "chars", "--out", "letters"]) == 0
    (elsewhere / "mine.toml").write_text("[model]\nvocab_size = 400\n")
    (elsewhere / "data.toml").write_text('[data]\ndata = ["letters"]\n')
    (elsewhere / "small.toml").write_text('model = "llama"\nvocab_size = 500\n')
    capsys.readouterr()
    for words, expected in (
        ("--data letters", 300),
        ("--config data.toml --model llama", 300),
        ("--data letters --depth 2", 300),
        ("--data letters --vocab-size 320", 320),
        ("--data letters --config mine.toml", 400),
        ("--data letters --model small.toml", 500),
        ("--data letters --model gpt2", 50257),
        ("--data letters --preset wordplay", 65),
        ("--data text.txt", 256),
        ("", 256),
    ):
        assert config_of(capsys, f"{words} --passes none")["model"]["vocab_size"] == expected, words
    main(["train", "--data", "letters", "--passes", "none", "--print-config"])
    assert re.search(r"vocab_size +300 +the data", capsys.readouterr().out)


def test_one_dial_counts_the_steps_of_a_batch_ramp(capsys: Captured) -> None:
    even = config_of(capsys, "--depth 1 --micro-batch-size 4 --microbatches 8")["train"]["steps"]
    ramped = config_of(capsys, "--depth 1 --micro-batch-size 4 --batch-ramp 0:4,100:8")["train"]["steps"]
    assert ramped == even + 50


def test_the_file_of_the_page_on_training_is_one(elsewhere: Path, capsys: Captured) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (text,) = [block for block in blocks if "[optimizer]" in block]
    (elsewhere / "page.toml").write_text(text)
    config = config_of(capsys, "--config page.toml --recompute full")
    assert (config["model"]["model"], config["model"]["layers"]) == ("llama", 2)
    assert (config["plan"]["mesh"], config["plan"]["recompute"]) == ({"pp": 2}, "full")


def test_a_strategy_in_a_file_is_changed_by_fields_beside_it(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "plan.toml").write_text("[plan]\nstrategy = 'zero-3'\nranks = 2\nreshard_after = 'step'\n")
    plan = config_of(capsys, "--config plan.toml")["plan"]
    assert (plan["name"], plan["mesh"], plan["reshard_after"]) == ("zero-3", {"dp_shard": 2}, "step")
    assert plan["shard_parameters"] == ["dp_shard"]


CONFIGS = [
    TrainingConfig(
        model=MoE(layers=2, hidden_size=32, heads=2, capacity_factor=None),
        plan=StrategyConfig("expert-parallel", 2, "expert-parallel", passes="prefetch=2"),
        train=LoopConfig(steps=7, seed=-3),
        optimizer=OptimizerConfig(learning_rate_schedule="constant", schedule_steps=7, warmup_steps=1, clip=0.5),
    ),
    TrainingConfig(
        model=GPT(layers=4, tied=True, bias=False),
        plan=StrategyConfig(Plan(passes="none"), 1, "plan"),
        optimizer=OptimizerConfig(warmup_steps=3, decay_steps=5, schedule_steps=100),
        logging=LoggingConfig(prompt='a "quoted"\n\ttext \x7f ü \U0001f600', trace=True),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_file_that_a_run_leaves_makes_the_same_configuration(
    config: TrainingConfig, elsewhere: Path, capsys: Captured
) -> None:
    (elsewhere / "config.toml").write_text(config.as_toml(), encoding="utf-8")
    printed_config = config_of(capsys, "--config config.toml")
    printed_config.pop("parameters")
    assert printed_config == json.loads(json.dumps(config.as_dict()))


def test_what_follows_from_the_steps_still_does_in_a_file_that_a_run_leaves(elsewhere: Path, capsys: Captured) -> None:
    config = TrainingConfig(model=GPT(), plan=StrategyConfig("ddp", 2, "ddp"))
    (elsewhere / "config.toml").write_text(config.as_toml())
    assert "# warmup_steps = 10 follows from steps\n" in config.as_toml()
    assert "warmup_steps" not in tomllib.loads(config.as_toml())["optimizer"]
    assert config_of(capsys, "--config config.toml --steps 400")["optimizer"]["warmup_steps"] == 20


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("", "--stepz 3", "there is no option --stepz; did you mean --steps?"),
        ("", "--preset wordpla", "there is no preset 'wordpla'; did you mean wordplay?"),
        ("", "--depth 4 --layers 3", "--depth and --layers both say how many layers the model has; give one of them"),
        ("", "--depth 4 --model llama3-8b", "--depth sets sizes, but llama3-8b has its own"),
        ("", "--bias --no-bias", "both --bias and --no-bias were given; give one of them"),
        ("", "--trace --no-trace", "both --trace and --no-trace were given; give one of them"),
        ("", "--tied --untied", "both --tied and --untied were given; give one of them"),
        ("", "--warmup-steps 300", "warmup_steps is 300, but the learning rate's schedule has 200 steps"),
        (
            "",
            "--optimizer sgd --betas 0.9 0.95",
            "--betas has no effect with --optimizer sgd; leave it out, or give --optimizer adamw, lion or muon\n",
        ),
        (
            "",
            "--momentum 0.95",
            "--momentum has no effect with --optimizer adamw; leave it out, or give --optimizer sgd",
        ),
        ("[optimizer]\noptimizer = 'lion'", "--eps 1e-6", "--eps has no effect with --optimizer lion; leave it out"),
        (
            "",
            "--learning-rate-schedule constant --min-learning-rate-ratio 0.1",
            "--min-learning-rate-ratio has no effect with --learning-rate-schedule constant; leave it out, or give",
        ),
        ("", "--clip much", "clip is 'much'; give a positive norm, or none at all"),
        (
            "",
            "--timeout soon",
            "timeout is 'soon'; give seconds, above 0, or a time, such as 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00",
        ),
        (
            "",
            "--timeout 0s",
            "timeout is 0.0; give seconds, above 0, or a time, such as 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00",
        ),
        ("", "--config gone.toml", "gone.toml cannot be read: No such file or directory"),
        (
            "",
            "--preset wordplay",
            "the source of Python's standard library: tokens go up to 2",
        ),
        ("[optimiser]", "", "mine.toml: a configuration has no 'optimiser'; did you mean optimizer?"),
        ("[train]\nstep = 3", "", "mine.toml: train has no 'step'; did you mean steps?"),
        ("[plan]\nmash = {}", "", "mine.toml: plan has no 'mash'; did you mean mesh?"),
        ("[model]\nhead = 3", "", "gpt: a model of this kind (GPT) has no head; did you mean heads?"),
        ("[model]\nheads = '3'", "", "gpt: heads is '3'; give a whole number"),
        ("train = 3", "", "mine.toml: train is 3; give a table"),
        ("[train]\nsteps = 0", "", "mine.toml: train.steps is 0; give 1 or more"),
        ("[train]\nsteps = true", "", "mine.toml: train.steps is True; give a whole number"),
        ("[data]\ndata = 3", "", "mine.toml: data.data is 3; give a list of texts"),
        ("[precision]\nprecision = 'bf1'", "", "mine.toml: precision.precision is 'bf1'; give one of fp32, tf32, bf16"),
        ("[plan]\nstrategy = 'ddp'\nschedule = '1f1b'", "", "ddp is a program of its own, which fields of a plan do"),
        ("[plan]\nmesh = { tp = 2 }", "--ranks 4", "the plan's mesh tp 2 does not fit on 4 ranks"),
        ("[[", "", "mine.toml is not TOML"),
        ("", "--batch-ramp 1:4", "batch_ramp is '1:4'; give ascending steps from 0 on, each with its number"),
        ("", "--batch-ramp 0:4,8:8,8:4", "batch_ramp is '0:4,8:8,8:4'; give ascending steps from 0 on"),
        ("", "--batch-ramp 0:4,8:0", "batch_ramp is '0:4,8:0'; give ascending steps from 0 on"),
        ("[train]\nbatch_ramp = 4", "", "mine.toml: train.batch_ramp is 4; give ascending steps from 0 on"),
        ("", "--batch-ramp 0:2,8:4 --microbatches 8", "microbatches is 8, but the batch ramp 0:2,8:4 ends with 4"),
        ("", "--batch-ramp 0:8,9:2 --ranks 4 --strategy fsdp", "2 microbatches do not divide among 4 ranks; give"),
        ("", "--batch-ramp 0:3,9:4 --pp 2 --dp-shard 2", "3 microbatches do not divide among 2 data-parallel ranks"),
        ("", "--batch-ramp 0:4,9:8 --trace", "--trace covers steps 0 to 14, but the batch ramp 0:4,9:8"),
        ("", "--batch-ramp 0:4,9:8 --profile-steps 8:10", "--profile-steps covers steps 8 to 9, but the"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(
    text: str, words: str, sentence: str, elsewhere: Path, capsys: Captured
) -> None:
    if text:
        (elsewhere / "mine.toml").write_text(text)
        words += " --config mine.toml"
    before = sorted(elsewhere.iterdir())
    assert main(["train", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"shardlab: {sentence}"), printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert sorted(elsewhere.iterdir()) == before


def test_a_file_may_set_what_the_optimizer_or_the_schedule_does_not_use(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "mine.toml").write_text("[optimizer]\nbetas = [0.8, 0.9]\neps = 1e-6\nmin_learning_rate_ratio = 0.2\n")
    words = "--config mine.toml --passes none --optimizer sgd --momentum 0.8 --learning-rate-schedule constant"
    optimizer = config_of(capsys, words)["optimizer"]
    assert [optimizer[name] for name in ("betas", "eps", "momentum")] == [[0.8, 0.9], 1e-6, 0.8]


def test_passes_stand_in_the_plan_whether_it_is_one_or_a_program(elsewhere: Path, capsys: Captured) -> None:
    """A saved configuration has them, and the flag prevails over it."""
    for words in ("--strategy fsdp", "--strategy zero-3", "--pp 2", ""):
        plan = config_of(capsys, f"{words} --passes defer,prefetch")["plan"]
        assert plan["passes"] == "defer,prefetch"
        assert (plan.get("strategy") == "fsdp") == (words in ("--strategy fsdp", ""))
        assert main(["train", *words.split(), "--passes", "all", "--print-config"]) == 0
        assert " ".join(capsys.readouterr().out.split()).count("passes all flags") == 1
    for words in ("--strategy fsdp", "--pp 2"):  # where nobody says which
        assert main(["train", *words.split(), "--print-config"]) == 0
        assert " ".join(capsys.readouterr().out.split()).count("passes all rule") == 1
    for strategy in ("fsdp", "zero-3"):
        (elsewhere / "mine.toml").write_text(f'[plan]\nstrategy = "{strategy}"\nranks = 2\npasses = "all"\n')
        assert config_of(capsys, "--config mine.toml")["plan"]["passes"] == "all"
        assert config_of(capsys, "--config mine.toml --passes none")["plan"]["passes"] == "none"


def test_a_pass_that_there_is_not_is_refused_before_any_work(elsewhere: Path, capsys: Captured) -> None:
    (elsewhere / "mine.toml").write_text('[plan]\nstrategy = "fsdp"\npasses = "prefech"\n')
    for words in ("--config mine.toml", "--passes prefech", "--pp 2 --passes prefech"):
        assert main(["train", *words.split()]) == 2
        assert "there is no pass 'prefech'; did you mean prefetch?" in capsys.readouterr().err
