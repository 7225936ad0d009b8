"""The picture of values: what is held is filled in, and nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from shardlab.draw import network_svg, store_svg, value_svg
from shardlab.draw.values import COLORS
from shardlab.language import Holds, Kind, Rank, Spec, World
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.spec import Space, form_of
from tests.draw.test_timeline import boxes, texts

LEGEND = 1
"""The swatch beside a kind's name."""


def rank_of(ranks: int = 4, layers: int = 3, microbatches: int = 4) -> Rank:
    return World(ranks, layers, microbatches).ranks[min(2, ranks - 1)]


def test_a_shard_fills_its_slice_of_its_layer() -> None:
    rank = rank_of()
    weight, state = rank.load_weights(1, shard=2, of=4)
    svg = value_svg(weight)
    assert boxes(svg, COLORS[Kind.WEIGHT]) == 1 + LEGEND
    assert boxes(svg, COLORS[Kind.OPT_STATE]) == 0
    assert "weights[1] (shard 2 of 4) on rank 2" in texts(svg)
    assert "65,536 elements, 262,144 bytes" in texts(svg)
    assert boxes(value_svg(state), COLORS[Kind.OPT_STATE]) == 1 + LEGEND


def test_an_activation_fills_its_microbatches() -> None:
    rank = rank_of()
    svg = value_svg(rank.load_batch([0, 2, 3]))
    assert boxes(svg, COLORS[Kind.ACTIVATION]) == 3 + LEGEND


def test_a_gradient_shows_what_was_summed_and_which_slices_are_held() -> None:
    svg = network_svg(
        [Spec(form_of(Kind.GRAD_WEIGHT, 0, 0, Space(3), Holds(0b0110, 4)), 0b101)], layers=1, microbatches=3
    )
    assert boxes(svg, COLORS[Kind.GRAD_WEIGHT]) == 2 * 2 + LEGEND


def test_a_long_title_fits_on_its_page() -> None:
    title = "grad_weights[1] (microbatches 0-3, shard 1 of 4) on rank 1"
    for text in ("", title, 2 * title):
        svg = network_svg([], layers=2, microbatches=4, title=text)
        (width,) = re.findall(r'width="([\d.]+)pt"', svg)
        assert float(width) == pytest.approx(72 * max(5.2, 0.4 + 0.092 * len(text)), abs=0.1)


def test_a_store_lays_all_its_values_over_one_network() -> None:
    rank = rank_of()
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=2, of=4)
    svg = store_svg(rank.weights)
    assert svg is not None
    assert boxes(svg, COLORS[Kind.WEIGHT]) == 3 + LEGEND
    assert {"rank.weights on rank 2", "3 values, 196,608 elements"} <= set(texts(svg))


def test_a_value_under_two_keys_is_drawn_once() -> None:
    rank = rank_of()
    rank.weights[0], _ = rank.load_weights(0)
    rank.weights["again"] = rank.weights[0]
    assert "1 value, 262,144 elements" in texts(store_svg(rank.weights) or "")


def test_values_and_stores_show_themselves_in_a_notebook() -> None:
    rank = rank_of()
    rank.weights[0], _ = rank.load_weights(0)
    assert rank.weights[0]._repr_svg_() == value_svg(rank.weights[0])
    assert rank.weights._repr_svg_() == store_svg(rank.weights)


def test_an_empty_store_shows_its_text() -> None:
    assert rank_of().weights._repr_svg_() is None


def test_a_freed_value_says_so() -> None:
    rank = rank_of()
    rank.weights[0], _ = rank.load_weights(0)
    value = rank.weights[0]
    del rank.weights[0]
    assert "weights[0] on rank 2, freed" in texts(value_svg(value))


def test_values_of_every_kind_fit_one_picture() -> None:
    kinds = [Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT, Kind.ACTIVATION, Kind.GRAD_ACTIVATION]
    parts = [Holds(0b1, 4) if kind in kinds[:3] else WHOLE for kind in kinds]
    specs = [Spec(form_of(kind, 1, 0, Space(4), holds), 0b1111) for kind, holds in zip(kinds, parts, strict=True)]
    svg = network_svg(specs, layers=2, microbatches=4, title="everything")
    assert {kind.value for kind in kinds} <= set(texts(svg))
    assert len(set(COLORS.values())) == len(COLORS) == len(kinds)


def test_every_box_has_a_name_also_where_nothing_is_held() -> None:
    rank = rank_of()
    rank.weights[0], _ = rank.load_weights(0)
    words = texts(store_svg(rank.weights) or "")
    assert {"weights", "grad_weights", "opt_states", "not held", "microbatch", "layer 0", "layer 2"} <= set(words)
    assert "activations | grad_activations, of each microbatch" in words


def test_large_networks_stay_pictures() -> None:
    specs = [Spec(form_of(Kind.WEIGHT, l, 0, Space(3), Holds(1 << l, 64))) for l in range(64)]
    svg = network_svg(specs, layers=64, microbatches=64)
    ElementTree.fromstring(svg)
    width = float(re.findall(r'width="([\d.]+)pt"', svg)[0])
    assert width < 24 * 72
