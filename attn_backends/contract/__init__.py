"""What the author of a backend declares: kernels, and what each of them can do."""
