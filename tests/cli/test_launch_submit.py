"""`shardlab submit`: job scripts that a shell understands, and schedulers that take them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.train.history import WARNED
from tests.support.thorough import sampled

Captured = pytest.CaptureFixture[str]

TRAIN = "-- train --strategy ddp --steps 10"


def printed(words: str, capsys: Captured) -> str:
    assert main(["submit", "--dry-run", *words.split()]) == 0
    return capsys.readouterr().out


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that come before all others; nothing knows a scheduler but they."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_slurm_job_is_warned_before_its_end_requeued_and_resumed(capsys: Captured) -> None:
    asked = (
        "--scheduler slurm --nodes 2 --ranks-per-node 4 --cpus-per-rank 8 --time 2:00:00 --partition big --account me"
    )
    script = printed(f"{asked} {TRAIN}", capsys)
    lines = script.splitlines()
    for line in ("nodes=2", "ntasks-per-node=4", "cpus-per-task=8", "time=2:00:00", "partition=big", "account=me"):
        assert f"#SBATCH --{line}" in lines
    assert "#SBATCH --requeue" in lines
    assert "#SBATCH --signal=USR1@120" in lines
    (started,) = [line for line in lines if line.startswith("srun")]
    assert "--cpus-per-task=8" in started
    assert "train --strategy ddp --steps 10 --out runs/shardlab --resume auto" in started


def test_a_pbs_job_asks_for_as_much(capsys: Captured) -> None:
    script = printed(f"--scheduler pbs --nodes 2 --ranks-per-node 4 --gpus-per-node 4 --queue big {TRAIN}", capsys)
    assert "#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4\n#PBS -l walltime=1:00:00\n#PBS -q big\n" in script
    assert "mpiexec -n 8 " in script


def test_flags_of_ones_own_prevail(capsys: Captured) -> None:
    words = f"--scheduler slurm {TRAIN} --out elsewhere --save-every 5 --resume=auto"
    (started,) = [line for line in printed(words, capsys).splitlines() if line.startswith("srun")]
    assert started.endswith("train --strategy ddp --steps 10 --out elsewhere --save-every 5 --resume=auto")


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-u"], input=script, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
    )


def starts(script: str, folder: Path, *statuses: int, leaves: str = "", shows: str = "PreemptTime=None") -> list[int]:
    """How often a job has been requeued after each start, when srun ends with these exit codes.

    Args:
        leaves: what a shell does to leave the run's record, when srun ends with 0.
        shows: what SLURM knows of the job.
    """
    program(folder, "scontrol", f'if [ "$1" = show ]; then echo " {shows} "; else echo "$@" >> requeued; fi')
    requeues: list[int] = []
    for status in statuses:
        program(folder, "srun", f'echo "$MASTER_PORT" > port; {leaves if not status else ""}\nexit {status}')
        done = run(script, folder, SLURM_JOB_ID="10042")
        assert done.returncode == status, done.stderr
        assert (folder / "port").read_text() == "30042\n"
        requeued = folder / "requeued"
        requeues.append(requeued.read_text().count("requeue 10042") if requeued.exists() else 0)
    return requeues


def test_a_slurm_job_that_fails_is_requeued_three_times(bin: Path, capsys: Captured) -> None:
    script = printed(f"--scheduler slurm {TRAIN}", capsys)
    assert starts(script, bin, 1, 1, 1, 1, 1) == [1, 2, 3, 3, 3]


def ended(folder: Path, how: str, why: str = "") -> str:
    """What a shell does to leave the folder of a run that has ended somehow."""
    record = json.dumps({"began": "now", "ended": {"how": how, "why": why}})
    return f"mkdir -p {folder}; echo '{record}' > {folder}/run.json"


@pytest.mark.parametrize(
    ("how", "why", "requeued"),
    sampled(
        [("finished", "", 0), ("interrupted", "", 0), ("interrupted", WARNED, 1)], lambda case: case[0] != "finished"
    ),
    ids=["over", "ended by its user", "warned"],
)
def test_a_slurm_job_that_saved_when_its_time_was_nearly_over_is_requeued(
    how: str, why: str, requeued: int, bin: Path, capsys: Captured
) -> None:
    script = printed(f"--scheduler slurm {TRAIN}", capsys)
    leaves = ended(bin / "runs" / "shardlab", how, why)
    assert starts(script, bin, 0, leaves=leaves) == [requeued]
    assert starts(script, bin, 0) == [requeued], "the record is of the job before"


@pytest.mark.parametrize(
    ("how", "status", "requeued"),
    sampled([("interrupted", 0, 1), ("finished", 0, 0), ("", 130, 1)], lambda case: case[0] != "interrupted"),
    ids=["saved", "over", "not saved"],
)
def test_a_slurm_job_that_is_preempted_is_requeued_and_does_not_count_as_failed(
    how: str, status: int, requeued: int, bin: Path, capsys: Captured
) -> None:
    script = printed(f"--scheduler slurm {TRAIN}", capsys)
    leaves = ended(bin / "runs" / "shardlab", how) if how else ""
    shows = "PreemptEligibleTime=2024-05-01T10:00:00 PreemptTime=2024-05-01T10:20:00"
    assert starts(script, bin, status, leaves=leaves, shows=shows) == [requeued]
    assert starts(script, bin, 1, 1, 1, 1) == [requeued + restart for restart in (1, 2, 3, 3)]


def test_a_preempted_job_that_trains_nothing_is_requeued_unless_it_has_ended_well(bin: Path, capsys: Captured) -> None:
    script = printed("--scheduler slurm -- verify ddp", capsys)
    assert starts(script, bin, 0, 143, shows="PreemptTime=2024-05-01T10:20:00") == [0, 1]


def test_failures_count_since_the_job_last_saved_in_time(bin: Path, capsys: Captured) -> None:
    script = printed(f"--scheduler slurm {TRAIN}", capsys)
    leaves = ended(bin / "runs" / "shardlab", "interrupted", WARNED)
    assert starts(script, bin, 1, 1, 1, 0, 1, leaves=leaves) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("why", "code", "now", "again"),
    [("", 124, True, False), (WARNED, 124, True, True), (WARNED, 124, False, False), (WARNED, 1, True, False)],
    ids=["not saved", "saved", "by the job before", "failed"],
)
def test_a_pbs_job_that_saved_when_its_time_was_nearly_over_submits_itself_again(
    why: str, code: int, now: bool, again: bool, bin: Path
) -> None:
    program(bin, "qsub", f'cat "$@" > "{bin}/script"')
    assert main(["submit", "--scheduler", "pbs", *TRAIN.split()]) == 0
    script = (bin / "script").read_text()
    (bin / "script").unlink()
    out = Path("runs", "shardlab").absolute()
    leaves = ended(out, "interrupted", why)
    program(bin, "mpiexec", f"{leaves if now else ''}\nexit {code}")
    if not now:
        subprocess.run(leaves, shell=True, check=True)
    (bin / "nodes").write_text("first\n")
    done = run(script, bin, PBS_JOBID="7.server", PBS_O_WORKDIR=str(out.parents[1]), PBS_NODEFILE=str(bin / "nodes"))
    assert done.returncode == (0 if again else code), done.stderr
    assert (bin / "script").exists() is again
    assert not again or (bin / "script").read_text() == script == (out / "job.sh").read_text()


@pytest.mark.parametrize(("more", "flag"), [("", "--name"), (" --out runs/shardlab", "--out")])
def test_a_name_that_is_taken_resumes_no_other_jobs_run(more: str, flag: str, bin: Path, capsys: Captured) -> None:
    program(bin, "sbatch", 'cat > /dev/null; echo "Submitted batch job 42"')
    words = ["submit", "--scheduler", "slurm", *(TRAIN + more).split()]
    assert main(words) == 0
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == (
        f"shardlab: runs/shardlab exists; give another {flag}, so that nothing is overwritten, or resume its run: "
        "-- train --resume runs/shardlab\n"
    )
    assert main([*words, "--resume", "auto"]) == 0
    assert main([*words[:3], "--", "train", "--resume", "runs/shardlab"]) == 0
    assert main([*words[:3], "--", "train", "--resume", "runs/gone"]) == 2
    assert "runs/gone does not exist; name the folder of a run with --resume" in capsys.readouterr().err


def test_a_job_that_is_refused_leaves_no_folder(bin: Path, capsys: Captured) -> None:
    program(bin, "sbatch", "exit 1")
    assert main(["submit", "--scheduler", "slurm", *TRAIN.split()]) == 2
    assert not Path("runs", "shardlab").exists()


def test_a_job_that_is_refused_leaves_the_script_of_the_job_before(bin: Path, capsys: Captured) -> None:
    program(bin, "qsub", "cat > /dev/null")
    assert main(["submit", "--scheduler", "pbs", *TRAIN.split()]) == 0
    script = Path("runs", "shardlab", "job.sh").read_text()
    program(bin, "qsub", "exit 1")
    assert main(["submit", "--scheduler", "pbs", "--", "train", "--resume", "runs/shardlab"]) == 2
    assert [path.name for path in Path("runs", "shardlab").iterdir()] == ["job.sh"]
    assert Path("runs", "shardlab", "job.sh").read_text() == script


def test_time_is_said_as_everywhere(capsys: Captured) -> None:
    for time in ("90m", "1.5h", "5400s", "1:30:00"):
        assert "#SBATCH --time=1:30:00\n" in printed(f"--scheduler slurm --time {time} {TRAIN}", capsys)
    for time in ("1-00:00:00", "1-0", "1-00:00", "1d", "24h", "24:00:00"):
        assert "#SBATCH --time=24:00:00\n" in printed(f"--scheduler slurm --time {time} {TRAIN}", capsys)
    assert "#PBS -l walltime=36:30:15\n" in printed(f"--scheduler pbs --time 1-12:30:15 {TRAIN}", capsys)


def test_slurm_may_choose_among_partitions(capsys: Captured) -> None:
    for option in ("--partition", "--queue"):
        assert "#SBATCH --partition=gpu,preempt\n" in printed(f"--scheduler slurm {option} gpu,preempt {TRAIN}", capsys)


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (2, 0), (9, 1)])
def test_a_pbs_job_that_fails_starts_again_three_times(failures: int, status: int, bin: Path, capsys: Captured) -> None:
    program(bin, "mpiexec", f'echo "$MASTER_ADDR" >> started; [ "$(wc -l < started)" -gt {failures} ]')
    (bin / "nodes").write_text("first\nsecond\n")
    script = printed(f"--scheduler pbs {TRAIN}", capsys)
    done = run(script, bin, PBS_JOBID="7.server", PBS_O_WORKDIR=str(bin), PBS_NODEFILE=str(bin / "nodes"))
    assert done.returncode == status, done.stderr
    assert (bin / "started").read_text().split() == ["first"] * min(failures + 1, 4)


def test_a_pbs_job_is_warned_before_its_end(bin: Path, capsys: Captured) -> None:
    program(bin, "mpiexec", "trap 'echo told > told; exit 0' USR1; while :; do sleep 0.1; done")
    (bin / "nodes").write_text("first\n")
    script = printed(f"--scheduler pbs --time 0:02:02 {TRAIN}", capsys)
    done = run(script, bin, PBS_JOBID="7.server", PBS_O_WORKDIR=str(bin), PBS_NODEFILE=str(bin / "nodes"))
    assert done.returncode == 124, done.stderr
    assert (bin / "told").exists()


@pytest.mark.parametrize(("name", "scheduler"), [("sbatch", "slurm"), ("qsub", "pbs")])
def test_the_scheduler_that_is_there_gets_the_script(
    name: str, scheduler: str, bin: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    if name == "qsub":
        monkeypatch.setattr("shardlab.cli.launch.SUBMIT", {"pbs": "qsub"})  # also where SLURM is installed
    program(bin, name, f'cat > "{bin}/script"; echo "Submitted batch job 42"')
    script = printed(f"--scheduler {scheduler} {TRAIN}", capsys)
    assert main(["submit", *TRAIN.split()]) == 0
    assert capsys.readouterr().out == "Submitted batch job 42\n"
    assert (bin / "script").read_text() == script


def test_a_scheduler_that_refuses_is_quoted(bin: Path, capsys: Captured) -> None:
    program(bin, "sbatch", 'echo "sbatch: error: invalid partition" >&2; exit 1')
    assert main(["submit", "--scheduler", "slurm", *TRAIN.split()]) == 2
    output = capsys.readouterr().err
    assert output == "shardlab: sbatch has refused the job: sbatch: error: invalid partition\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scheduler pbs -- train", "there is no qsub here, so this host knows no PBS"),
        ("-- train", "neither sbatch nor qsub is installed here"),
        ("--scheduler slurm", "there is no command; give one after --"),
        ("--scheduler slurm -- trian", "'trian' does not run under a launcher; did you mean train?"),
        (
            "--scheduler slurm --time soon -- train",
            "--time is 'soon'; give a time, such as 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00",
        ),
        ("--scheduler slurm --time 0:02:00 -- train", "--time is 120 s; give more than 120 s"),
        ("--scheduler slurm --name a;b -- train", "--name 'a;b': give letters"),
        ("--scheduler slurm --partition a;b -- train", "--partition 'a;b': give letters"),
        ("--scheduler slurm --partition a,,b -- train", "--partition 'a,,b': give letters"),
        ("--scheduler slurm --queue a;b -- train", "--queue 'a;b': give letters"),
        ("--scheduler slurm --account a,b -- train", "--account 'a,b': give letters"),
        ("--scheduler pbs --dry-run --queue a,b -- train", "--queue 'a,b': a job of PBS has one queue; give one"),
        ("--scheduler slurm --queue a --partition b -- train", "--queue a and --partition b were given"),
        ("--scheduler slurm --time 1-24:00:00 -- train", "--time is '1-24:00:00'; give a time"),
        ("--scheduler slurm --nodes 0 -- train", "--nodes: 0 is too few"),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", *words.split()]) == 2
    output = capsys.readouterr().err
    assert said in output
    assert output.count("\n") == 1
