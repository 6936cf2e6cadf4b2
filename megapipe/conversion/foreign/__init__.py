"""Checkpoints of other frameworks: Megatron-LM's `torch` and `torch_dist` layouts and torch.distributed.checkpoint.

All three keep pickles, which run code when they are read the usual way. Here only `unpickler.py` reads one: in a
process of its own, by a written list of names, and what comes back is a description. Tensors' bytes are read beside
it.
"""
