"""Pictures that the scripts in docs/ draw."""

import re
import runpy
from functools import partial

from megapipe.config.parallel import DIMENSIONS, MeshShape
from tests.docs.figures import ROOT, files


def drawn(name: str) -> dict[str, str]:
    """Run the script of a picture."""
    return {f"docs/pictures/{name}.svg": runpy.run_path(str(ROOT / f"docs/draw_{name}.py"))["draw"]()}


@files("mesh.svg")
def mesh() -> dict[str, str]:
    """Draw the mesh, and check the place of each rank."""
    sizes = runpy.run_path(str(ROOT / "docs/draw_mesh.py"))["SIZES"]
    assert tuple(sizes) == DIMENSIONS
    made = drawn("mesh")
    places = re.findall(r'data-rank="([\d ]+)">rank (\d+)<', made["docs/pictures/mesh.svg"])
    assert len(places) == MeshShape(sizes).world_size
    for place, rank in places:
        assert MeshShape(sizes).coordinates(int(rank)) == dict(zip(DIMENSIONS, map(int, place.split()), strict=True))
    return made


for _name in ("context_ring", "packages"):
    files(f"{_name}.svg")(partial(drawn, _name))
