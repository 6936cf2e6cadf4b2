"""From files of text to shards: finding inputs, cutting them into parts, tokenizing parts, joining shards."""
