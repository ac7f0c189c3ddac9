"""Several requests on one worker, their text printed as it comes: greedy and sampled, sharing a prompt, one cancelled.

python examples/stream.py [PRESET]        # chain (default), tree, eagle3, eagle3-tree, block, mtp
"""

import sys

from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.requests import FinishReason, RequestOptions
from spec_metadata import Sampling

HEADER = '"""Command line of the archive."""\n\nimport argparse\nimport sys\n\n\n'  # begins every prompt
REQUESTS = [
    ("def main(argv=None):\n", RequestOptions(80)),
    ("def main(argv=None):\n", RequestOptions(80, Sampling(temperature=0.8, top_p=0.9, seed=1))),
    ("class Archive:\n", RequestOptions(120, Sampling(temperature=0.8, top_k=20, seed=2), stop=("\n\n",))),
    ("if __name__ == ", RequestOptions(60, stop=(":",))),
    ("while True:\n", RequestOptions(200)),
]

config = load_run_config(sys.argv[1] if len(sys.argv) > 1 else "chain", backend="fa3", runtime={"page_size": 16})
engine = build_engine(config)
server = engine.server()
requests = [server.submit(engine.tokenizer.encode(HEADER + text), options) for text, options in REQUESTS]
unwanted = requests[-1]

shown = dict.fromkeys(requests, 0)
for request, _ in server.stream():
    lines = request.text.split("\n")
    whole = len(lines) if request.finish else len(lines) - 1  # the last line is still growing
    for line in lines[shown[request] : whole]:
        print(f"[{request.number}] {line}")
    shown[request] = whole
    if request is unwanted and len(request.output) > 40 and request.finish is None:
        server.cancel(request)

print()
for request in requests:
    took = request.statistics
    depths = ", ".join(f"{depth}: {count}" for depth, count in sorted(took.accepted_by_depth.items()))
    seconds = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in took.seconds.items())
    print(f"[{request.number}] {request.finish}: {len(request.output)} tokens in {took.num_cycles} cycles")
    print(f"    {took.num_shared_tokens} prompt tokens shared; accepted by depth: {depths}; {seconds}")
assert unwanted.finish is FinishReason.CANCELLED
