"""Training and evaluation of the byte-level checkpoints in ``reference/attn_backends_reference/models/checkpoints``."""
