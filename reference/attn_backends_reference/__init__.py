"""The reference engine: EAGLE and MTP workers, a server, models and their checkpoints."""
