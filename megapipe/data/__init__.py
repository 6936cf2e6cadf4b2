"""Text to tokens to micro-batches: tokenizers, .bin/.idx shards, sample order, loading."""
