"""Kernels for products: all ranks choose the same, and so do later runs on this machine."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute import kernel_choice
from shardlab.execute.kernel_choice import KeptChoices, choices_of, choices_of_rank_0, choose_products, rows_of
from shardlab.models.tensors.compute import KERNEL_CHOICES, Product, kernel_choices
from tests.support.ranks import Ranks

CPU = torch.device("cpu")
SIZES = st.integers(1, 2**40)
SHAPES = st.builds(Product, SIZES, SIZES, SIZES, st.booleans(), st.booleans())
A, B, C = (Product(rows, 128, 256, True, False) for rows in (1, 2, 3))


@given(st.dictionaries(SHAPES, st.booleans()))
def test_choices_come_back_from_a_file(choices: dict[Product, bool]) -> None:
    assert choices_of(json.loads(json.dumps(rows_of(choices)))) == choices


def test_products_without_a_choice_use_torchs_own_kernel() -> None:
    assert choices_of(rows_of({A: None, B: True})) == {A: False, B: True}


def test_earlier_choices_of_a_machine_prevail_for_each_number_of_threads(tmp_path: Path) -> None:
    file = KeptChoices(tmp_path / "folder" / "products.json")
    assert file.read(1) == {}
    assert file.add(1, {A: True, B: False}) == {A: True, B: False}
    assert file.add(2, {A: False}) == {A: False}
    assert file.add(1, {A: False, C: True}) == file.read(1) == {A: True, B: False, C: True}
    assert file.read(2) == {A: False}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"machine": {}}', '{"machine": 1, "threads": {}}', "\x00", '{"threads": {"1": [[1]]}}']
)
def test_a_file_that_is_torn_or_of_another_machine_is_written_anew(text: str, tmp_path: Path) -> None:
    file = KeptChoices(tmp_path / "products.json")
    file.path.write_text(text)
    assert file.read(1) == {}
    file.add(1, {A: True})
    data = json.loads(file.path.read_text())
    assert file.read(1) == {A: True}
    file.path.write_text(json.dumps({**data, "threads": {"1": [[1, 2]]}}))
    assert file.read(1) == {}
    file.path.write_text(json.dumps({**data, "machine": {**data["machine"], "torch": "1.0"}}))
    assert file.read(1) == {}


def test_choices_that_cannot_be_kept_are_chosen_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert KeptChoices(tmp_path / "file" / "products.json").add(1, {A: True}) == {A: True}


def chosen_on(rank: int, folder: Path) -> tuple[list[Product], dict[Product, bool | None], bool]:
    """Return a rank's measurements, its choices, and whether there was a choice to make. oneDNN is faster for
    few rows.
    """
    products: list[Product] = []

    def measured(product: Product) -> bool:
        products.append(product)
        return product.rows < 3

    file = KeptChoices(folder / f"{rank}.json")
    with kernel_choices({}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "is_onednn_faster", measured)
        KERNEL_CHOICES.update({A: None, B: True} if rank == 0 else {A: None, C: None})
        assert choose_products(CPU, file)
        return products, dict(KERNEL_CHOICES), choose_products(CPU, file)


def kept_on(rank: int, folder: Path) -> dict[Product, bool]:
    return dict(choices_of_rank_0(KeptChoices(folder / f"{rank}.json")))


def test_rank_0_measures_the_products_of_all_ranks_and_all_choose_the_same(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    first, other = ranks(2).call(chosen_on, tmp_path)
    assert first == ([A, C], {A: True, B: True, C: False}, False)
    assert other == ([], {A: True, C: False}, False)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    second, _ = ranks(2).call(chosen_on, tmp_path)
    assert second == ([], {A: True, B: True, C: False}, False), "kept from the first time"
    assert ranks(2).call(kept_on, tmp_path) == [{A: True, C: False}] * 2


def test_a_rank_alone_chooses_by_itself_and_a_gpu_has_no_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(product: Product) -> bool:
        return product == A

    monkeypatch.setattr(kernel_choice, "is_onednn_faster", measured)
    file = KeptChoices(tmp_path / "products.json")
    with kernel_choices({}):
        KERNEL_CHOICES[A] = None
        assert not choose_products(torch.device("cuda"), file, alone=True)
        assert choose_products(CPU, file, alone=True)
        assert KERNEL_CHOICES == {A: True}
    assert file.read(torch.get_num_threads()) == {A: True}
