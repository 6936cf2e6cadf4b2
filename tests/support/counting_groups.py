"""Groups and links that count what goes through them: calls, elements and bytes of every operation, by group.

`counted` makes a mesh whose groups count, `counted_links` the same of links. The group that a layer gets is then none
of torch.distributed's, so its collectives run as methods of the group, and none goes past the count.
"""

from abc import update_abstractmethods
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from megapipe.engine import transfers
from megapipe.parallel import collectives
from megapipe.parallel.groups import Group, SoloGroup, Work
from megapipe.parallel.links import Edge, LinkEnd, Loan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind

OPERATIONS = {"gather_into": "all_gather", "reduce_into_part": "reduce_scatter", "shift": "send"}
"""Methods of groups that are another's operation in another form."""


class Place(NamedTuple):
    """The place of a count. group: as the mesh is asked for it ("tensor", "data+context", "world"), "tied" for the
    ranks that share a weight, "link" between stages."""

    group: str
    operation: str


@dataclass
class Traffic:
    """Counts of one rank by place. Elements and bytes are those of the whole buffer of a collective: what an
    input of an all-reduce, the output of an all-gather, the input of a reduce-scatter.
    """

    calls: Counter[Place] = field(default_factory=Counter)
    elements: Counter[Place] = field(default_factory=Counter)
    bytes: Counter[Place] = field(default_factory=Counter)

    def note(self, place: Place, tensors: Sequence[Tensor]) -> None:
        """Count a call by the largest of the tensors that it took and gave."""
        largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
        self.calls[place] += 1
        self.elements[place] += 0 if largest is None else largest.numel()
        self.bytes[place] += 0 if largest is None else largest.nbytes

    def copy(self) -> "Traffic":
        """The counts so far."""
        return Traffic(Counter(self.calls), Counter(self.elements), Counter(self.bytes))

    def clear(self) -> None:
        """Forget all counts."""
        for counts in (self.calls, self.elements, self.bytes):
            counts.clear()


Counts = dict[tuple[str, str], tuple[int, int, int]]
"""By group and operation: calls, elements and bytes of one rank in one step."""


def counts_of(traffic: Traffic) -> Counts:
    """Counts of a run as the formulas give them."""
    return {
        (place.group, place.operation): (calls, traffic.elements[place], traffic.bytes[place])
        for place, calls in traffic.calls.items()
    }


class CountingGroup(Group):
    """Another's group, every collective of which is counted under `label` before it runs."""

    def __init__(self, group: Group, traffic: Traffic, label: str | None = None) -> None:
        super().__init__(group.name, group.ranks, group.rank)
        self._group = group
        self._traffic = traffic
        self._label = group.name if label is None else label


def _counting(operation: str) -> Callable[..., Any]:
    def method(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._group, operation)(*args, **kwargs)
        given = (*args, *kwargs.values(), result)
        place = Place(self._label, OPERATIONS.get(operation, operation))
        self._traffic.note(place, [each for each in given if isinstance(each, Tensor)])
        return result

    return method


# Whatever collectives the interface has or will have: all others call these.
for _name in Group.__abstractmethods__:
    setattr(CountingGroup, _name, _counting(_name))
update_abstractmethods(CountingGroup)


class CountingLink(LinkEnd):
    """Another's link. Messages are counted where they are sent."""

    def __init__(self, link: LinkEnd, traffic: Traffic) -> None:
        vars(self).update(vars(link))
        self.lends = link.lends
        self._link = link
        self._traffic = traffic

    def _start(self, tensor: Tensor) -> Work:
        if self._sends:
            self._traffic.note(Place("link", "send"), [tensor])
        return self._link._start(tensor)

    def borrow(self, like: Tensor) -> Loan:
        return self._link.borrow(like)

    def close(self) -> None:
        self._link.close()


def counted(mesh: Mesh, traffic: Traffic) -> Mesh:
    """The same mesh, its groups of several ranks counting into `traffic`.

    The pipeline's own group stays as it is: it carries links, which count by themselves.
    """
    other = copy(mesh)
    make = mesh._create_group

    def counting(group: Group, label: str) -> Group:
        return group if isinstance(group, SoloGroup) else CountingGroup(group, traffic, label)

    def create(name: str, partition: Any) -> Group | None:
        made = make(name, partition)
        return None if made is None else counting(made, "tied" if name.startswith("pipeline ") else name)

    other._create_group = create
    other._stage_groups = {}
    other.world = counting(mesh.world, "world")
    other._groups = {
        names: group if names == ("pipeline",) else counting(group, "+".join(names))
        for names, group in mesh._groups.items()
    }
    return other


@contextmanager
def counted_exchanges(traffic: Traffic) -> Iterator[None]:
    """All-to-alls meanwhile count into `traffic` as what they are, by what each rank gives, and not as the gathers by
    which groups other than torch.distributed's make them: for ranks that are processes."""
    exchanged = collectives._exchanged

    def counting(x: Tensor, group: Group) -> Tensor:
        if not isinstance(group, CountingGroup):
            return exchanged(x, group)
        traffic.note(Place(group._label, "all_to_all"), [x])
        return exchanged(x, group._group)

    with patch.object(collectives, "_exchanged", counting):
        yield


@contextmanager
def counted_links(traffic: Traffic) -> Iterator[None]:
    """Links that an engine of this process makes meanwhile count into `traffic`: for ranks that are processes."""
    make = transfers.make_links

    def making(
        mesh: Mesh, edges: Sequence[Edge], kind: LinkKind = "auto", timeout: float = 600.0
    ) -> dict[Edge, LinkEnd]:
        return {edge: CountingLink(link, traffic) for edge, link in make(mesh, edges, kind, timeout).items()}

    with patch.object(transfers, "make_links", making):
        yield
