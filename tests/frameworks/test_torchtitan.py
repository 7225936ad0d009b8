"""torchtitan's files and command lines."""

from __future__ import annotations

import pytest

from shardlab.common.errors import UserError
from shardlab.frameworks import torchtitan
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import Config, Setting, key_table
from shardlab.simulate.hardware import find_cluster

BASE = '[model]\nname = "llama3"\nflavor = "8B"\n'


def config_of(text: str) -> Config:
    return Config(key_table(torchtitan.NAME), "train.toml", tuple(torchtitan.read_toml(BASE + text, "train.toml")))


def step_of(text: str, cluster: str = "h100x64") -> FrameworkRun:
    return torchtitan.run(config_of(text), find_cluster(cluster))


def test_a_file_of_2024_and_one_of_2025_mean_the_same() -> None:
    old = step_of(
        "[training]\nbatch_size = 2\nseq_len = 8192\ntensor_parallel_degree = 4\ndata_parallel_shard_degree = -1\n"
        "compile = true\n[experimental]\ncontext_parallel_degree = 2\n"
    )
    new = step_of(
        "[training]\nlocal_batch_size = 2\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 4\n"
        "context_parallel_degree = 2\n[compile]\nenable = true\n"
    )
    assert (old.plan, old.model, old.micro_batch_size, old.microbatches) == (
        *(new.plan, new.model, new.micro_batch_size, new.microbatches),
    )
    assert old.recipe.changed_switches == {"attention": "flash2", "loss": "float32"}
    assert new.recipe.changed_switches == {"attention": "flash2", "loss": "compiled"}
    assert old.config.version == "2024 (training.batch_size)"
    assert new.config.version == "2025 or early 2026 (training.local_batch_size)"


def test_the_sharding_ranks_are_those_that_the_other_axes_leave() -> None:
    mesh = step_of("[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_replicate_degree = 2\n").plan.mesh
    assert (mesh.tp, mesh.dp_replicate, mesh.dp_shard) == (8, 2, 4)


def test_a_wrong_number_of_ranks_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"data_parallel_shard_degree is 16.*--cluster of 128 devices"):
        step_of("[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_shard_degree = 16\n")
    with pytest.raises(UserError, match="tp 3, pp 1"):
        step_of("[parallelism]\ntensor_parallel_degree = 3\n")


def test_selective_recomputation_is_of_every_second_block_or_per_op() -> None:
    assert step_of("").plan.recompute == tuple(range(1, 32, 2))
    per_op = step_of('[activation_checkpoint]\nselective_ac_option = "op"\n')
    assert per_op.plan.recompute == "per-op"
    with pytest.raises(UserError, match="give op or a whole number"):
        step_of('[activation_checkpoint]\nselective_ac_option = "\\u00b2"\n')


def test_a_pipeline_has_fewer_blocks_at_its_ends() -> None:
    step = step_of(
        "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n'
    )
    assert step.plan.schedule == "interleaved-1f1b"
    assert step.plan.layers_per_stage == (8, 9, 8, 7)
    assert (step.micro_batch_size, step.microbatches) == (1, 8 * 32)


def test_a_command_line_of_2026_starts_from_the_registry() -> None:
    settings, selected = torchtitan.read_arguments(
        [Setting("--module", "llama3"), Setting("--config", "llama3_8b"), Setting("--compile.enable", True)]
    )
    registry = torchtitan.registry_settings(selected["module"], selected["config"])
    step = torchtitan.run(Config(key_table(torchtitan.NAME), "", (*registry, *settings)), find_cluster("h100x8"))
    assert (step.model.seq_len, step.micro_batch_size, step.microbatches) == (8192, 1, 8)
    assert step.plan.recompute == "per-op"


def test_keys_have_lines_and_unknown_ones_are_named() -> None:
    config = config_of("[training]\nseq_len = 4096\nspeed = 9\n[checkpoint]\ninterval = 1\n")
    assert config.unknown == [Setting("training.speed", 9, 6)]
    assert config.by_meaning["seq_len"].line == 5
    assert [option.setting.key for option in config.ignored] == ["checkpoint.interval"]


def test_a_value_of_another_type_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"line 5: training\.seq_len is 'long'; give a whole number"):
        step_of('[training]\nseq_len = "long"\n')


def test_no_toml_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="is no TOML"):
        torchtitan.read_toml("[training\nx", "train.toml")


def test_an_unknown_flavor_names_those_that_are_known() -> None:
    with pytest.raises(UserError, match="llama3/405B"):
        torchtitan.run(config_of("").with_meanings({"model_flavor": "9B"}), find_cluster("h100x8"))
    with pytest.raises(
        UserError, match="model deepseek_v2, flavor 16B, are not known here; give --model, or one of deep"
    ):
        torchtitan.run(
            config_of("").with_meanings({"model_name": "deepseek_v2", "model_flavor": "16B"}), find_cluster("h100x8")
        )


def test_every_known_model_is_made() -> None:
    names = key_table(torchtitan.NAME).data["models"]
    for name in names:
        family, flavor = name.split("/")
        changed = config_of("").with_meanings({"model_name": family, "model_flavor": flavor, "seq_len": 2048})
        assert torchtitan.run(changed, find_cluster("h100x64")).model.parameter_count > 0


def test_every_change_is_written_in_the_files_own_key() -> None:
    config = config_of("[training]\nbatch_size = 4\nseq_len = 8192\n")
    step = torchtitan.run(config, find_cluster("h100x64"))
    changed = [
        config.edit(meaning, value) for change in torchtitan.changes(config, step) for meaning, value in change.items()
    ]
    assert Setting("training.batch_size", 2, 5) in changed
    assert all(config.table.find(setting.key) for setting in changed)
