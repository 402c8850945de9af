"""The last section of docs/benchmarks.md: where every number comes from."""

from __future__ import annotations

from typing import Any

UNKNOWN = "not recorded"


def runs_section(found: dict[str, Any]) -> str:
    """One row per run, by the name that the other tables give it."""
    if not found:
        return ""
    lines = [
        ["run", "command", "commit", "machine", "seed", "hash of the prompts", "link"],
        ["---"] * 7,
        *(
            [
                f"`{name}`",
                f"`{entry['command']}`",
                entry["commit"],
                entry["machine"],
                _seed(entry["result"]),
                _prompts(entry["result"]),
                _link(entry["result"]),
            ]
            for name, entry in sorted(found.items())
        ),
    ]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    return (
        "## Runs\n\nWhere every number above comes from, by the name of its run. A `+` behind a commit says that "
        "the source had changed since. *Not recorded*: the run is older than that field.\n\n" + table
    )


def run_line(name: str) -> str:
    """Under a table that is of one run."""
    return f"Run: [`{name}`](#runs).\n"


def _seed(result: dict[str, Any]) -> str:
    return str(result.get("seed", UNKNOWN))


def _prompts(result: dict[str, Any]) -> str:
    digest = result.get("prompt_hash", result.get("prompts"))
    return str(digest) if isinstance(digest, str) else UNKNOWN


def _link(result: dict[str, Any]) -> str:
    if "links" in result and result["links"] and "emulated_rtt_ms" in result["links"][0]:
        return "; ".join(_profile(row["emulated_rtt_ms"], row["emulated_mbps"]) for row in result["links"])
    if "links" in result:
        return "simulated: " + "; ".join(_names(result["links"]))
    link = result.get("link")
    if isinstance(link, dict):
        return _profile(link.get("rtt_ms"), link.get("mbps"))
    if isinstance(link, str):
        return link
    if "rows" in result and result["rows"] and "rtt_ms" in result["rows"][0]:
        pairs = dict.fromkeys((row["rtt_ms"], row.get("mbps")) for row in result["rows"])
        return "; ".join(_profile(*pair) for pair in pairs)
    if "link_simulated" in result:
        return f"simulated, {result.get('mbps', 0):g} Mbit/s"
    return UNKNOWN


def _names(links: list[Any]) -> list[str]:
    return [
        _profile(link.get("rtt_ms"), link.get("mbps")) if isinstance(link, dict) else _profile(*link)
        for link in links
    ]


def _profile(rtt_ms: float | None, mbps: float | None) -> str:
    if rtt_ms is None and mbps is None:
        return "none"
    rate = "unlimited" if mbps is None else f"{mbps:g} Mbit/s"
    return f"{rtt_ms or 0:g} ms, {rate}"
