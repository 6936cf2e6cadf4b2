"""Links: ordered point-to-point transfer of tensors, one for each ordered pair of pipeline ranks."""

from megapipe.parallel.links.link import FINISHED, Edge, LinkEnd, Loan, Transfer
from megapipe.parallel.links.make import LinkKind, make_links

__all__ = ["FINISHED", "Edge", "LinkEnd", "LinkKind", "Loan", "Transfer", "make_links"]
