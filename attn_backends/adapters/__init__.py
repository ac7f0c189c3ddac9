"""From an engine's batch object to a `Step`: SGLang, vLLM and TensorRT-LLM, none of which is imported.

Each module lists the fields that it reads as a `Protocol`, and accepts any object with those fields. Nothing here reads
a value on the device: lengths that are needed on the host come from the mirrors that the engines keep.
`docs/adapters.md` says what becomes of every field.
"""
