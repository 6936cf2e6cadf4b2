"""Checkpoints of other frameworks: Megatron-LM's `torch` and `torch_dist` layouts, torch.distributed.checkpoint, and
the `.bin` files of Hugging Face folders.

All of them store pickles, which can run code when they are read the usual way. Here only the confined process of
`sandbox.py` reads one, accepts a written list of names, and returns a description. Elements are then read by offset.
"""
