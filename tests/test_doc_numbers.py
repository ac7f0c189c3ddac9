"""Sentences that quote a result say what the result says: each is a pattern of the numbers, and what gives them.

Results are read by `attn_backends.results` alone. Who commits a new result renews the sentences that fail here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from attn_backends import results
from attn_backends.conformance.catalogue import CATALOGUE
from benchmarks.targets import check_targets
from tests import hot_path
from tests.quoted import README, ROOT, rows, text_of

MEASURED, KERNELS = "docs/measured.md", "docs/kernels.md"
SERVING, RECORDED, SGLANG = "docs/serving.md", "docs/recorded-graphs.md", "docs/sglang.md"
FLASH_ATTENTION = "attn_backends/vendors/flash_attention.py"
CONTRIBUTING, SUITES = "CONTRIBUTING.md", "h200/conformance_*"
BATCHES = (1, 32, 128)
PACKED = ("flashinfer_fa3", "vllm_flash_attn", "gluon", "gluon_mla")  # that `auto` takes
SHARES = {"1/5": "a fifth", "1/6": "a sixth"}


def number(pattern: str, **values: Any) -> str:
    return f"{len(rows(pattern, **values)):,}"


def all_are(pattern: str, name: str, value: object) -> str:
    """The number of rows, all of which have a value."""
    assert {row[name] for row in rows(pattern)} == {value}
    return number(pattern)


def cases(row: Any) -> int:
    """How many cases a row of a summary stands for."""
    return row.get("cases", 1)


def executed(pattern: str) -> tuple[str, str, str]:
    """Cases that ran, none of which failed, how many checks of today's suite they are of, and how many that has."""
    ran = [row for row in rows(pattern) if row["status"] != "not_run"]
    assert {row["status"] for row in ran} <= {"pass", "refused"}
    return f"{sum(map(cases, ran)):,}", str(len(checks(ran))), str(len(CATALOGUE))


def checks(found: Iterable[Any]) -> set[str]:
    """Of today's suite, those that rows are of."""
    return {row["check"] for row in found} & CATALOGUE.keys()


def kernels(pattern: str) -> list[str]:
    return sorted({f"{row['backend']}/{row['kernel']}" for row in rows(pattern)})


def suites_again() -> tuple[str, ...]:
    """Cases that passed on 28 November: of all groups but one, of bound inputs, and of Triton's decode."""
    passed: dict[str, int] = {}
    for row in rows("h200/suites"):
        assert row["failed"] == 0
        passed[row["checks"]] = passed.get(row["checks"], 0) + row["passed"]
    groups, bound, decode = passed.values()
    return f"{groups:,}", str(bound), f"{decode:,}"


def whole_suites() -> tuple[str, ...]:
    """Of the runs on an H200: on which days, on how many kernels, on which ones."""
    files = (ROOT / "docs/results/h200").glob("conformance_*.json")
    days = sorted({results.read(file).head.date.removeprefix("2026-11-") for file in files})
    found = kernels(SUITES)
    return *days, str(len(found)), ", ".join(f"`{name}`" for name in found)


def never_ran() -> tuple[str, ...]:
    """Checks without a case on an H200: all, those of kernels that plan on the host, those of refusals."""
    left = CATALOGUE.keys() - checks(rows(SUITES))
    of_hosts = {check for check in left if "host_" in check}
    assert {check.partition(".")[0] for check in left - of_hosts} == {"refusals"}
    return tuple(str(len(each)) for each in (left, of_hosts, left - of_hosts))


def sinks() -> str:
    found = rows("h200/conformance_fa3", status="pass")
    return str(sum(cases(row) for row in found if row["check"] in ("math.sinks", "math.window_and_sinks")))


def hot_path_lines() -> tuple[str, ...]:
    """Then and now, and which shares of these are newer, or grown without what is newer."""
    then = sum(lines for lines, _ in hot_path.THEN.values())
    now = sum(hot_path.total(places) for _, places in hot_path.THEN.values())
    since = sum(map(hot_path.total, hot_path.SINCE.values()))
    shares = (str(Fraction(share).limit_denominator(6)) for share in (since / now, (now - since) / then - 1))
    return f"{then:,}", f"{round(now, -2):,}", *(SHARES[share] for share in shares)


def packed_graphs() -> str:
    of = {"kernel": "vllm_flash_attn", "path": "graph", "check": "math.packed_draft_extend"}
    assert {row["status"] for row in rows("h200/conformance_fa3", **of)} == {"pass"}
    return f"{sum(map(cases, rows('h200/conformance_fa3', **of))):,}"


def planned() -> str:
    assert sum(row["differ"] for row in rows("h200/planners")) == 0
    return f"{sum(row['batches'] for row in rows('h200/planners')):,}"


def spread(values: Iterable[float], digits: int) -> tuple[str, str]:
    found = list(values)
    return f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"


def target(pattern: str, name: str, kernel: str | None = None) -> tuple[str, str]:
    """What a benchmark found for one of its targets, of one kernel or all: least and most."""
    files = sorted((ROOT / "docs" / "results").glob(f"h?00/{pattern}.json"))
    read = [results.read(file) for file in files]
    found = [each for one in read for each in check_targets(one.rows, one.own.get("ceilings", {}))]
    return spread((each.value for each in found if each.target == name and kernel in (None, each.kernel)), 2)


def latents() -> tuple[str, ...]:
    """Of 8, 32 and 128 requests what a call of ours takes; in replays with and without pieces, its launches, and
    FlashMLA's call and launches.
    """
    place = {"kernel": "gluon", "heads": 16, "width": 1, "context": 4096}
    found = {(row["batch_size"], row["kernel"]): row for row in replays("trtllm_mla")}
    us = []
    for row in sorted(rows("h200/kernels_gluon", **place), key=lambda row: row["batch_size"]):
        ours, without, flashmla = (found[row["batch_size"], name] for name in CALLS)
        us += [row["us"], ours["call_us"], without["call_us"], *launches(ours)]
        us += [flashmla["call_us"], *launches(flashmla)[1:]]
    return tuple(f"{each:.1f}" for each in us)


def replays(backend: str) -> list[Any]:
    return rows("h200/profiles_latents", status="replayed", backend=backend)


def launches(row: Any) -> list[float]:
    """What each takes."""
    return [launch[1] for launch in row["launches"]]


def replays_under_fa3() -> tuple[str, ...]:
    """Attention's launch and FlashAttention-3's, their merges, a call without pieces and with them."""
    ours, without, theirs = replays("fa3")
    (_, *own), peers = launches(ours), launches(theirs)
    pairs = (each for pair in zip(own, peers, strict=True) for each in pair)
    return tuple(f"{us:.1f}" for us in (*pairs, without["call_us"], ours["call_us"]))


def by_ncu() -> tuple[str, ...]:
    """At 128 requests under `trtllm_mla`: ours and FlashMLA's share of memory, ours of L2, the longest waits."""
    place = {"backend": "trtllm_mla", "batch_size": 128, "status": "pass"}
    ours, theirs = rows("h200/profiles_latents", **place)
    (_, fa3) = rows("h200/profiles_latents", backend="fa3", status="pass")
    shares = [ours["percent"]["dram"], theirs["percent"]["dram"], ours["percent"]["l2"]]
    ordered = [*sorted(ours["waits"].values())[:-3:-1], *(max(row["waits"].values()) for row in (theirs, fa3))]
    return (*(f"{share / 100:.2f}" for share in shares), *map(str, ordered))


def skewed(digits: int, **values: Any) -> tuple[str, str]:
    """How many times as long ours take as the vendor's, of rows with the values: least and most."""
    return spread((row["us"] / row["peer_us"] for row in rows("h200/skewed", **values)), digits)


def costs_of_pieces() -> str:
    calls = {(row["backend"], row["batch_size"], row["kernel"]): row["call_us"] for row in replays("trtllm_mla")}
    return f"{max(us / calls[*key, CALLS[1]] for (*key, name), us in calls.items() if name == CALLS[0]):.2f}"


def eight_bits() -> tuple[str, ...]:
    """Gluon's speed by Triton's of latents, prompts, and prompts of the largest heads; how much longer it takes."""
    found = rows("h200/eight_bits", status="pass")
    by_size = [[row["speed"] for row in found if row["dim"] in dims] for dims in ((576,), (64, 128, 192), (256,))]
    longer = [row["us"] / row["bfloat16_us"] for row in found]
    return (*spread(by_size[0], 2), *spread(by_size[1], 2), f"{by_size[2][0]:.2f}", *spread(longer, 1))


def share_of_a_copy(name: str, peer: str) -> tuple[str, ...]:
    """Of a copy's bandwidth what ours and its peer reach: 16 heads, one row, 128 requests of 4,096 tokens."""
    copied = results.read(ROOT / "docs/results/h200" / f"{name}.json").own["ceilings"]["copy_tb_per_s"]
    place = {"heads": 16, "width": 1, "batch_size": 128, "context": 4096}
    found = {row["kernel"]: f"{row['tb_per_s'] / copied:.2f}" for row in rows(f"h200/{name}", **place)}
    return found["gluon_mla" if name == "kernels_fa3_mla" else "gluon"], found[peer]


def names_under_fa3() -> tuple[str, ...]:
    place = {"heads": 16, "width": 1, "batch_size": 128, "context": 4096}
    found = {row["kernel"]: f"{row['us']:.1f}" for row in rows("h200/kernels_fa3_mla", **place)}
    return found["gluon_mla"], found["triton"]


def speeds(name: str, kernel: str, heads: Sequence[int]) -> tuple[str, str]:
    """The share of its peer's speed that a kernel reaches with so many heads: least and most."""
    found = [row for row in rows(f"h?00/{name}", kernel=kernel) if row["heads"] in heads]
    return spread((1 / row["ratio"] for row in found), 2)


def mixed_texts_in_sglang() -> tuple[str, str]:
    found = [row for row in rows("h100/engine_sglang_mixed", ok=True) if "requests" in row]
    asked = sum(row["requests"] for row in found)
    return str(asked - sum(len(row["differ"]) for row in found)), str(asked)


def without_errors() -> str:
    """Cases under memcheck that passed; none did not."""
    found = rows("h200/sanitizer*")
    assert {row["status"] for row in found if not row.get("excused")} == {"pass"}
    return f"{sum(cases(row) for row in found if row['status'] == 'pass'):,}"


def megabytes(page_size: int) -> str:
    whole = rows("h200/bench_memory", phase="all", page_size=page_size, batch_size=128, context=131072)
    return f"{max(row['bytes'] for row in whole) / 1e6:.3g}"


def table_row(backend: str, kernel: str, page_size: int) -> list[str]:
    """The numbers of a row of the table of a cycle."""
    place = {"phase": "cycle", "backend": backend, "kernel": kernel, "page_size": page_size, "context": 4096}
    found = {row["batch_size"]: row for row in reversed(rows("h200/plan_graphs*", **place))}  # of the first shape
    times = [", ".join(f"{found[bs][name]:.0f}" for bs in BATCHES) for name in ("us", "kernel_us")]
    (nodes,) = {row["nodes"] for row in found.values()}
    return [str(page_size), *times, str(nodes)]


def of_schedules(name: str, digits: int) -> tuple[str, str]:
    assert all(row.get("passed") or row.get("status") == "pass" for row in rows("h200/schedules"))
    return spread((row[name] for row in rows("h200/schedules")), digits)


def shared_out() -> str:
    assert {row["wrong"] for row in rows("share_outs")} == {0}
    return f"{sum(row['sets'] for row in rows('share_outs')):,}"


def of_work_lists(name: str, digits: int) -> tuple[str, str]:
    found = [row for row in rows("h200/flashinfer_schedules") if row["name"] != "replay"]
    assert all(row["accurate"] and row["defined"] for row in found)
    return spread((row[name] for row in found), digits)


def mebibytes() -> str:
    """Of the models that the reference ships."""
    models = (ROOT / "reference" / "attn_backends_reference" / "models").rglob("*.safetensors")
    return f"{sum(path.stat().st_size for path in models) / 2**20:.1f}"


def reported() -> tuple[str, str]:
    """Of the page of bugs that users reported: how many concern a backend, and how many of these are caught."""
    (found,) = re.findall(
        r"(\S+) concern promises of an attention backend: \*\*(\S+) of these", text_of("docs/real-bugs.md")
    )
    return found


def fuzzed() -> tuple[str, ...]:
    found = results.read(ROOT / "docs" / "results" / "h200" / "fuzz_fused.json")
    attended = sum(row["attended"] for row in found.rows)
    return f"{found.own['batches']:,}", f"{attended:,}", str(len(found.own["mismatches"]))


def made_in() -> tuple[str, str]:
    found = [row for row in rows("h200/bench_steps") if row["bounds"] not in ("seq_lens_cpu", "")]
    assert {row["operators"] for row in found} == {0}
    return spread((row["us"] for row in found), 0)


def with_exact_lengths() -> tuple[str, str]:
    return spread((row["us"] for row in rows("h200/bench_steps", bounds="seq_lens_cpu")), 0)


def in_sglang() -> tuple[str, str]:
    """Engines on our backends, in all of which every layer attended, and replays without a launch of metadata."""
    ours = [row for row in rows("h200/engine_sglang") if row.get("attended")]
    assert not any(row["wrong_counts"] or row["launches"]["plans replay"][1] for row in ours)
    return str(len(ours)), f"{sum(row['launches']['plans replay'][0] for row in ours):,}"


def texts_in_sglang() -> tuple[str, str]:
    ours = [row for row in rows("h200/engine_sglang") if "requests" in row]
    num_texts = sum(row["requests"] for row in ours)
    return f"{num_texts:,}", f"{num_texts - sum(len(row['differ']) for row in ours):,}"


def drafts_in_sglang() -> tuple[str, ...]:
    ours, theirs = (row["error_median"] for row in rows("h200/engine_sglang_drafts"))
    return tuple(str(each) for pair in zip(ours, theirs, strict=True) for each in pair)


def planning_nodes() -> tuple[str, ...]:
    """Up to 128 requests, of a draft block, a ragged verify; `flashmla_sparse`, more by; of FlashAttention-3's ragged
    verify and cycle at 512.
    """
    found, most = defaultdict[str, dict[str, set[int]]](dict), dict[str, int]()
    for row in rows("h200/plan_graphs*"):
        name = "sparse" if row["kernel"] == "flashmla_sparse" else "others"
        if row["batch_size"] <= max(BATCHES):
            found[name].setdefault(row["phase"], set()).add(row["nodes"])
        elif row["kernel"] == "vllm_flash_attn":
            most[row["phase"]] = max(row["nodes"], most.get(row["phase"], 0))
    (block,), (ragged,), sparse = found["others"]["block"], found["others"]["ragged_verify"], found["sparse"]
    (more,) = {nodes - block for nodes in sparse["block"]} | {nodes - ragged for nodes in sparse["ragged_verify"]}
    return *map(str, (block, ragged, more)), *(f"{most[phase]}" for phase in ("ragged_verify", "ragged_cycle"))


PLANNED = {"flashmla": 64, "vllm_flash_attn": 64, "flashmla_sparse": 256, "flashinfer_fa3": 1}


def cycles(phase: str, context: int, digits: int, *kernels: str) -> tuple[str, ...]:
    """The longest at 32 and 128 requests, of each kernel."""
    places = [(kernel, bs) for kernel in kernels for bs in BATCHES[1:]]
    found = rows("h200/plan_graphs*", phase=phase, context=context)
    us = [
        max(
            row["us"]
            for row in found
            if (row["kernel"], row["batch_size"], row["page_size"]) == (*place, PLANNED[place[0]])
        )
        for place in places
    ]
    return tuple(f"{each:.{digits}f}" for each in us)


def missed_plan() -> str:
    """Of the four kernels' uniform cycles, the only one over its target."""
    files = (ROOT / "docs/results/h200").glob("plan_graphs*.json")
    uniform = [row for file in files for row in results.read(file).rows if row["phase"] == "cycle"]
    (missed,) = (each for each in check_targets(uniform, {}) if each.met is False)
    assert (missed.kernel, missed.case) == ("flashinfer_fa3", "batch size 32, context 4096, heads 16, page size 1")
    return f"{missed.value:.1f}"


def instances() -> tuple[str, str]:
    found = [row for row in rows("h200/plan_graphs*", phase="instances") if row["batch_size"] in BATCHES]
    return spread((row["us"] / row["cycle_us"] for row in found), 2)


def ragged_megabytes() -> tuple[str, ...]:
    place = {"kernel": "vllm_flash_attn", "page_size": 1, "batch_size": 512, "context": 4096}
    return tuple(
        f"{rows('h200/plan_graphs', phase=phase, **place)[0]['bytes'] / 1e6:.0f}" for phase in ("ragged_cycle", "cycle")
    )


def profiled(kernel: str, batch_size: int, phase: str) -> Any:
    (row,) = rows("h200/plan_profiles", kernel=kernel, batch_size=batch_size, phase=phase)
    return row


def most_used() -> tuple[str, ...]:
    """Of DRAM, L2 and the SMs' busiest unit, by any launch."""
    found = [row["percent"] for row in rows("h200/plan_profiles")]
    return tuple(f"{max(each[unit] for each in found):.1f}" for unit in ("dram", "l2", "sm"))


def waits_of_lists() -> tuple[str, ...]:
    uniform = [profiled("flashinfer_fa3", 32, phase) for phase in ("draft", "verify")]
    assert all({"long_scoreboard", "imc_miss", "wait", "no_instruction"} == set(row["waits"]) for row in uniform)
    waits = spread((each for row in uniform for each in row["waits"].values()), 2)
    place = {"kernel": "gluon", "heads": 16, "batch_size": 32, "phase": "cycle"}
    (without,) = rows("h200/plan_graphs_flashinfer", **place)
    return *spread((row["percent"]["sm"] for row in uniform), 0), *waits, f"{without['us']:.1f}"


def busier_when_ragged() -> tuple[str, ...]:
    found = []
    for kernel in ("vllm_flash_attn", "flashinfer_fa3"):
        ragged, uniform = (profiled(kernel, 128, phase) for phase in ("ragged_verify", "verify"))
        assert "long_scoreboard" in uniform["waits"]
        assert "long_scoreboard" not in ragged["waits"]
        found += [f"{row['percent']['sm']:.0f}" for row in (ragged, uniform)]
    return tuple(found)


def sparse_launches() -> tuple[str, ...]:
    ragged, uniform = (profiled("flashmla_sparse", 128, phase)["launches"] for phase in ("ragged_verify", "verify"))
    assert ragged[1] == uniform[1]
    return tuple(f"{us:.1f}" for us in (ragged[0][1], uniform[0][1], uniform[1][1]))


def host_times(name: str) -> tuple[str, ...]:
    """Of a load, of three steps, of the loop: least and most."""
    found = rows(f"h200/{name}")
    return tuple(
        each for column in ("host_us", "steps_us", "loop_us") for each in spread((r[column] for r in found), 0)
    )


def loads_in_sglang() -> tuple[str, ...]:
    found = rows("h200/sglang_loads", launches=0, copies=0)
    assert found == rows("h200/sglang_loads")
    quiet = [row for row in found if row["loop_us"] <= 311]
    ends = spread((row["host_us"] for row in found), 1), spread((row["loop_us"] for row in found), 0)
    assert len({row["backend"] for row in found}) == 4
    return (
        *ends[0],
        *ends[1],
        f"{max(row['host_us'] for row in quiet):.1f}",
    )


def beside_sglang(backend: str, page_size: int, batch_size: int) -> list[str]:
    """A row of the table of plans: ours and SGLang's."""
    place = {"backend": backend, "page_size": page_size, "batch_size": batch_size}
    found = rows("h200/sglang_plans", **place)
    ours = next(row for row in found if row["bench"] == "plans")
    theirs = [row for row in found if row["bench"] == "sglang"]
    host = sum(row["host_us"] for row in rows("h200/sglang_hosts", **place))
    in_graph = sum(row["graph_us"] for row in theirs if row["graph_nodes"])
    kernels = f"{ours['kernel_us']:.1f}", f"{sum(row['kernel_us'] for row in theirs):.1f}"
    nodes = str(ours["nodes"]), str(sum(row["nodes"] for row in theirs))
    return [*kernels, *nodes, f"{ours['us']:.1f}", f"{in_graph:.1f}" if in_graph else "0", f"{host:,.0f}"]


def prompts_through_graphs() -> str:
    laws = ("prefill", "exact prefill", "embeddings")
    found = [row for row in rows("h100/workers") if row["law"] in laws]
    assert {row["status"] for row in found} == {"pass"}
    return str(len(found))


def large_heads() -> tuple[str, ...]:
    (missed,) = rows("h200/prompt_forms", status="missed")
    assert (missed["head_dim"], missed["prompts"]) == (256, "32768")
    busy = [row["percent"]["tensor"] / 100 for row in rows("h100/profiles_forms", dim=256)]
    return tuple(f"{each:.2f}" for each in (missed["speed"], *busy))


def speeds_of(dim: int) -> tuple[str, ...]:
    return tuple(str(row["speed"]) for row in rows(f"h200/prompts_{dim}", kernel="gluon"))


def waits_of_256() -> dict[str, float]:
    """Of the form in Gluon; its longest wait is none of its peer's."""
    ours, peers = (row["waits"] for row in rows("h100/profiles_forms", dim=256))
    assert max(ours, key=ours.get) not in peers
    return ours


def prompt_forms(name: str) -> tuple[str, ...]:
    return spread((row["speed"] for row in rows(f"h200/{name}", kernel="gluon")), 2)


def blocks() -> tuple[str, ...]:
    """The documents' GPU blocks that passed, that could not run, and that were started."""
    came = Counter(row["status"] for row in rows("h200/doc_blocks"))
    assert came["fail"] == 0
    assert came["started"] == 1
    return str(came["pass"]), str(came["not_run"])


def lists_of_128_heads() -> tuple[str, ...]:
    place = {"kernel": "flashinfer_fa3", "phase": "cycle", "heads": 128, "context": 4096}
    found = rows("h200/plan_graphs_flashinfer", **place)
    return tuple(f"{row['us']:.0f}" for row in found if row["batch_size"] in BATCHES[1:])


def adapted() -> tuple[str, ...]:
    *alone, _ = rows("adaptive")
    return spread((row["ratio"] for row in alone), 2)


CALLS = ("gluon", "gluon without pieces", "flashmla")
PEERS = (
    ("kernels_gluon", "flashmla"),
    ("kernels_fa3_mla", "vllm_flash_attn"),
    ("kernels_flashinfer_mla", "flashinfer_fa3"),
)
COPIED = (
    r"(?s)reaches 0.9 of a copy: (\S+) under .*?, (\S+) under .*? and (\S+) under\s.*? FlashMLA reaches (\S+), "
    r"FlashAttention-3 (\S+) and\s+FlashInfer (\S+) there"
)
SENTENCES: list[tuple[str, str, Callable[[], str | tuple[str, ...]]]] = [
    (README, r"\[(\S+) of \d+\]\(docs/results/full_cross", lambda: all_are("full_cross", "identical", True)),
    (README, r"\[(\S+) of \d+\]\(docs/results/h200/demo", lambda: all_are("h200/demo_float32", "identical", True)),
    (
        README,
        r"H200 \| \[(\S+) cases, none failed\]\(docs/matrix.md\), of (\S+) of the (\S+) checks",
        lambda: executed(SUITES),
    ),
    (
        README,
        r"CPU \| \[(\S+) cases, none failed\]\(docs/matrix.md\), of (\S+) of the (\S+) checks",
        lambda: executed("conformance_cpu"),
    ),
    (README, r"\[(\S+) planned and (\S+) attended, (\S+) wrong", fuzzed),
    (README, r"of (\S+) that users reported, \[(\S+) are", reported),
    (CONTRIBUTING, r"\), (\S+) passed, (\S+) needed an engine or a `MODEL`, and one was `started`", blocks),
    (MEASURED, r"drafts take (\S+) MiB", mebibytes),
    (MEASURED, r"in all (\S+) cases of \{backend", lambda: all_are("full_cross", "identical", True)),
    (MEASURED, r"in all (\S+) rows of the \[demo\]", lambda: all_are("h200/demo_float32", "identical", True)),
    (MEASURED, r"kernels (\S+) of \[\d+ rows\]", lambda: number("h200/demo_bfloat16", identical=True)),
    (MEASURED, r"kernels \d+ of \[(\S+) rows\]", lambda: all_are("h200/demo_bfloat16", "consistent", True)),
    (MEASURED, r"passed on (\d+) and (\d+) November, eagerly .*? The (\S+) kernels are (.*?)\.", whole_suites),
    (MEASURED, r"\[(\S+) cases\]\(\S+h200/suites.*?passed in (\d+) cases.*?kernels, in (\S+) cases", suites_again),
    (MEASURED, r"This was (\S+) cases of (\S+) of today's (\S+) checks", lambda: executed(SUITES)),
    (MEASURED, r"Of the other (\S+), (\S+) are for kernels that plan on the host, and (\S+) check", never_ran),
    (MEASURED, r"\[(\S+) cases\]\(results/h200/ragged_fl", lambda: executed("h200/ragged_flashinfer")[0]),
    (MEASURED, r"\[(\S+) cases\]\(results/h200/conformance_fa3", sinks),
    (
        CONTRIBUTING,
        r"(?s)Before, it had (\S+) lines.*? It has about (\S+), (\S+ \S+) of.*? it grew by (\S+ \S+),",
        hot_path_lines,
    ),
    (MEASURED, r"that adapts emits (\S+) to (\S+) of", adapted),
    (
        MEASURED,
        r"planned by (\S+) node, a ragged verify by (\S+) too\. `flashmla_sparse` has (\S+) more.*?"
        r"FlashAttention-3 has (\S+), and the ragged cycle (\S+) ",
        planning_nodes,
    ),
    (
        MEASURED,
        r"requests it takes (\S+) and (\S+) us on FlashAttention-3, (\S+) and (\S+) on FlashMLA sparse, "
        r"(\S+) and (\S+) on FlashInfer",
        lambda: cycles("ragged_cycle", 4096, 1, *tuple(PLANNED)[1:]),
    ),
    (
        MEASURED,
        r"tokens, 32 and 128 requests take (\S+) and (\S+) us on FlashMLA, (\S+) and (\S+) on FlashAttention-3, "
        r"(\S+) and (\S+) on FlashMLA sparse, (\S+) and at most (\S+) on",
        lambda: cycles("cycle", 131072, 0, *PLANNED),
    ),
    (MEASURED, r"FlashInfer's cycle takes (\S+) us with 16 heads", missed_plan),
    (MEASURED, r"take (\S+) to (\S+) times the cycle of one backend", instances),
    (MEASURED, r"131,072, has (\S+) MB in pages of one, a uniform one (\S+) MB", ragged_megabytes),
    (MEASURED, r"DRAM is at most (\S+) % used, L2 (\S+) %, the busiest unit of the SMs (\S+) %", most_used),
    (MEASURED, r"16 heads, use (\S+) to (\S+) % of.*?, (\S+) to (\S+) cycles an.*?, takes (\S+) us\.", waits_of_lists),
    (
        MEASURED,
        r"verify uses (\S+) % of.*?, a uniform one (\S+) %; on FlashInfer it is (\S+) and (\S+) %",
        busier_when_ragged,
    ),
    (MEASURED, r"more rows: (\S+) us in place of (\S+)\. The launch that .*? takes (\S+) us in both", sparse_launches),
    (
        MEASURED,
        r"rows took the host (\S+) to (\S+) us, .*? took (\S+) to (\S+) us\. A fixed loop took (\S+) to (\S+) us",
        lambda: host_times("plan_hosts"),
    ),
    (
        SGLANG,
        r"on all four backends .*? takes the host (\S+) to (\S+) us, with loops of (\S+) to (\S+) us, .*?: (\S+)\.",
        loads_in_sglang,
    ),
    (MEASURED, r"it emits (\S+) times what the best single", lambda: f"{rows('adaptive')[-1]['ratio']:.2f}"),
    (RECORDED, r"CUDA graphs: (\S+) cases of (\S+) of its (\S+) checks", lambda: executed(SUITES)),
    (RECORDED, r"checks, on (\S+) kernels", lambda: str(len(kernels(SUITES)))),
    (MEASURED, r"integer of \[(\S+) random batches\]", planned),
    (MEASURED, r"All (\S+) pairs of a known bug", lambda: all_are("h200/mutants", "cuda", "fail")),
    (RECORDED, r"of (\S+) pairs of a mutant", lambda: all_are("h200/mutants", "cuda", "fail")),
    (RECORDED, r"caught by both \| (\S+) \|", lambda: number("h200/mutants", cpu="fail", cuda="fail")),
    (MEASURED, r"\[(\S+) pairs\]\(results", lambda: number("h200/bench_attention")),
    (
        MEASURED,
        r"takes (\S+) to (\S+) times what the vendor's raw call",
        lambda: spread((row["ratio"] for row in rows("h200/bench_attention")), 2),
    ),
    (MEASURED, r"\[(\S+) rows\]\(results/h100/workers", prompts_through_graphs),
    (SERVING, r"\[(\S+) rows\]\(results/h100/workers", prompts_through_graphs),
    (SGLANG, r"(?s)In all\s+(\S+) engines on our.* 0 in (\S+) replays", in_sglang),
    (SGLANG, r"Of the (\S+) texts, (\S+) are", texts_in_sglang),
    (SGLANG, r"(\S+) of (\S+) texts are those of plain decoding without mixed", mixed_texts_in_sglang),
    (SGLANG, r"(?s)forward 1, .*? eager \| (\S+) \| (\S+) \|.*? eager \| (\S+) \| (\S+) \|", drafts_in_sglang),
    (FLASH_ATTENTION, r"all (\S+) packed draft extends", packed_graphs),
    (
        MEASURED,
        r"reach (\S+) to (\S+) of a copy",
        lambda: target("kernels_*", "MLA of 16 heads, of a copy's bandwidth"),
    ),
    (
        MEASURED,
        r"and (\S+) to (\S+) of FlashMLA's in compressed",
        lambda: spread((1 / row["ratio"] for row in rows("h200/kernels_dsv4", kernel="triton", width=1)), 2),
    ),
    (
        MEASURED,
        r"reach (\S+) to (\S+) of the vendors'",
        lambda: target("kernels_*", "MLA of 128 heads, of the vendor's speed", "triton"),
    ),
    (MEASURED, r"heads reaches \[(\S+) to (\S+)\]", lambda: speeds("kernels_gluon", "gluon", (128,))),
    (
        MEASURED,
        r"\[(\S+) to (\S+)\]\(results/h200/kernels_flashinfer_mla",
        lambda: speeds("kernels_flashinfer_mla", "gluon", (128,)),
    ),
    (
        MEASURED,
        r"\[(\S+) to (\S+)\]\(results/h200/kernels_fa3_mla",
        lambda: speeds("kernels_fa3_mla", "gluon_mla", (128,)),
    ),
    (MEASURED, r"heads reach\s+\[(\S+) to (\S+)\]", lambda: speeds("kernels_prefill_fa3", "gluon", (32, 64))),
    (
        KERNELS,
        r"\| \s*".join(
            f"{then} " + 9 * r"\| (\S+) " for then in (r"\| 8 \| 24.1", r"\| 32 \| 52.6", r"\| 128 \| 156.7")
        ),
        latents,
    ),
    (KERNELS, r"\[(\S+), (\S+) and (\S+)\]\(results/h200/prompts_192", lambda: speeds_of(192)),
    (KERNELS, r"\[(\S+) and (\S+)\]\(results/h200/prompts_64", lambda: speeds_of(64)[:2]),
    (
        KERNELS,
        r"(?s)By ncu memory is at (\S+) of .*? at (\S+), and .*?L2 is at (\S+)\. .*?\(`wait`\), (\S+)\s.*?, (\S+)\. .*?"
        r"\(`long_scoreboard`\), (\S+) cycles.*? barriers, (\S+)\.",
        by_ncu,
    ),
    (
        KERNELS,
        r"(?s)Under `fa3` attention takes (\S+) us, and\s.*?'s (\S+), .*? it takes (\S+) us, and\s.*?'s (\S+)\. "
        r".*? takes (\S+) us, with them (\S+)\.",
        replays_under_fa3,
    ),
    (KERNELS, r"one run has (\S+) us by `gluon_mla` and (\S+) by", names_under_fa3),
    (KERNELS, r"\(`long_scoreboard`\), (\S+) cycles an instruction", lambda: str(waits_of_256()["long_scoreboard"])),
    (KERNELS, COPIED, lambda: tuple(share_of_a_copy(*each)[n] for n in (0, 1) for each in PEERS)),
    (KERNELS, r"(?s)256 elements, at (\S+)\. Tensor\s+cores are busy (\S+) of .*?'s\s+(\S+)\.", large_heads),
    (MEASURED, r"they reach\s+\[(\S+) to (\S+)\]\(results/h200/prompt_forms", lambda: prompt_forms("prompt_forms")),
    (MEASURED, r"\[(\S+) to (\S+)\]\(results/h200/prompts_192", lambda: prompt_forms("prompts_192")),
    (MEASURED, r"\[(\S+) to (\S+)\]\(results/h200/prompts_64", lambda: prompt_forms("prompts_64")),
    (MEASURED, r"takes our kernels (\S+) to (\S+) times", lambda: skewed(2, status="met")),
    (MEASURED, r"heads in Triton takes (\S+) to (\S+) times", lambda: skewed(1, status="missed")),
    (MEASURED, r"takes up to (\S+) times as long as without pieces", costs_of_pieces),
    (
        MEASURED,
        r"(?s)latents at (\S+) to (\S+) times\s.*?prompts at (\S+) to (\S+), and .*? elements at (\S+)\s.*?"
        r"take (\S+) to (\S+) times as long as\s+over bfloat16",
        eight_bits,
    ),
    (MEASURED, r"With 128 heads it takes (\S+) and (\S+) us", lists_of_128_heads),
    (MEASURED, r"costs (\S+) to (\S+) times the chain", lambda: target("trees", "a tree's verify, times the chain's")),
    (MEASURED, r"take (\S+) MB in pages of 64", lambda: megabytes(64)),
    (MEASURED, r"64, (\S+) MB in pages of one", lambda: megabytes(1)),
    (MEASURED, r"Of (\S+) random sets of lengths", shared_out),
    (MEASURED, r"schedule takes the device (\S+) to (\S+) us", lambda: of_schedules("plan_us", 1)),
    (MEASURED, r"with our copies takes (\S+) to (\S+);", lambda: of_schedules("vendors_plan_us", 1)),
    (MEASURED, r"runs at (\S+) to (\S+) of its speed on theirs", lambda: of_schedules("speed", 3)),
    (MEASURED, r"work lists takes the device (\S+) to (\S+) us", lambda: of_work_lists("us_plan", 0)),
    (MEASURED, r"Attention on ours runs at (\S+) to (\S+) of", lambda: of_work_lists("speed", 2)),
    (
        MEASURED,
        r"a layer costs the host (\S+) to (\S+) us",
        lambda: spread((row["over_us"] for row in rows("h200/bench_eager")), 0),
    ),
    (
        MEASURED,
        r"metadata of a step (\S+) to (\S+) us",
        lambda: spread((row["metadata_us"] for row in rows("h200/bench_eager")), 0),
    ),
    (
        MEASURED,
        r"The calibration loop took (\S+) to (\S+) us",
        lambda: spread((row["loop_us"] for row in rows("h200/bench_eager")), 0),
    ),
    (MEASURED, r"\[(\S+) cases\]\(results/h200/sanitizer", without_errors),
    (MEASURED, r"With 64 heads it reaches (\S+) to (\S+) of", lambda: speeds("kernels_dsv4", "gluon", (64,))),
    (MEASURED, r"chosen for, MLA reaches (\S+) to (\S+) of", lambda: speeds("kernels_untuned*", "gluon", (16, 128))),
    (MEASURED, r"are made in (\S+) to (\S+) us", made_in),
    (MEASURED, r"With exact host lengths it is (\S+) to (\S+) us", with_exact_lengths),
    (
        MEASURED,
        r"with planning, takes (\S+) to (\S+) times the best",
        lambda: spread((row["ratio"] for row in rows("h200/ragged", heads=128) if row["kernel"] in PACKED), 2),
    ),
    (
        MEASURED,
        r"takes (\S+) to (\S+) times what two steps take on FlashAttention-3",
        lambda: spread((row["ratio"] for row in rows("h200/mixed", kernel="vllm_flash_attn")), 2),
    ),
    (
        MEASURED,
        r"(\S+) to (\S+) times on Gluon",
        lambda: spread((row["ratio"] for row in rows("h200/mixed_gluon", kernel="gluon")), 2),
    ),
    (
        MEASURED,
        r"(\S+) to (\S+) times on FlashInfer \(",
        lambda: spread((row["ratio"] for row in rows("h200/mixed_flashinfer")), 2),
    ),
]
TABLE = [
    ("trtllm_mla", "flashmla", 64),
    ("flashinfer_mla", "flashinfer_fa3", 1),
    ("fa3", "vllm_flash_attn", 64),
    ("dsv4", "flashmla_sparse", 256),
    ("fa3", "vllm_flash_attn", 1),
]


IDS = [f"{document}: {pattern}" for document, pattern, _ in SENTENCES]


@pytest.mark.parametrize(("document", "pattern", "count"), SENTENCES, ids=IDS)
def test_a_sentence_says_what_the_results_say(document, pattern, count):
    found = re.findall(pattern, text_of(document))
    expected = count()
    assert found == [expected]


@pytest.mark.parametrize(("backend", "kernel", "page_size"), TABLE)
def test_the_table_of_a_cycle_says_what_the_results_say(backend, kernel, page_size):
    found = re.findall(rf"\| `{backend}`, `{kernel}` \| ({page_size}) \|([^`]*)\|", text_of(MEASURED))
    assert [[size, *(cell.strip() for cell in cells.split("|")[:3])] for size, cells in found] == [
        table_row(backend, kernel, page_size)
    ]


@pytest.mark.parametrize(("backend", "page_size"), [("flashinfer_mla", 1), ("trtllm_mla", 64), ("fa3", 64), ("fa3", 1)])
@pytest.mark.parametrize("batch_size", [32, 128])
def test_the_table_of_plans_beside_sglang_says_what_the_results_say(backend, page_size, batch_size):
    _, table = text_of(SGLANG).split(f"| `{backend}`, page {page_size}")
    (cells,) = re.findall(rf"\| {batch_size} \|((?: \S+ \|){{7}})", table.partition(" `")[0])
    assert [cell.strip() for cell in cells.strip(" |").split("|")] == beside_sglang(backend, page_size, batch_size)
