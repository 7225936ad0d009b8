"""A layer's flat buffer: the views of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab.models.layout import LayerLayout
from shardlab.models.model import Model


def views(layout: LayerLayout, flat: Tensor) -> list[Tensor]:
    """The parameters, in the layout's order, as views of a flat buffer (numel,) or longer.

    Of a sliced layer, give one slice's run (`run_numel` or longer): the views are of that slice's parameters.
    Ask for gradients of the views, not of `flat`: through `flat`, each view's gradient would be a whole buffer.
    """
    first = flat.storage_offset()
    return [flat.as_strided(shape, strides, first + offset) for shape, strides, offset in layout.places]


def named_views(layout: LayerLayout, flat: Tensor) -> dict[str, Tensor]:
    """The `views` by name."""
    names = [parameter.name for parameter in layout.parameters]
    return dict(zip(names, views(layout, flat), strict=True))


def with_borrowed(model: Model, parameters: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Every layer's parameters as it computes with them: its own `views`, then those that it borrows from the first."""
    first = dict(zip((p.name for p in model.layout(0).parameters), parameters[0], strict=True))
    return [[*own, *(first[name] for name in model.borrowed(layer))] for layer, own in enumerate(parameters)]


def lengthened(layout: LayerLayout, flat: Tensor, length: int) -> Tensor:
    """A flat buffer of `length` elements with the same runs, each lengthened by zeros at its end (`layout.padded`)."""
    longer = flat.new_zeros(length)
    longer.view(layout.slices, -1)[:, : layout.run_numel] = flat.view(layout.slices, -1)[:, : layout.run_numel]
    return longer
