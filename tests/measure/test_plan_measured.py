"""Plans from what was measured: files of ``bench step`` and ``bench load``, right and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aparte.config import Cut
from aparte.errors import AparteError, UserError
from aparte.measure.doctor_path import Door
from aparte.measure.passes import Passes
from aparte.measure.plan import Plan, Question
from aparte.measure.plan_measured import Measured
from aparte.measure.plan_queue import Crowd, Curve, simulate
from dialogue import Device, open_link
from running import running_server

#: A cloud whose passes take 18 ms and 2 ms for each node; devices that take 7 ms, 80 ms away.
FIXED_MS, NODE_MS, REST_MS, RTT_MS = 18.0, 2.0, 7.0, 80.0
CLOUD = Curve.straight(FIXED_MS + NODE_MS, NODE_MS, "made up")


def load(decode: str = "sequential", nodes: float = 1.0, tokens: float = 1.0) -> dict[str, Any]:
    """What ``bench load`` would print of that cloud."""
    rows = []
    for clients, sessions in ((1, 1.0), (4, 1.8), (16, 7.5)):
        outcome = simulate(Crowd(clients, RTT_MS + REST_MS, nodes, tokens), CLOUD)
        pass_ms = CLOUD(nodes * sessions)
        rows.append(
            {
                "clients": clients,
                "tok_s": outcome.tok_s,
                "step_p50_ms": RTT_MS + REST_MS + pass_ms if clients == 1 else outcome.step_p50_ms,
                "step_p95_ms": outcome.step_p95_ms,
                "queue_p50_ms": 0.0,
                "queue_p95_ms": outcome.queue_p95_ms,
                "cloud_p50_ms": pass_ms,
                "passes": 100,
                "pass_ms": pass_ms,
                "pass_nodes": nodes * sessions,
                "pass_sessions": sessions,
                "nodes_per_step": nodes,
                "tokens_per_step": tokens,
            }
        )
    link = {"rtt_ms": RTT_MS, "mbps": None}
    return {"rows": rows, "model": "tiny", "cut": "2,2", "decode": decode, "link": link}


def written(folder: Path, found: object) -> Path:
    (folder / "load.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "load.json"


def test_a_load_gives_back_the_cloud_that_it_was_measured_on(tmp_path: Path) -> None:
    measured = Measured.read(written(tmp_path, load()), Cut())
    for nodes in (1, 5, 40):
        assert measured.curve(nodes) == pytest.approx(CLOUD(nodes), rel=1e-6)
    assert measured.steps is not None
    assert measured.steps.rest_ms == pytest.approx(REST_MS)
    for row in measured.compared():
        assert row["simulated_tok_s"] == pytest.approx(row["tok_s"], rel=0.02)
        assert row["simulated_step_p95_ms"] == pytest.approx(row["step_p95_ms"], rel=0.03)


def test_a_plan_rests_on_it(tmp_path: Path, llama_folder: Path) -> None:
    file = written(tmp_path, load())
    one = Plan(Question(str(llama_folder), rtts_ms=(RTT_MS, 20.0), measured=file, context=100))
    speeds = [row["sequential_tok_s"] for row in one.to_json()["projections"]]
    alone_ms = FIXED_MS + NODE_MS + REST_MS
    assert speeds == pytest.approx([1e3 / (RTT_MS + alone_ms), 1e3 / (20 + alone_ms)], rel=1e-3)
    many = Plan(Question(str(llama_folder), users=16, measured=file, context=100)).to_json()
    found = simulate(Crowd(16, RTT_MS + REST_MS, 1, 1), CLOUD)
    assert many["fleet"]["sequential"][0]["tok_s"] == pytest.approx(found.tok_s, rel=0.02)
    names = {one["name"]: one for one in many["assumptions"]}
    assert names["rest_ms"]["value"] == pytest.approx(REST_MS, abs=1e-3)
    assert "load.json" in names["full_pass_ms"]["source"]
    assert len(many["compared"]) == 3


def test_a_link_with_a_bandwidth_is_not_counted_twice(tmp_path: Path, llama_folder: Path) -> None:
    """Measured at 1 Mbit/s and planned for 1 Mbit/s is as measured; planned without, it is faster."""
    found = load()
    found["link"]["mbps"] = 1.0
    file = written(tmp_path, found)

    def alone_ms(mbps: float | None) -> float:
        plan = Plan(Question(str(llama_folder), mbps=mbps, measured=file, context=100))
        return 1e3 / plan.tok_s(RTT_MS, None)

    transfer_ms = 2 * (50 + 32 * 2) * 8 / 1e3
    assert alone_ms(1.0) == pytest.approx(RTT_MS + REST_MS + FIXED_MS + NODE_MS)
    assert alone_ms(None) == pytest.approx(alone_ms(1.0) - transfer_ms)


def test_a_load_with_drafts_says_what_drafts_bring(tmp_path: Path, llama_folder: Path) -> None:
    file = written(tmp_path, load("auto", nodes=9.0, tokens=2.5))
    plan = Plan(Question(str(llama_folder), measured=file, context=100))
    assert plan.tok_s(RTT_MS, plan.auto) == pytest.approx(2.5e3 / (RTT_MS + REST_MS + CLOUD(9)))
    assert plan.tok_s(RTT_MS, None) == pytest.approx(1e3 / (RTT_MS + REST_MS + CLOUD(1)))


def test_a_step_file_is_read_as_before(tmp_path: Path) -> None:
    rows = [{"nodes": nodes, "middle_ms": 18.0 + 2 * nodes, "device_ms": 3} for nodes in (1, 8)]
    measured = Measured.read(written(tmp_path, {"rows": rows, "cut": "2,2"}), Cut())
    assert measured.curve(4) == 26
    assert measured.compared() == []


def test_another_cut_is_another_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cut 2,2, and this plan is for 4,4.*--cut 4,4"):
        Measured.read(written(tmp_path, load()), Cut(4, 4))


def changed(**row: object) -> dict[str, Any]:
    found = load()
    found["rows"][1] |= row
    return found


@pytest.mark.parametrize(
    "found",
    [
        [],
        7,
        {"rows": []},
        {"rows": [{"clients": 1}], "cut": "2,2"},
        {**load(), "link": None},
        {**load(), "link": {"rtt_ms": "fast", "mbps": None}},
        {**load(), "link": {"rtt_ms": 80.0, "mbps": 0.0}},
        changed(pass_ms=None),  # nothing was computed
        changed(pass_ms=float("nan")),
        changed(pass_nodes=-1.0),
        changed(clients=0),
        changed(tokens_per_step=0.2),
        changed(clients="many"),
    ],
)
def test_files_that_hold_no_load(tmp_path: Path, found: object) -> None:
    with pytest.raises(UserError, match=r"bench step|no curve"):
        Measured.read(written(tmp_path, found), Cut())


def test_one_number_of_devices_says_nothing_about_others(tmp_path: Path) -> None:
    found = load()
    found["rows"] = found["rows"][:1]
    with pytest.raises(UserError, match="more different numbers of devices"):
        Measured.read(written(tmp_path, found), Cut())


def test_a_cloud_tells_what_its_passes_took(llama_folder: Path) -> None:
    with running_server(llama_folder, token="open-sesame") as (_, url):
        door = Door(url, "open-sesame")
        before = Passes.read(door)
        assert before.to_json() == {"passes": 0, "pass_ms": None, "pass_nodes": None, "pass_sessions": None}
        device = Device(llama_folder, open_link(llama_folder, url, token="open-sesame"))
        device.tokens(new_tokens=5)
        device.target.close()
        found = (Passes.read(door) - before).to_json()
        assert found["passes"] == 5
        assert found["pass_nodes"] == pytest.approx((40 + 4) / 5)
        assert found["pass_sessions"] == 1
        assert found["pass_ms"] > 0
        with pytest.raises(AparteError, match="HTTP status 401"):
            Passes.read(Door(url, "wrong"))
    with pytest.raises(AparteError, match="does not tell its counts"):
        Passes.read(door)
