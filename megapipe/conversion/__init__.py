"""Conversion of checkpoints between formats, tensor by tensor: the implementation of megapipe convert.

A format is a `Source` that returns global tensors by megapipe's names, a `Target` that accepts them, and an entry in
`formats.py`.

Megatron-LM's `torch` and `torch_dist` layouts, torch.distributed.checkpoint and the `.bin` files of Hugging Face
folders store pickles, which can run code when they are read in the usual way. Here, only the confined process of
`archive.py` reads a pickle. It accepts a fixed list of names and returns a description. Elements are then read by
their offsets.
"""
