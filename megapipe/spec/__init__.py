"""The model table: layers, their parameters, and what each saves, computes and exchanges."""
