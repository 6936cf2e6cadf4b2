"""A group of which a test gives just the operations that it needs."""

from abc import update_abstractmethods
from typing import Any, NoReturn

from megapipe.parallel.groups import Group


class PartialGroup(Group):
    """Every operation raises NotImplementedError."""

    def _missing(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError


for _name in Group.__abstractmethods__:
    setattr(PartialGroup, _name, PartialGroup._missing)
update_abstractmethods(PartialGroup)
