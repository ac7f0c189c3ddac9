"""Training and evaluation of the byte-level checkpoints in ``attn_backends/models/checkpoints``."""
