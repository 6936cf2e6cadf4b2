"""What a layer declares and costs, from its configuration alone. Imports no torch."""
