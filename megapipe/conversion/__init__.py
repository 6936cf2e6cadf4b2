"""Checkpoints of one format turned into another's, tensor by tensor: what megapipe convert runs.

A format is a `Source` that gives global tensors by megapipe's names, a `Target` that takes them, and an entry in
`formats.py`. Formats of other frameworks whose files run code when they are read the usual way live in `foreign/`.
"""
