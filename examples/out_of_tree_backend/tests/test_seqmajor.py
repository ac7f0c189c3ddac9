from attn_backends.conformance import run_conformance


def test_conformance() -> None:
    assert run_conformance("seqmajor", quick=True).exit_code(require_run=True) == 0
