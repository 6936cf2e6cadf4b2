"""What the planner found, as terminal tables, pictures and one HTML page."""
