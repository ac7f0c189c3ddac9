"""Metadata of a step, and the planner that writes it."""
