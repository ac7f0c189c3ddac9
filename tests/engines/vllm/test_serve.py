"""`vllm serve MODEL --attention-backend NAME`: the page's command chooses our backend, and a server answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.engines.vllm.engine import prompts
from tests.engines.vllm.recompute import NUM_PROMPTS, plain

PAGE = Path(__file__).parents[3] / "docs/vllm.md"
SECONDS = 400.0


def command(models: Path, model: str) -> list[str]:
    """The page's, with a model of ours."""
    line = re.search(r"^vllm serve MODEL .*$", PAGE.read_text(), re.MULTILINE)
    assert line
    return [str(models / model) if word == "MODEL" else word for word in shlex.split(line[0])[1:]]


def test_the_command_of_the_page_chooses_our_backend(models: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args([*command(models, "mla-1"), "--skip-tokenizer-init"])
    args.model = args.model_tag  # as the command does, before it serves
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert config.attention_config.backend.name == "ATTN_BACKENDS_TRTLLM_MLA"
    assert config.attention_config.backend.get_class().__module__ == "attn_backends.engines.vllm.backends"
    assert config.speculative_config.method == "mtp"
    assert config.speculative_config.num_speculative_tokens == 3


@pytest.mark.full
def test_a_server_answers_as_plain_decoding(models: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafts = {"method": "eagle3", "model": str(models / "gqa-draft"), "num_speculative_tokens": 3}
    options = ["--attention-backend", "ATTN_BACKENDS_FA3", "--speculative-config", json.dumps(drafts)]
    options += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    options += ["--block-size", "16", "--num-gpu-blocks-override", "48", "--kv-cache-memory-bytes", str(1 << 28)]
    options += ["--max-num-seqs", "4", "--enforce-eager", "--skip-tokenizer-init", "--served-model-name", "gqa"]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    path = tmp_path / "log"
    with path.open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models / "gqa"), *options],
            env=os.environ | environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        prompt, text = prompts(NUM_PROMPTS)[1], plain("gqa", models, NUM_PROMPTS, False).tokens[1]
        asked = {"model": "gqa", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = ask(server, port, asked | {"return_token_ids": True, "detokenize": False}, path)
        assert answer["choices"][0]["token_ids"] == text[:12]
    finally:
        server.terminate()
        server.wait(60)
    assert "fa3 attends in model.layers." in path.read_text()


def ask(server: subprocess.Popen[bytes], port: int, asked: dict[str, Any], log: Path) -> dict[str, Any]:
    """A completion, as soon as the server is up."""
    data, end = json.dumps(asked).encode(), time.monotonic() + SECONDS
    request = Request(f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"})
    while server.poll() is None and time.monotonic() < end:
        with suppress(URLError, ConnectionError), urlopen(request, timeout=SECONDS) as answer:
            return dict(json.load(answer))
        time.sleep(1)
    raise AssertionError(f"no answer: {log.read_text()[-4000:]}")
