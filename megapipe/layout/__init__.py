"""The layout table: who holds what, and what every rank of a layout will hold and send."""
