"""Clocks that stand still: what is measured takes a tick at least, so that speeds are numbers."""

from __future__ import annotations

import time

import pytest
import torch

from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.measure.collectives import Clock
from shardlab.measure.doctor.checks import host_facts


def test_a_clock_that_stands_still_measures_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    clock = Clock(torch.device("cpu"))
    clock.mark()
    clock.mark()
    assert clock.gaps() == [SHORTEST_SECONDS]
    assert clock.seconds(lambda: None, 4) == SHORTEST_SECONDS / 4


def test_a_disk_s_speed_is_a_number_on_a_clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    assert host_facts(0, 1, write=True).write_speed
