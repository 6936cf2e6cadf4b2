"""Links: ordered point-to-point transfer of tensors, one direction between two pipeline ranks each."""

from megapipe.parallel.links.link import Edge, Link, Transfer
from megapipe.parallel.links.make import LinkKind, make_links

__all__ = ["Edge", "Link", "LinkKind", "Transfer", "make_links"]
