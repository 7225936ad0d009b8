"""Train on two simulated hosts over a network that is slow, loses packets, fails, and recovers.

As root, with Debian's iproute2 and nftables: `python benchmarks/hosts.py`. Each host is a network namespace with its
own name and address. One cable joins them, whose speed `tc` limits and whose packets `nft` drops. On each host runs an
agent of torchrun with two ranks. When the network fails, each host must report the ranks of the other one. The host
with torchrun's store continues with its own ranks, and with all ranks when the other host returns. In the end, the
losses must be those of one device.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT = 300.0
"""Timeout of every wait, in seconds."""

STEPS, TIMEOUT, SPEED, LOSS = 800, 10, "200mbit", 2

TRAIN = ["-m", "shardlab", "train", "--steps", str(STEPS), "--hidden-size", "32"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

SETTINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The last since a host that joins later would else wait for an address that torchrun tells in its first round."""

SAID = ("where each rank was", "waits in", "shardlab: rank", "shardlab: nothing arrives", "resumed after step")
"""Lines of the ranks' output that are shown."""


def done(*words: str) -> str:
    """Output of a command."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


class Host:
    """A network namespace with one interface, called `cable`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"host-{number}"
        self.space = f"shardlab-{os.getpid()}-{number}"
        self.address = f"10.77.0.{number}"
        self._folder, self._logs = folder, 0
        done("ip", "netns", "add", self.space)

    def inside(self, *words: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        return ["ip", "netns", "exec", self.space, *named, *words]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command, whose output goes into a log."""
        self._logs += 1
        environment = {**os.environ, **SETTINGS}
        with (self._folder / f"{self.name}-{self._logs}.log").open("wb") as log:
            return subprocess.Popen(
                self.inside(*words), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def output(self) -> str:
        """Output of its commands."""
        return "".join(path.read_text() for path in sorted(self._folder.glob(f"{self.name}-*.log")))

    def tune(self, speed: str | None) -> None:
        """Limit the speed of the cable by arguments of tc (None: no limit)."""
        if speed is None:
            done(*self.inside("tc", "qdisc", "del", "dev", "cable", "root"))
        else:
            shaped = ["root", "tbf", "rate", speed, "burst", "64kb", "latency", "50ms"]
            done(*self.inside("tc", "qdisc", "replace", "dev", "cable", *shaped))

    def drop(self, rule: str | None) -> None:
        """Drop incoming packets by a rule of nft (None: drop none)."""
        with suppress(subprocess.CalledProcessError):
            done(*self.inside("nft", "delete", "table", "inet", "cable"))
        if rule is not None:
            chain = "{ chain come { type filter hook input priority 0; iifname cable " + rule + " drop; }; }"
            done(*self.inside("nft", f"table inet cable {chain}"))

    def end(self) -> None:
        """End all that runs on the host."""
        for pid in done("ip", "netns", "pids", self.space).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts(folder: Path) -> Generator[tuple[Host, Host]]:
    """Two hosts, joined by a cable."""
    hosts = Host(1, folder), Host(2, folder)
    try:
        ends = [f"shl{os.getpid()}{end}" for end in "ab"]
        done("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            done("ip", "link", "set", end, "netns", host.space, "name", "cable")
            done(*host.inside("ip", "address", "add", f"{host.address}/24", "dev", "cable"))
            for link in ("lo", "cable"):
                done(*host.inside("ip", "link", "set", link, "up"))
        yield hosts
    finally:
        for host in hosts:
            host.end()
            done("ip", "netns", "delete", host.space)


def until(happens: Callable[[], object], hosts: tuple[Host, Host]) -> float:
    """Wait for something; the seconds that it took."""
    began = time.monotonic()
    while not happens():
        if time.monotonic() - began > LIMIT:
            raise SystemExit("\n".join(["this does not happen:", *(host.output for host in hosts)]))
        time.sleep(0.05)
    return time.monotonic() - began


def measure(hosts: tuple[Host, Host], what: str) -> None:
    """Print what `shardlab doctor` measures between the ranks."""
    meet = ["--nnodes", "2", "--master-addr", hosts[0].address, "--master-port", "29500"]
    words = ["-m", "shardlab", "doctor", "--json"]
    before = len(hosts[0].output)
    agents = [host.start(*TORCHRUN, *meet, "--node-rank", str(n), *words) for n, host in enumerate(hosts)]
    for agent in agents:
        agent.wait(LIMIT)
    output = hosts[0].output[before:]
    links = json.JSONDecoder().raw_decode(output[output.index("{\n") :])[0]["links"]
    for link in links[:2]:
        where = "on one host" if link["first"] == 0 else f"between hosts, {what}"
        speed = f"{1e6 * link['latency']:8,.0f} us {8 * link['bandwidth'] / 1e6:10,.0f} Mbit/s"
        print(f"rank {link['first']} to {link['second']} {where:<32}{speed}", flush=True)


class Run:
    """A run's folder, and the agents that train it."""

    def __init__(self, hosts: tuple[Host, Host], out: Path) -> None:
        self.hosts, self.out = hosts, out

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start a host's agent; the store in which agents meet is the first one's."""
        soon = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
        meet = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        meet += ["--rdzv-endpoint", f"{self.hosts[0].address}:29400", "--local-addr", self.hosts[number].address]
        meet += ["--rdzv-conf", f"is_host={int(number == 0)},{soon}"]
        again = ["--resume", "auto", "--save-every", "2s", "--out", str(self.out), "--timeout", str(TIMEOUT)]
        return self.hosts[number].start(*TORCHRUN, *meet, *TRAIN, "--strategy", "fsdp", *again)

    @property
    def losses(self) -> list[float]:
        """The losses on record."""
        with suppress(OSError):
            lines = (self.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            return [json.loads(line)["loss"] for line in lines if line.endswith(b"\n")]
        return []

    def trains(self, ranks: int) -> bool:
        """Whether this many ranks have taken steps, and saved, since they started."""
        with suppress(OSError, ValueError):
            record = json.loads((self.out / "run.json").read_text())
            since = int(str(record["resumed"] or "-0").rpartition("-")[2])
            steps = [int(path.name[5:]) for path in self.out.glob("checkpoints/step-??????")]
            return record["ranks"] == ranks and max(steps, default=0) > since
        return False


def show(hosts: tuple[Host, Host], seen: list[int]) -> None:
    """Print the relevant new lines of the hosts' output."""
    for number, host in enumerate(hosts):
        output = host.output
        for line in output[seen[number] :].splitlines():
            if any(words in line for words in SAID):
                print(f"    {host.name}  {line.strip()}", flush=True)
        seen[number] = len(output)


def main() -> int:
    """Measure the cable, train over it, and print the result; 0 if the losses are those of one device."""
    missing = [name for name in ("ip", "tc", "nft", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid():
        print(f"run this as root, with iproute2, nftables and util-linux installed; missing: {missing}")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the hosts go in any case
    with tempfile.TemporaryDirectory(prefix="hosts-") as name, two_hosts(Path(name)) as hosts:
        second = hosts[1]
        measure(hosts, "free")
        second.drop(f"numgen random mod 100 < {LOSS}")
        measure(hosts, f"{LOSS} % lost")
        second.drop(None)
        for host in hosts:
            host.tune(SPEED)
        measure(hosts, f"at {SPEED}")
        seen = [len(host.output) for host in hosts]

        run = Run(hosts, Path(name, "run"))
        agents = [run.start(0), run.start(1)]
        until(lambda: run.trains(4), hosts)
        print(f"\n4 ranks train; after step {len(run.losses)} the cable drops everything", flush=True)
        for host in hosts:
            host.drop("meta l4proto { tcp, udp }")
        reported = until(lambda: all("where each rank was" in host.output for host in hosts), hosts)
        alone = reported + until(lambda: run.trains(2), hosts)
        show(hosts, seen)
        print(
            f"both hosts have reported after {reported:.1f} s (--timeout {TIMEOUT}); 2 ranks train after {alone:.1f} s"
        )
        for host in hosts:
            host.drop(None)
        second.end()
        agents[1] = run.start(1)
        back = until(lambda: run.trains(4), hosts)
        show(hosts, seen)
        print(f"{back:.1f} s after the cable is whole, and its agent started again, 4 ranks train", flush=True)
        statuses = [agent.wait(LIMIT) for agent in agents]

        alone_out = Path(name, "alone")
        words = [*TRAIN, "--strategy", "grad-accum", "--ranks", "1", "--out", str(alone_out)]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        pairs = list(zip(run.losses, Run(hosts, alone_out).losses, strict=True))
        apart = max(abs(a - b) / b for a, b in pairs)
        print(f"{len(pairs)} steps; losses are at most {apart:.1e} from those of one device, relatively")
        print(f"agents ended with {statuses}")
        return int(any(statuses) or apart > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
