"""What a backend makes of a step: metadata, and the planner that writes it."""
