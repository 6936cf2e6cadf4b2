"""A class name means one thing."""

import ast
from collections import defaultdict

from tests.architecture.source import product


def test_class_names_are_unique() -> None:
    """Names that start with an underscore: in their package."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in product():
        for node in source.statements:
            if isinstance(node, ast.ClassDef):
                package = source.path.rpartition("/")[0]
                places[f"{package}.{node.name}" if node.name.startswith("_") else node.name].append(source.path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
