"""Links: ordered point-to-point transfer of tensors, one direction between two pipeline ranks each."""

from megapipe.parallel.links.link import FINISHED, Edge, Link, Loan, Transfer
from megapipe.parallel.links.make import LinkKind, make_links

__all__ = ["FINISHED", "Edge", "Link", "LinkKind", "Loan", "Transfer", "make_links"]
