"""What ranks that share a layer wait for one another: real steps of all of them, beside those of one by itself.

Collectives that are timed one by one miss most of it: in a layer ranks come early and late by turns, and everybody
waits for whoever is last. So the steps of `layers` run once more, on as many ranks as share the layer.
"""

from collections.abc import Sequence
from dataclasses import astuple, fields

from megapipe.calibration.layers import Cell, measure_cell
from megapipe.config.mesh_shape import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.measured import LayerKind, MeasuredLayer, MeasuredWait
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh


def shared_cells(cells: Sequence[Cell], ranks: int) -> dict[int, list[Cell]]:
    """Number of ranks -> cells whose layers so many share, for all that `ranks` ranks can show."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        if 1 < cell.ranks <= ranks:
            found.setdefault(cell.ranks, []).append(cell)
    return found


def measure_shared(mesh: Mesh, config: PretrainConfig, cells: Sequence[Cell], steps: int) -> list[MeasuredLayer]:
    """Rows of layers with all that ranks wait in them: means over the ranks. A collective call.

    cells: each for as many ranks as the mesh has.
    """
    found: list[MeasuredLayer] = []
    for cell in cells:
        shared = connected_mesh(MeshShape({"tensor": cell.tensor, "context": cell.context}), mesh.device)
        own, _ = measure_cell(config, cell, mesh.device, steps, shared)
        found += [_mean(rows) for rows in zip(*mesh.world.all_gather_object(own), strict=True)]
    return found


def waits(alone: Sequence[MeasuredLayer], together: Sequence[MeasuredLayer], factor: float) -> list[MeasuredWait]:
    """Of each layer that was run together, what it took beyond the same work alone.

    factor: how much longer work takes while so many ranks are busy. That is taken off: whoever predicts multiplies
    with it again.
    """
    by_place = {_place(row): row for row in alone}

    def beyond(row: MeasuredLayer, name: str) -> float:
        return float(max(0.0, getattr(row, name) / factor - getattr(by_place[_place(row)], name)))

    return [
        MeasuredWait(*_place(row), *(beyond(row, each.name) for each in fields(MeasuredWait)[len(_PLACE) :]))
        for row in together
    ]


_PLACE = ("kind", "tensor", "context", "micro_size")


def _place(row: MeasuredLayer) -> tuple[LayerKind, int, int, int]:
    return row.kind, row.tensor, row.context, row.micro_size


def _mean(rows: Sequence[MeasuredLayer]) -> MeasuredLayer:
    """Of the same layer on all ranks."""
    times = [astuple(row)[len(_PLACE) :] for row in rows]
    return MeasuredLayer(*_place(rows[0]), *(sum(each) / len(rows) for each in zip(*times, strict=True)))
