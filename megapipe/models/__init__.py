"""GPTs as lists of layers, their decoding, and their weights in Hugging Face form."""
