"""Each pass has a look of its own: by pass, with the chunk by lightness, or by layer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from shardlab.check import check
from shardlab.draw import timeline_svg
from shardlab.draw.canvas import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DARK,
    DARK_BOX,
    DARK_GROUND,
    DARK_INK,
    FAINT,
    FORWARD,
    GROUND,
    INK,
    Looks,
    Paint,
    chunks_of,
    dark_rules,
    layer_color,
    model_layer,
    model_layer_count,
    pale,
    shade,
)
from shardlab.draw.panels import rank_color
from shardlab.language import Mesh, OpKind, Sizes, trace
from shardlab.language.ops import ColorBy
from shardlab.simulate.timeline import Timeline, simulate
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.draw.test_timeline import boxes, contrast, fills, texts, timeline_of

SPLIT = ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
"""Schedules that compute input and weight gradients apart."""

WORDS = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.BACKWARD_INPUT: "backward: input gradient",
    OpKind.BACKWARD_WEIGHT: "backward: weight gradient",
}


@cache
def words_of(name: str, by: ColorBy) -> list[str]:
    """Return the texts in the picture of a strategy on four ranks."""
    return texts(timeline_svg(timeline_of(name, 4), color_by=by))


def counted(timeline: Timeline, kind: OpKind) -> int:
    return sum(event.kind is kind for events in timeline.events for event in events)


@pytest.mark.parametrize("by", ["pass", "layer"])
@pytest.mark.parametrize("name", [*SPLIT, "1f1b", "fsdp"])
def test_the_legend_has_the_passes_that_occur_and_no_other(name: str, by: ColorBy) -> None:
    timeline = timeline_of(name, 4)
    words = words_of(name, by)
    legend_kinds = {kind for kind, word in WORDS.items() if word in words}
    assert legend_kinds == {kind for kind in WORDS if counted(timeline, kind)}


@pytest.mark.parametrize("by", ["pass", "layer"])
@pytest.mark.parametrize("name", SPLIT)
def test_every_pass_carries_its_microbatch(name: str, by: ColorBy) -> None:
    timeline = timeline_of(name, 4)
    words = words_of(name, by)
    passes = sum(counted(timeline, kind) for kind in WORDS)
    legend = 2 * 4 + 8  # numbered layers or chunks, and the axes' ticks
    assert passes <= sum(words.count(str(microbatch)) for microbatch in range(4)) <= passes + legend


def test_passes_are_blue_teal_green_and_orange() -> None:
    families = {
        OpKind.FORWARD: FORWARD,
        OpKind.BACKWARD: BACKWARD,
        OpKind.BACKWARD_INPUT: BACKWARD_INPUT,
        OpKind.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
    }
    timeline = timeline_of("dualpipe-v", 4)
    svg = timeline_svg(timeline)
    for kind, family in families.items():
        count = sum(boxes(svg, shade(family, chunk)) for chunk in (0, 1))
        legend = 1 + 2 * (kind is OpKind.FORWARD)  # the forward's two chunks are swatches as well
        assert count == counted(timeline, kind) + legend


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe-v", 2)])
def test_a_pipelines_chunks_differ_in_lightness(name: str, chunks: int) -> None:
    timeline = timeline_of(name, 4)
    looks = Looks(timeline, "pass")
    assert looks.chunks == chunks
    assert ("model chunk of the rank" in texts(timeline_svg(timeline))) == (chunks > 1)
    for events in timeline.events:
        colors = {looks.paint(event).color for event in events if event.kind is OpKind.FORWARD}
        assert len(colors) == chunks


def test_a_v_turns_between_two_chunks() -> None:
    chunks = chunks_of(timeline_of("zb-v", 4, layers=16))
    assert chunks is not None
    assert chunks[0] == {0: 0, 1: 0, 14: 1, 15: 1}
    assert chunks[3] == {6: 0, 7: 0, 8: 1, 9: 1}


def test_without_a_pipeline_layers_differ_in_lightness() -> None:
    timeline = timeline_of("ddp", 4)
    assert chunks_of(timeline) is None
    svg = timeline_svg(timeline)
    for layer in range(4):
        assert {shade(FORWARD, layer / 3), shade(BACKWARD, layer / 3)} <= fills(svg)
    assert "layer" in texts(svg)


def test_by_layer_forwards_have_the_layers_colour_and_gradients_a_stripe_of_it() -> None:
    looks = Looks(timeline_of("zb-h1", 4), "layer")
    color = layer_color(2, 4)
    assert looks.compute_paint(OpKind.FORWARD, 2) == Paint(color)
    assert looks.compute_paint(OpKind.BACKWARD, 2) == Paint(pale(color), top=color, bottom=color)
    assert looks.compute_paint(OpKind.BACKWARD_INPUT, 2) == Paint(pale(color), top=color)
    assert looks.compute_paint(OpKind.BACKWARD_WEIGHT, 2) == Paint(pale(color), bottom=color)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2), Mesh(ep=2)])
def test_a_finer_cut_leaves_the_models_layers_their_number_and_colour(mesh: Mesh) -> None:
    plan = Plan(mesh)
    sizes = Sizes.context_blocks(3) if mesh.cp > 1 else Sizes.of_puzzle(3, mesh)
    timeline = simulate(check(trace(program_from_plan(plan), mesh, sizes, 2)))
    assert sizes.layers > model_layer_count(sizes) == 3
    layers = [model_layer(sizes, layer) for layer in range(sizes.layers)]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1, 2}
    assert any("3 layers" in word for word in texts(timeline_svg(timeline)))


# Pictures where the reader prefers a dark colour scheme.

PICTURES = sorted((Path(__file__).parents[2] / "docs" / "pictures").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_every_light_grey_of_a_picture_has_a_colour_on_a_dark_ground(picture: Path) -> None:
    svg = picture.read_text(encoding="utf-8")
    assert dark_rules() in svg
    for color in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg.replace(dark_rules(), ""))):
        red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
        if max(red, green, blue) - min(red, green, blue) < 24 and green > 96:
            assert color in (*DARK, GROUND), color


def test_text_can_be_read_on_a_dark_ground() -> None:
    assert contrast(DARK_INK, DARK_GROUND) > 7
    assert contrast(DARK[FAINT], DARK_GROUND) > 4.5
    assert contrast(GROUND, DARK_BOX) > 4.5  # white text on a box whose colour is that of the text elsewhere


def test_dark_rules_keep_white_text_and_concern_pictures_only() -> None:
    rules = dark_rules().removeprefix("@media (prefers-color-scheme: dark) {").removesuffix("}").splitlines()
    assert all(rule.startswith(".shardlab ") for rule in rules)
    assert not any(GROUND in rule and not rule.startswith((".shardlab path", ".shardlab use")) for rule in rules)
    assert {rule.split("[")[0] for rule in rules if INK in rule} == {
        f".shardlab {element}" for element in ("text", "g", "path")
    }


def test_lines_of_ranks_are_visible_on_both_backgrounds() -> None:
    for place in range(8):
        assert contrast(rank_color(place, 8), GROUND) > 1.8
        assert contrast(rank_color(place, 8), DARK_GROUND) > 3
