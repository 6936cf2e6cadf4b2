"""GPTs and BERTs as lists of layers, and the decoding of GPTs."""
