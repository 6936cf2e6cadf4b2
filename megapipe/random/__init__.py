"""Counter-based random numbers: initial weights, dropout bits, permutations. Imports no torch."""
