"""Where the buffers of captured steps lie."""
