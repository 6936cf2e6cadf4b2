"""Models as lists of layers; splitting them into stages and units is generic."""
