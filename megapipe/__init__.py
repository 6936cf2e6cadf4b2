"""megapipe: pretrains GPT and BERT language models across many devices.

Importing the package imports nothing else; every room is imported by its own name (see docs/design.md).
"""

__version__ = "0.1.0"
