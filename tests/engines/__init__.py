"""Tests inside real engines, each in an environment of its own."""
