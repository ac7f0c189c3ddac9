"""A fuzzer of the metadata interface, with a model of its own of what each row sees and writes.

    python -m tests.fuzz --seconds 60       # or: make fuzz N=1000000

model       sets of slots, plain numpy, nothing of the library
steps       worlds, and random legal steps in them; the sizes that they are drawn from
decode      a backend's metadata, read back into sets of slots
compressed  the same for dsv4's windows, entries and compressor rows
attend      attention in float64 over the model's sets
illegal     steps and uses that must be refused, or must write nothing outside the pool
driver      the only file that knows the library
run         one world from its seed, and the shortest sequence that shows a mismatch
"""
