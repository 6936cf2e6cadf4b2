"""From text files to shards: find inputs, cut them into parts, tokenize parts, join shards."""
