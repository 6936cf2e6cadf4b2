"""What a configuration asks for: its model's stages, its schedule, whether it can run, what a rank will hold."""
