"""What a profile says of a call: ncu's raw page is read, and a machine without ncu is no failure."""

from __future__ import annotations

from tests import profiles

SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
STALLS = [f"{profiles.STALL}{each}{profiles.PER_ISSUE}" for each in ("wait", "barrier")]
LINES = (
    ("ID", "Kernel Name", profiles.TIME, SM, *STALLS),
    ("", "", "us", "%", "inst", "inst"),
    ("0", "short", "1.5", "10.04", "1.00", "2.00"),
    ("1", "long", "1,500.26", "63.55", "2.154", "0.5"),
)
PAGE = "\n".join(["==PROF== Connected to process 1", *(",".join(f'"{word}"' for word in line) for line in LINES)])


def test_the_longest_launch_of_a_raw_page_is_summed_up():
    launches = profiles.kernels_of(PAGE)
    assert [each["name"] for each in launches] == ["short", "long"]
    found = profiles.summary(max(launches, key=lambda each: each[profiles.TIME]))
    assert found == {"launch": "long", "us": 1500.3, "percent": {"sm": 63.5}, "waits": {"wait": 2.15, "barrier": 0.5}}
    assert profiles.kernels_of(PAGE.replace('"us"', '"ms"'))[0][profiles.TIME] == 1500.0
    assert profiles.kernels_of("==ERROR== no counters") == []


def test_without_ncu_a_row_says_so(monkeypatch):
    monkeypatch.setattr(profiles, "NCU", "/nowhere/ncu")
    row = profiles.profiled(0, "gluon")
    assert (row["status"], row["backend"], row["kernel"]) == ("not_run", "fa3", "gluon")
    assert "ncu" in row["reason"]
