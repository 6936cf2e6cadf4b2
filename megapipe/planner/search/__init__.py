"""Search for the layout of a model that fits a machine and is fastest or cheapest, and reasons why others are not."""
