"""The reference workers that drive the backends: plain decoding and EAGLE."""
