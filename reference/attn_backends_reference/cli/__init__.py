"""The commands that the reference engine adds to `attn-backends`."""
