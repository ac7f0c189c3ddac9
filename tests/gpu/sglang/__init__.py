"""SGLang's real engine on a GPU, through its CUDA graphs and overlap schedule, with our backends inside.

    bash tests/gpu/sglang/bundle.sh FOLDER      on a machine with a network: what a GPU machine without one lacks
    . tests/gpu/sglang/machine.sh FOLDER ...    on the GPU machine: unpacks it, and sets the path
    python -m tests.gpu.sglang correctness --json docs/results/h200/engine_sglang.json
    python -m tests.gpu.sglang throughput --json docs/results/h200/engine_sglang_throughput.json

Each engine is a process of its own (`server.py` starts it, `serve.py` is it), watched from inside by a second plug-in
(`probe.py`); one that fails is a row that says so.
"""
