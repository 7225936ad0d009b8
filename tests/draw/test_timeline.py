"""The picture of a timeline: what is in it, that it is the same every time, and that it stays small."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

from shardlab.check import check
from shardlab.draw import comparison_svg, save_comparison, save_timeline, timeline_svg
from shardlab.draw.canvas import COLORS, FORWARD, SHADES, Page, ink_on, layer_color, shade, style
from shardlab.draw.panels import curve, messages, short
from shardlab.language import OpKind, trace
from shardlab.language.ops import COLLECTIVES, COMMUNICATION
from shardlab.simulate.timeline import Costs, Timeline, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.fsdp import fsdp
from tests.simulate.timeline.programs import prefetching, recomputing
from tests.simulate.timeline.runs import SQUARE, run

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, ranks: int, layers: int | None = None, microbatches: int = 4) -> Timeline:
    entry = STRATEGIES[name]
    sizes = entry.puzzle(ranks, layers or entry.default_layers(ranks))
    return run(entry.program, entry.mesh(ranks), sizes, microbatches)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def fills(svg: str) -> set[str]:
    return set(re.findall(r"fill: (#[0-9a-f]{6})", svg))


def boxes(svg: str, color: str) -> int:
    """How many boxes of a colour are drawn."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: {color}', svg)
    return sum(path.count("z") for path in paths)


def test_the_picture_is_a_document_with_a_title_and_its_figures() -> None:
    words = texts(timeline_svg(timeline_of("fsdp", 4), "fully sharded"))
    assert "fully sharded" in words
    assert "4 ranks  ·  4 layers  ·  4 microbatches  ·  ends at 13.6  ·  peak 1.44 M elements on ranks 0-3" in words


def test_every_rank_has_a_row() -> None:
    words = texts(timeline_svg(timeline_of("ddp", 8, microbatches=8)))
    assert [word for word in words if re.fullmatch(r"rank \d+", word)] == [f"rank {rank}" for rank in range(8)]


def test_on_a_grid_a_row_names_its_coordinates() -> None:
    assert "rank 5 (pp 1, dp_shard 1)" in texts(timeline_svg(timeline_of("pipeline-fsdp", 16)))


def test_boxes_carry_their_microbatches() -> None:
    words = texts(timeline_svg(timeline_of("single", 1, layers=2)))
    assert words.count("0-3") == 2 + 2 + 1  # forwards, backwards, legend
    words = texts(timeline_svg(timeline_of("ddp", 4, layers=2)))
    for rank in range(4):
        assert words.count(str(rank)) >= 4


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("ddp", {OpKind.ALL_REDUCE}),
        ("fsdp", {OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER}),
        ("gpipe", {OpKind.SEND, OpKind.RECV, OpKind.ALL_REDUCE}),
    ],
)
def test_each_kind_of_communication_has_its_own_colour_and_a_word_in_the_legend(name: str, kinds: set[OpKind]) -> None:
    svg = timeline_svg(timeline_of(name, 4))
    legend_kinds = {kind for kind in COMMUNICATION if kind.row.legend in texts(svg)}
    assert legend_kinds == kinds
    assert all(boxes(svg, COLORS[kind.row.color]) >= 4 for kind in kinds)


def test_every_kind_of_communication_can_be_drawn() -> None:
    assert len({COLORS[kind.row.color] for kind in COMMUNICATION}) == len(COMMUNICATION)
    assert len({kind.row.letters for kind in COLLECTIVES}) == len(COLLECTIVES)


def test_every_op_that_takes_time_is_drawn() -> None:
    timeline = timeline_of("gpipe", 4, layers=8)
    svg = timeline_svg(timeline)
    sends = sum(event.kind is OpKind.SEND for events in timeline.events for event in events)
    assert boxes(svg, COLORS[OpKind.SEND.row.color]) == sends + 1  # and the legend's


def test_recomputation_is_drawn_and_named() -> None:
    svg = timeline_svg(run(recomputing, 1, 2, 4))
    assert "recompute" in texts(svg)
    assert "recompute" not in texts(timeline_svg(timeline_of("single", 1)))


def test_the_peak_is_marked_with_its_value_and_ranks() -> None:
    timeline = timeline_of("gpipe", 4, layers=8)
    assert timeline.peak_memory == 3014656
    assert "peak 3.01 M elements (3,014,656) on ranks 1-2" in texts(timeline_svg(timeline))


def test_memory_is_drawn_at_every_step_and_its_highest_point_is_the_peak() -> None:
    for name in STRATEGIES:
        timeline = timeline_of(name, STRATEGIES[name].ranks)
        for rank, peak in enumerate(timeline.peak_memory_by_rank):
            steps = curve(timeline, rank)
            assert max(live for _, live in steps) == peak
            assert [time for time, _ in steps] == sorted(time for time, _ in steps)


def test_memory_counts_a_communication_from_its_issue() -> None:
    timeline = run(prefetching, 4, 3, 4)
    first = timeline.events[0][0]
    forward = next(event for event in timeline.events[0] if event.kind is OpKind.FORWARD)
    assert forward.start > 0
    at_start = [live for time, live in curve(timeline, 0) if time == 0]
    assert at_start[-1] > first.memory + 2 * SQUARE  # two gathers of three have been issued before the last one


def test_ranks_with_the_same_memory_share_a_curve() -> None:
    assert "ranks 0-3: 3.41 M" in texts(timeline_svg(timeline_of("ddp", 4)))
    words = texts(timeline_svg(timeline_of("gpipe", 4, layers=8)))
    assert {"rank 0: 2.88 M", "rank 1: 3.01 M", "rank 2: 3.01 M", "rank 3: 2.88 M"} <= set(words)


def test_axes_have_units() -> None:
    words = texts(timeline_svg(timeline_of("ddp", 4)))
    assert "time (1 = forward of one microbatch through one layer)" in words
    assert "live elements" in words
    assert "seconds" in texts(timeline_svg(timeline_of("ddp", 4), time_unit="seconds"))


def test_every_send_is_joined_to_its_receive() -> None:
    timeline = timeline_of("gpipe", 4, layers=8)
    pairs = list(messages(timeline))
    assert len(pairs) == 2 * 3 * 4
    assert all(abs(send.rank - receive.rank) == 1 and send.end <= receive.start for send, receive in pairs)
    assert all(send.microbatches == receive.microbatches for send, receive in pairs)


def test_a_rank_alone_or_without_events_is_still_a_picture() -> None:
    timeline = timeline_of("gpipe", 4, layers=8)
    alone = replace(timeline, events=[timeline.events[0], [], [], []])
    assert len(list(messages(alone))) == 0
    assert alone.peak_memory_by_rank[1:] == [0, 0, 0]
    assert "ranks 1-3: 0" in texts(timeline_svg(alone))


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert timeline_svg(timeline_of("fsdp", 4)) == timeline_svg(timeline_of("fsdp", 4))


def test_a_picture_holds_no_date() -> None:
    svg = timeline_svg(timeline_of("fsdp", 4))
    assert "dc:date" not in svg
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)


def test_a_users_own_matplotlib_settings_are_left_alone_and_change_nothing() -> None:
    plain = timeline_svg(timeline_of("ddp", 4))
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert timeline_svg(timeline_of("ddp", 4)) == plain
        assert mpl.rcParams["font.size"] == 30


def ys(path: str) -> set[str]:
    """The heights at which a path of boxes has corners."""
    return set(re.findall(r"M[\d.]+ ([\d.]+)H", path)) | set(re.findall(r"V([\d.]+)", path))


def test_overlapping_communication_lies_below_the_compute_that_hides_it() -> None:
    timeline = run(prefetching, 2, 3, 2)
    gathers = [event for event in timeline.events[0] if event.kind is OpKind.ALL_GATHER]
    forward = next(event for event in timeline.events[0] if event.kind is OpKind.FORWARD)
    assert any(gather.start < forward.end and gather.end > forward.start for gather in gathers[1:])
    svg = timeline_svg(timeline)
    color = COLORS[OpKind.ALL_GATHER.row.color]
    (path,) = [
        path
        for path in re.findall(rf'<path d="([^"]*)"[^>]*style="fill: {color}', svg)
        if path.count("z") == len(gathers) * 2
    ]
    tops = ys(path)
    compute = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: {FORWARD[0]}', svg)
    bottoms = {y for box in compute for y in ys(box)}
    assert tops & bottoms  # the lanes touch
    assert tops - bottoms  # and are not the same


def test_a_step_without_anything_is_still_a_picture() -> None:
    timeline = timeline_of("single", 1, layers=1, microbatches=1)
    still = [[event._replace(start=0.0, end=0.0) for event in events] for events in timeline.events]
    ElementTree.fromstring(timeline_svg(replace(timeline, events=still)))


def test_a_timeline_shows_itself_in_a_notebook() -> None:
    timeline = timeline_of("ddp", 2, microbatches=2)
    assert timeline._repr_svg_() == timeline_svg(timeline)


def test_saving_writes_the_picture_and_nothing_else(tmp_path: Path) -> None:
    timeline = timeline_of("ddp", 2, microbatches=2)
    save_timeline(timeline, tmp_path / "ddp.svg", "ddp")
    assert [path.name for path in tmp_path.iterdir()] == ["ddp.svg"]
    assert (tmp_path / "ddp.svg").read_text(encoding="utf-8") == timeline_svg(timeline, "ddp")


def test_a_picture_that_cannot_be_written_leaves_nothing_half_written(tmp_path: Path) -> None:
    timeline = timeline_of("ddp", 2, microbatches=2)
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        save_timeline(timeline, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(("elements", "text"), [(0, "0"), (512, "512"), (131072, "131 k"), (2621440, "2.62 M")])
def test_elements_are_written_for_people(elements: int, text: str) -> None:
    assert short(elements) == text


def test_labels_can_be_read_on_every_colour() -> None:
    layers = [layer_color(layer, 16) for layer in range(16)]
    shades = [shade(family, place / 8) for family in SHADES.values() for place in range(9)]
    for color in (*layers, *shades, *COLORS.values()):
        assert contrast(color, ink_on(color)) >= 4.0, color


def contrast(one: str, other: str) -> float:
    """The contrast of two colours (WCAG 2): 21 for black on white."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_page_is_measured_in_inches() -> None:
    with style():
        svg = Page(3, 2).svg()
    assert 'width="216pt" height="144pt"' in svg


# A comparison: its two timelines stand in one picture, on one axis.


CHECKED = check(trace(fsdp, ranks=2, layers=3, microbatches=2))
SLOW = simulate(CHECKED, Costs(forward=2.0, collective=0.9))


def words(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip() for element in xml.fromstring(svg).iter() if element.tag.endswith("text")
    ]


def test_both_are_named_with_their_lengths_in_milliseconds() -> None:
    predicted = simulate(CHECKED)
    picture_words = words(comparison_svg({"predicted": predicted, "measured": SLOW}, "fsdp"))
    assert {"predicted", "measured", "fsdp", "milliseconds since the first rank began"} <= set(picture_words)
    assert f"predicted {1000 * predicted.end:.4g} ms  ·  measured {1000 * SLOW.end:.4g} ms" in picture_words
    assert picture_words.count("rank 0") == picture_words.count("rank 1") == 2


def test_a_measurement_alone_is_drawn_alone(tmp_path: Path) -> None:
    save_comparison({"measured": SLOW}, tmp_path / "c.svg", "fsdp")
    assert words((tmp_path / "c.svg").read_text()).count("rank 0") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.svg"]
