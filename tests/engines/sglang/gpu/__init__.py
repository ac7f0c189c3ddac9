"""SGLang's real engine on a GPU, through its CUDA graphs and overlap schedule, with our backends inside.

    bash tests/engines/sglang/gpu/bundle.sh FOLDER      with a network: what a GPU machine without one lacks
    . tests/engines/sglang/gpu/machine.sh FOLDER ...    on the GPU machine: unpacks it, and sets the path
    python -m tests.engines.sglang.gpu correctness --json docs/results/h200/engine_sglang.json
    python -m tests.engines.sglang.gpu drafts --json docs/results/h200/engine_sglang_drafts.json
    python -m tests.engines.sglang.gpu stand_ins --json docs/results/h200/engine_sglang_stand_ins.json
    python -m tests.engines.sglang.gpu throughput --json docs/results/h200/engine_sglang_throughput.json

Each engine is a process of its own (`server.py` starts it, `serve.py` is it), watched from inside by a second plug-in
(`probe.py`); one that fails is a row that says so.
"""
