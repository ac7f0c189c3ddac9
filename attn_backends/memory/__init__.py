"""Memory of captured steps' buffers."""
