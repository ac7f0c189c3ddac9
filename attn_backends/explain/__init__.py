"""A picture of a step's metadata: what each row sees and writes, as the kernel reads it, beside the very buffers.

    meta = backend.init_forward_metadata(step)
    picture = explain(meta, step)
    print(to_text([picture]))
    Path("step.svg").write_text(to_svg([picture]))

`Reader` asks the kernel itself which slots each row sees, so it reads any backend's format, eagerly or from a graph.
What a row must see is `spec_metadata.visibility`'s; a row that sees or writes something else is marked.
"""

from attn_backends.explain.html import to_html
from attn_backends.explain.picture import Picture, RowPicture, explain
from attn_backends.explain.reading import Reader
from attn_backends.explain.svg import to_svg
from attn_backends.explain.text import to_text

__all__ = ["Picture", "Reader", "RowPicture", "explain", "to_html", "to_svg", "to_text"]
