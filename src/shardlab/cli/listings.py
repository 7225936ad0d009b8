"""`shardlab strategies`, `recipes`, `clusters` and `schedule`: list what is built in.

`Strategies` lists the strategies with their traffic, which is counted on tapes. `Recipes` lists the recipes, which
describe how a framework runs a step, and the source of each figure. `Clusters` lists devices, links and nodes with
their sources. `ScheduleCommand` writes a pipeline schedule as the CSV file that PyTorch's pipelining reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardlab.check import check
from shardlab.cli.console import print_fact, print_json, stdout_console, table_of, unknown_command
from shardlab.cli.options import Flag, MaxOps, MaxSeconds, NewFile, OptionalCount, check_new_file, writing
from shardlab.common.errors import closest_name, unknown_name
from shardlab.common.files import write_atomically
from shardlab.common.text import counted, memory_text
from shardlab.language import Mesh, trace
from shardlab.models.matrices import SavedActivations
from shardlab.simulate.hardware import DEVICES, LINKS, Device, Link, find_cluster
from shardlab.simulate.hardware.cluster import NODES
from shardlab.simulate.hardware.device import ALIASES, Figure
from shardlab.simulate.predict.confidence import measured_runs
from shardlab.simulate.predict.recipe import GROUPS, Recipe, find_recipe, recipes
from shardlab.simulate.timeline import Traffic, traffic
from shardlab.strategies import STRATEGIES, StrategyEntry
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.pytorch_csv import CsvFormat, export_csv
from shardlab.strategies.schedules.steps import Steps

LAYERS = 8

MICROBATCHES = 8
"""Microbatches of the step whose traffic is shown. Every strategy accepts this number on its default ranks."""

WIDE = 132
"""Smallest terminal width at which strategies are listed in columns, in one or two lines each."""

NOTES = (
    "sends   traffic of the rank that sends most in a step: a formula, and its value in the example below; W is the "
    "size of all weights, D that of all weights but the experts', A that of a microbatch's activation between two "
    "layers; there are L layers (blocks, if layers are split) and m microbatches, k for each of d data-parallel ranks",
    "keeps   weights W, gradients G and optimizer state O; in addition to activations and, temporarily, up to three "
    "whole layers",
    "ranks   n in all: p along the pipeline with v stages each, r along dp_replicate, s along dp_shard, t along tp, c "
    "along cp, e along ep",
    f"example {LAYERS} layers and {MICROBATCHES} microbatches on 4 ranks (tensor-parallel and column-parallel: 2, 3d "
    "and 4d: 8)",
    "zero-3  keeps the same as fsdp: fsdp is the program to read, which waits for every collective; zero-3 is the plan "
    "to use, which overlaps collectives with compute and processes one microbatch at a time",
)


@dataclass(frozen=True)
class Strategies:
    """List the built-in strategies in reading order, with the data that a rank splits, sends and keeps."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.json:
            print_json([strategy_as_json(entry) for entry in STRATEGIES.values()])
        else:
            print_strategies(stdout_console())
        return 0


@dataclass(frozen=True)
class Recipes:
    """List the recipes, which describe how a training framework runs a step; or show one with all its sources."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")] = None
    """Name of a recipe, or path/to/recipe.toml."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.name is not None:
            recipe = find_recipe(self.name)
            print_json(recipe_as_json(recipe)) if self.json else print_recipe(recipe, stdout_console())
        elif self.json:
            print_json([recipe_as_json(recipe) for recipe in recipes().values()])
        else:
            print_recipes(stdout_console())
        return 0


@dataclass(frozen=True)
class Clusters:
    """List devices, their usual nodes and the links between them, with sources; or show one cluster, device or link."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")] = None
    """Device, link, or cluster: DEVICExCOUNT such as h100x16, or path/to/cluster.toml."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        console, hardware = stdout_console(), hardware_tables() if self.name is None else hardware_of(self.name)
        if self.json:
            print_json(hardware)
        elif self.name is None:
            print_hardware(hardware, console)
        else:
            print_hardware_row(self.name, hardware, console)
        return 0


@dataclass(frozen=True)
class ScheduleCommand:
    """Write a pipeline schedule as a CSV file of PyTorch: a row for each rank, a cell for each action.

    simulate, verify and train accept such files, as in `shardlab simulate --schedule FILE.csv`.
    """

    schedule: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCHEDULE")]
    """Built-in name, path/to/file.py:generator, or a CSV file to check and write in another form."""

    pp: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """Number of pipeline ranks."""

    microbatches: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """Number of microbatches in a step."""

    stages_per_rank: OptionalCount = None
    """Stages on each rank, for a schedule without a fixed number."""

    max_ops: MaxOps = None
    """Refuse a schedule with more passes. Messages do not count."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a schedule that needs more CPU time until its next pass, because it may loop forever."""

    form: CsvFormat = "compute_comms"
    """Write only the passes, or also the messages and the actions of sharded stages."""

    csv: NewFile = None
    """Write into this file instead of the terminal."""

    force: Flag = False
    """Replace a file with other contents."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        check_new_file("--csv", self.csv, "schedule.csv", force=True)  # refuses a missing folder before any work
        steps = self.steps()
        text = export_csv(steps, form=self.form)
        check_new_file("--csv", self.csv, "schedule.csv", force=self.force, content=text.encode())
        if self.csv is not None:
            with writing("--csv", self.csv):
                write_atomically(self.csv, text)
        if self.json:
            facts = {
                "schedule": self.schedule,
                "ranks": len(steps.of_ranks),
                "microbatches": steps.microbatches,
                "stages": steps.stages,
                "form": self.form,
                "rows": [row.split(",") for row in text.splitlines()],
            }
            print_json(facts)
        elif self.csv is None:
            print(text, end="")
        else:
            print(
                f"{self.csv}: {self.schedule} for {counted(len(steps.of_ranks), 'rank')}, "
                f"{counted(steps.stages, 'stage')} and {counted(steps.microbatches, 'microbatch')}, "
                f"{text.count(',') + text.count(chr(10))} steps"
            )
        return 0

    def steps(self) -> Steps:
        """Return the steps of the schedule for the given sizes.

        Raises:
            UserError: if there is no such schedule, or it does not exist for these sizes.
        """
        if closest_name(self.schedule, [*SCHEDULES, "search"]) == "search":  # the other command of this name
            raise unknown_command(self.schedule, ["search"], "shardlab schedule")
        order = find_schedule(self.schedule)
        ranks, microbatches = (len(order.of_ranks), order.microbatches) if isinstance(order, Steps) else (4, 4)
        plan = Plan(Mesh(pp=self.pp or ranks), self.schedule, self.stages_per_rank)
        return plan.steps(plan.natural_layers(), self.microbatches or microbatches)


@dataclass(frozen=True)
class Sent:
    """Traffic of the rank that sends most in a step.

    Attributes:
        traffic: bytes, collectives and messages of the rank.
        weights: weights and gradients that it sends, as a multiple of the model's weights.
        activations: activations, residuals, keys, values and their gradients that it sends, as a multiple of one
            microbatch's activation between two layers.
    """

    traffic: Traffic
    weights: float
    activations: float

    def __str__(self) -> str:
        sizes = [f"{size:.4g} {unit}" for size, unit in ((self.weights, "W"), (self.activations, "A")) if size]
        times = [
            f"{number} {noun}{'s' * (number > 1)}"
            for number, noun in ((self.traffic.collectives, "collective"), (self.traffic.messages, "message"))
            if number
        ]
        return f"{' + '.join(sizes)} in {' and '.join(times)}" if times else "nothing"


def sent_by(entry: StrategyEntry) -> Sent:
    """Count the traffic of a strategy on its tapes, with elements of 4 bytes."""
    checked = check(trace(entry.program, entry.grid(entry.ranks), entry.puzzle(entry.ranks, LAYERS), MICROBATCHES))
    sizes = checked.program.sizes
    largest = max(traffic(checked), key=lambda row: row.bytes)
    return Sent(largest, largest.weights / 4 / sum(sizes.weights), largest.activations / 4 / sizes.activations[0])


def sends_text(entry: StrategyEntry) -> str:
    """Return the formula of a rank's traffic, without multiplication signs, and the traffic counted by `sent_by`."""
    volume = sent_by(entry)
    return f"{entry.sends.replace(' * ', ' ')}: {volume}" if volume.traffic.bytes else str(volume)


def strategy_as_json(entry: StrategyEntry) -> dict[str, Any]:
    """Return a strategy's row for --json."""
    volume = sent_by(entry)
    return {
        "name": entry.name,
        "splits": entry.splits,
        "sends": {
            "ranks": entry.ranks,
            "layers": LAYERS,
            "microbatches": MICROBATCHES,
            "collectives": volume.traffic.collectives,
            "messages": volume.traffic.messages,
            "bytes": round(volume.traffic.bytes),
            "weights": round(volume.weights, 9),
            "activations": round(volume.activations, 9),
            "formula": entry.sends,
        },
        "keeps": entry.memory,
        "source": entry.source,
    }


def print_strategies(console: Console) -> None:
    """Print a row for each strategy, in columns if the terminal is wide enough."""
    is_wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=is_wide)
    table.add_column("name", style="cyan", no_wrap=True)
    if is_wide:
        for title in ("split over the ranks", "a rank sends", "a rank keeps"):
            table.add_column(title, min_width=22)
        table.add_column("source", style="dim")
    else:
        table.add_column("")
    for entry in STRATEGIES.values():
        cells = [entry.splits, sends_text(entry), entry.memory, entry.source]
        if not is_wide:
            facts = f"{cells[0]}\nsends {cells[1]}\nkeeps {cells[2]}\n"
            cells = [Text.assemble(facts, (entry.source, "dim"))]
        table.add_row(entry.name, *cells)
    console.print(table)
    console.print()
    for note in NOTES:
        word, text = note[:8], note[8:]
        grid = Table.grid()
        grid.add_row(Text(word, "dim"), Text(text, "dim"))
        console.print(grid)
    console.print("\n[dim]Check, simulate and draw one with[/] shardlab simulate NAME --svg FILE")


def recipe_as_json(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe for --json: all fields by group, and the figures with their sources."""
    groups = {group: asdict(getattr(recipe, group)) for group in GROUPS}
    figures = {name: asdict(figure) for name, figure in recipe.figures.items()}
    switches = {name: asdict(switch) for name, switch in recipe.switches.items()}
    return {"name": recipe.name, "source": recipe.source, **groups, "figures": figures, "switches": switches}


def print_recipes(console: Console) -> None:
    """Print a row for each recipe: the number of its figures, how many are fitted or assumed, and its source."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", style="cyan", no_wrap=True)
    for title in ("figures", "fitted", "assumed"):
        table.add_column(title, justify="right")
    table.add_column("source")
    for recipe in recipes().values():
        figures = recipe.figures.values()
        counts = len(figures), sum(bool(entry.fitted_to) for entry in figures), sum(entry.assumed for entry in figures)
        switches = " ".join(f"{name}={switch.default}" for name, switch in recipe.switches.items())
        about = Text.assemble(recipe.source, (f"\nswitches: {switches}" if switches else "", "cyan"))
        table.add_row(recipe.name, *map(str, counts), about)
    console.print(table)
    console.print("\n[dim]All figures of one recipe, with their sources:[/] shardlab recipes NAME")


def print_recipe(recipe: Recipe, console: Console) -> None:
    """Print all figures of a recipe by group, with their sources."""
    print_fact(console, recipe.name, recipe.source)
    if recipe.switches:
        console.print("\n[bold]switches[/], as in --switch NAME=VALUE")
    for name, switch in recipe.switches.items():
        values = ", ".join(f"{value} (default)" if value == switch.default else value for value in switch.values)
        console.print(Padding(Text.assemble((name, "cyan"), f": {values}"), (0, 0, 0, 2)))
        about = [switch.about, *(f"{value}: {source}" for value, source in switch.values.items())]
        console.print(Padding(Text("\n".join(filter(None, about)), "dim"), (0, 0, 0, 4)))
    for group in GROUPS:
        figures = {name: figure for name, figure in recipe.figures.items() if name.split(".")[0] == group}
        if figures:
            console.print(f"\n[bold]{group}[/]")
        for name, figure in figures.items():
            label, value = Text(name.split(".")[1], "cyan"), as_text(figure.value)
            console.print(Padding(Text.assemble(label, f" = {value}"), (0, 0, 0, 2)))
            if provenance := _provenance(figure, recipe.source):
                console.print(Padding(Text(provenance, "dim"), (0, 0, 0, 4)))


def hardware_tables() -> dict[str, dict[str, Any]]:
    """Return all devices, their usual nodes and all links for --json, by name."""
    return {
        "devices": {name: device_as_json(device) for name, device in DEVICES.items()},
        "nodes": {name: asdict(node) for name, node in NODES.items()},
        "links": {name: link_as_json(link) for name, link in LINKS.items()},
    }


def hardware_of(name: str) -> dict[str, Any]:
    """Return a device with its usual node, a link, or a cluster, for --json.

    Raises:
        UserError: if nothing has that name.
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key in LINKS:
        return link_as_json(LINKS[key])
    if key in DEVICES:
        return device_as_json(DEVICES[key]) | {"node": asdict(NODES[key])}
    if not (name.endswith((".toml", ".json")) or re.fullmatch(r".+x\d+|local", key)):
        raise unknown_name("device, link or cluster", name, [*DEVICES, *LINKS], ", clusters such as h100x16, and files")
    cluster = find_cluster(name)
    return {
        "nodes": cluster.nodes,
        "devices_per_node": cluster.per_node,
        "nics": cluster.nics,
        "assumed": cluster.assumed,
        "device": device_as_json(cluster.device),
        "links": {
            place: link_as_json(link)
            for place, link in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node))
            if place in cluster.network
        },
    }


def device_as_json(device: Device) -> dict[str, Any]:
    """Return the data sheet of a device and the reachable shares of its figures, each with its source."""
    figures = {name: asdict(figure) for name, figure in device.efficiency.figures.items()}
    return {
        "name": device.name,
        "flops": dict(device.flops),
        "memory": device.memory,
        "bandwidth": device.bandwidth,
        "sms": device.sms,
        "source": device.source,
        "efficiency": {"source": device.efficiency.source, "figures": figures},
        "runs": sorted({run.recipe for run in measured_runs() if run.device == device.name}),
    }


def link_as_json(link: Link) -> dict[str, Any]:
    """Return the figures of a link, each with its source."""
    return asdict(link)


def print_hardware(tables: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print a row for each device with its usual node, and for each link, and then the sources of all."""
    devices, nodes, links = tables["devices"], tables["nodes"], tables["links"]
    table = table_of("device", "memory", "GB/s", "TFLOP/s", "its usual node", words=1)
    for column in table.columns[4:]:
        column.justify, column.no_wrap = "left", False
    for name, device in devices.items():
        node = nodes[name]
        node_text = f"{node['devices']} with {node['intra_node']}, {node['nics']} x {node['inter_node']}"
        _, peak = _best_peak(device["flops"])
        figures = memory_text(device["memory"]), f"{device['bandwidth'] / 1e9:,.0f}", f"{peak / 1e12:,.0f}"
        table.add_row(name, *figures, node_text, style="" if device["runs"] else "dim")
    console.print(table)
    console.print(
        "\nTFLOP/s are dense, in bfloat16 or else float16; no measured run is known on dim devices\n", style="dim"
    )
    table = table_of("link, in one direction", "GB/s", "reached", "a hop", words=1)
    for name, link in links.items():
        speed, latency = f"{link['bandwidth'] / 1e9:,.4g}", f"{link['latency'] * 1e6:.2g} us"
        table.add_row(name, speed, f"{link['efficiency']:.0%}", latency)
    console.print(table)
    console.print("\nsources", style="bold")
    for name, device in devices.items():
        print_fact(console, name, f"{device['source']}; its node: {nodes[name]['source']}")
    for name, link in links.items():
        print_fact(console, name, link["source"])
    console.print("\n[dim]Each figure of a device, link or cluster, with its source:[/] shardlab clusters NAME")


def print_hardware_row(name: str, row: Mapping[str, Any], console: Console) -> None:
    """Print a device, a link or a cluster with the source of each figure."""
    if "devices_per_node" in row:
        print_fact(
            console, name, f"{counted(row['nodes'], 'node')} of {row['devices_per_node']} {row['device']['name']}"
        )
        assumed = ", ".join(row["assumed"]) or "nothing"
        print_fact(console, "", f"{counted(row['nics'], 'NIC')} a node; assumed, as in a usual node: {assumed}")
        for part in (row["device"], *row["links"].values()):
            console.print()
            print_hardware_row(part["name"], part, console)
        return
    print_fact(console, row["name"], _sheet(row) if "flops" in row else _link_text(row))
    print_fact(console, "", f"source: {row['source']}", style="dim")
    if node := row.get("node"):
        links = (
            f"{node['intra_node']} inside, {node['nics']} x {node['inter_node']} between, {node['host']} to the host"
        )
        print_fact(console, "node", f"{node['devices']} devices, {links}")
        print_fact(console, "", f"source: {node['source']}", style="dim")
    figures = row["efficiency"]["figures"] if "efficiency" in row and "flops" in row else row["figures"]
    for figure_name, figure in figures.items():
        fitted = Figure(**figure)
        console.print(Padding(Text.assemble((figure_name, "cyan"), f" = {as_text(fitted.value)}"), (0, 0, 0, 2)))
        if provenance := _provenance(fitted, row["source"]):
            console.print(Padding(Text(provenance, "dim"), (0, 0, 0, 4)))


def _sheet(device: Mapping[str, Any]) -> str:
    """Return the data sheet of a device in words."""
    dtype, peak = _best_peak(device["flops"])
    speed = f"{device['bandwidth'] / 1e9:,.0f} GB/s, {peak / 1e12:,.0f} TFLOP/s in {dtype}"
    runs = f"runs of {', '.join(device['runs'])} are known" if device["runs"] else "no measured run is known"
    return f"{memory_text(device['memory'])} at {speed}; {runs}"


def _best_peak(flops: Mapping[str, float]) -> tuple[str, float]:
    """Return the FLOP/s of a device in bfloat16, or else in float16 or float32, with the name of the dtype."""
    dtype = next(candidate for candidate in ("bfloat16", "float16", "float32") if candidate in flops)
    return dtype, flops[dtype]


def _link_text(link: Mapping[str, Any]) -> str:
    """Return the figures of a link in words."""
    speed, latency = link["bandwidth"] / 1e9, link["latency"] * 1e6
    return f"{speed:,.4g} GB/s, of which collectives reach {link['efficiency']:.0%}; {latency:.2g} us a hop"


def as_text(value: Any) -> str:
    """Return the value of a figure as text."""
    if isinstance(value, SavedActivations):
        value = asdict(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {as_text(item)}" for key, item in cast(Mapping[str, Any], value).items())
    if isinstance(value, tuple):
        return " and ".join(map(as_text, cast(tuple[float, ...], value)))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _provenance(figure: Figure, source: str) -> str:
    """Return a figure's source (unless it equals `source`), what it was fitted to, and the ids of the fitted runs."""
    parts = [
        f"{'assumed' if figure.assumed else 'source'}: {figure.source}" if figure.source not in ("", source) else "",
        f"fitted to: {figure.fitted_to}" if figure.fitted_to else "",
        f"runs: {', '.join(figure.runs)}" if figure.runs else "",
    ]
    return "; ".join(filter(None, parts))
