"""SPADE: one model drafts on the edge, the whole model verifies in the cloud; calls, cloud time, scores, by d."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from aparte.config import Sampling
from aparte.measure import spade, spade_report
from aparte.measure.plot_file import STYLES, svg_of
from aparte.measure.reproduce.lab import WAN, Lab
from aparte.measure.reproduce.prompts import QUESTIONS, REFERENCES
from aparte.measure.reproduce.section import Figure, Table, number
from aparte.measure.spade import CLOUD, EDGE
from aparte.measure.specbench import TASKS, Question, balanced, fingerprint, load_questions
from aparte.report import Picture, percent
from aparte.speculate.settings import Drafting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY = "spade"
TITLE = "SPADE: drafts on the edge, verdicts from the cloud"
PAPER = "paper-b"
WHAT = (
    "What `aparte bench spade` does. In this mode the cloud sees the text. *Calls* are round trips per answer, *cloud "
    "time* is compute on the cloud per token, cloud only being 1, without reading the prompt. Both sides compute in "
    "this process; the link's time is added by arithmetic. Blocks are chains of d tokens, as in the paper."
)
SHAPES = ("chain", "tree")
#: The judge's scores in the paper, target and SPADE, by task.
JUDGE = {
    "multi-turn": (3.62, 3.52),
    "translation": (4.80, 4.71),
    "summarization": (4.61, 4.55),
    "qa": (4.25, 4.15),
    "math_reasoning": (4.88, 4.68),
    "rag": (4.56, 4.68),
}


def questions_of(lab: Lab) -> tuple[list[Question], dict[str, str]]:
    """Spec-Bench's where its file is given, else the project's own; with references of summaries."""
    settings, count = lab.settings, lab.scale.questions
    if settings.data is None:
        return list(QUESTIONS[:count]), dict(REFERENCES)
    found = balanced(load_questions(settings.data), count, settings.seed)
    return found, spade.load_references(settings.data)


def run(lab: Lab) -> dict[str, Any]:
    questions, references = questions_of(lab)
    shapes = SHAPES[:1] if lab.settings.quick else SHAPES
    return {shape: _measure(lab, questions, references, shape) for shape in shapes}


def _draft(lab: Lab) -> str:
    """All that drafts without another model; one that is a model, so that the edge can write alone."""
    from aparte.bridge.file import find_bridge
    from aparte.drafting import default_names

    settings = lab.settings
    names = default_names(settings.model, settings.cut)
    if find_bridge(settings.model, settings.cut) is None:
        names = (f"shallow:{max(1, lab.blueprint.layers // 2)}", *names)
    return "+".join(names)


def _measure(lab: Lab, questions: list[Question], references: dict[str, str], shape: str) -> dict[str, Any]:
    from aparte.bridge.file import require_bridge
    from aparte.measure.spade_setup import open_sides

    settings, scale = lab.settings, lab.scale
    drafting = Drafting(_draft(lab))
    sides = open_sides(
        lab.blueprint,
        settings.model,
        drafting,
        bridge=require_bridge(settings.model, settings.cut) if "bridge" in drafting.names else None,
        cut=settings.cut,
        profile=WAN,
        progress=lab.progress,
    )
    options = spade.Options(Sampling(), scale.spade_tokens, scale.lengths, tree=shape == "tree")
    bench = spade.Bench(sides.edge, sides.bare, options, references)
    rows = []
    try:
        for number, question in enumerate(lab.counted(f"SPADE, {shape}s", questions)):
            key = f"spade {shape} {question.id}"
            rows.append(lab.store.part(key, lambda q=question, n=number: bench.row(q, n)))  # type: ignore[misc]
    finally:
        sides.close()
    mbps = WAN.mbps or math.inf
    report = spade_report.summarize(rows, scale.lengths, mbps, references, exact=True)
    del report["paper"]
    return report | {
        "tasks": _by_task(rows, str(report["spade"]["d"])),
        "model": settings.name,
        "draft": drafting.draft,
        "accept": "greedy",
        "shape": shape,
        "edge_memory_share": round(sides.memory_share, 4),
        "scored": sum(row["scored"] for row in rows),
        "mbps": mbps,
        "prompts": fingerprint(questions),
        "data": "own prompts" if settings.data is None else "Spec-Bench",
        "seed": settings.seed,
    }


def _by_task(rows: list[dict[str, Any]], way: str) -> dict[str, Any]:
    """Tokens per call and sameness of the text, at the block length with the fewest calls."""
    found = {}
    for task in TASKS:
        mine = [row["runs"] for row in rows if row["task"] == task]
        if mine:
            steps = sum(runs[way]["steps"] for runs in mine)
            found[task] = {
                "questions": len(mine),
                "tokens_per_call": sum(runs[way]["tokens"] for runs in mine) / max(1, steps),
                "identical": all(runs[way]["digest"] == runs[CLOUD]["digest"] for runs in mine),
            }
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    chain = found["chain"]
    made = [_calls(chain, "spec_bench", "Spec-Bench" if chain["data"] == "Spec-Bench" else chain["data"])]
    made.append(_tasks(chain))
    if "summarization" in chain and chain["scored"]:
        made.append(_summaries(chain))
    made += [_sweep(report) for report in found.values()]
    return made


def _calls(report: dict[str, Any], part: str, name: str) -> Table:
    paper: Any = spade_report.PAPER[part]
    best = report["spade"]
    table: Table = [
        [f"paper B / here ({name})", "calls per answer", "cloud time", "tok/s, paper (no network)"]
        + ["tok/s here, 0 ms", "80 ms", "same text as the cloud"]
    ]
    for way, label, row in (
        (CLOUD, "cloud only", report[CLOUD]),
        (EDGE, "edge only", report.get(EDGE)),
        ("spade", f"SPADE, d = {best['d']} here", best),
    ):
        said = paper[way]
        if row is None:
            continue
        same = {CLOUD: "", EDGE: percent(row.get("identical_share"))}.get(
            way, "yes" if row.get("identical") else "no"
        )
        table.append(
            [
                label,
                f"{said['cloud_calls_per_answer']:.2f} / {row['cloud_calls_per_answer']:.2f}",
                f"{said['cloud_time_ratio']:.2f} / {row['cloud_time_ratio']:.2f}",
                f"{said['tok_s']:.2f}",
                number(row["tok_s"]["0"]),
                number(row["tok_s"]["80"]),
                same,
            ]
        )
    return table


def _tasks(report: dict[str, Any]) -> Table:
    table: Table = [
        ["task", "paper B's judge: target", "SPADE", f"here, d = {report['spade']['d']}: tokens per call"]
        + ["same text as the cloud", "questions"]
    ]
    for task, said in JUDGE.items():
        row = report["tasks"].get(task)
        mine = (
            [number(row["tokens_per_call"], 2), "yes" if row["identical"] else "no", str(row["questions"])]
            if row
            else ["", "", "0"]
        )
        table.append([task, f"{said[0]:.2f}", f"{said[1]:.2f}", *mine])
    return table


def _summaries(report: dict[str, Any]) -> Table:
    paper: Any = spade_report.PAPER["cnn_dailymail"]
    figures = report["summarization"]
    names = {"bleu1": "BLEU-1", "bleu4": "BLEU-4", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}
    table: Table = [
        ["summaries: paper B / here", "calls per answer", "cloud time", *names.values()],
    ]
    for way, label in ((CLOUD, "cloud only"), (EDGE, "edge only"), ("spade", "SPADE")):
        row, said = figures.get(way), paper[way]
        if row is None:
            continue
        table.append(
            [
                label,
                f"{said['cloud_calls_per_answer']:.2f} / {row['cloud_calls_per_answer']:.2f}",
                f"{said['cloud_time_ratio']:.2f} / {row['cloud_time_ratio']:.2f}",
                *(f"{said[name]:.2f} / {number(row.get(name), 2)}" for name in names),
            ]
        )
    return table


def _sweep(report: dict[str, Any]) -> Table:
    table: Table = [
        [f"d, {report['shape']}s", "calls per answer", "fewer", "cloud time", "accepted", "tokens per call"]
        + ["tok/s, 0 ms", "20 ms", "80 ms", "150 ms", "same text"]
    ]
    for row in report["sweep"]:
        table.append(
            [
                str(row["d"]),
                number(row["cloud_calls_per_answer"], 2),
                percent(row["call_reduction"]),
                number(row["cloud_time_ratio"], 2),
                percent(row["acceptance"]),
                number(row["tokens_per_call"], 2),
                *(number(row["tok_s"][rtt]) for rtt in ("0", "20", "80", "150")),
                "yes" if row["identical"] else "no",
            ]
        )
    return table


def figures(found: dict[str, Any]) -> list[Figure | Picture]:
    from aparte.measure import spade_plot

    made: list[Figure | Picture] = []
    for shape, report in found.items():
        title = f"{spade_plot.title_of(report)}, {shape}s"
        svg = svg_of(lambda r=report, t=title: spade_plot.draw(r, t), title)  # type: ignore[misc]
        made.append(Picture(f"spade-{shape}.svg", title, svg))
    chain = found["chain"]

    def draw(axes: Axes) -> None:
        paper: Any = spade_report.PAPER["spec_bench"]
        alone = paper[CLOUD]["cloud_calls_per_answer"]
        share = 100 * paper["spade"]["cloud_calls_per_answer"] / alone
        axes.axhline(share, color=STYLES[1][0], linestyle="--", label="paper B, 1B drafts for 8B")
        for index, (shape, report) in enumerate(found.items()):
            colour, marker = STYLES[(0, 2)[index]]
            axes.plot(
                [row["d"] for row in report["sweep"]],
                [100 * (1 - row["call_reduction"]) for row in report["sweep"]],
                color=colour,
                marker=marker,
                label=f"here, {shape}s",
            )
        axes.set_xlabel("d")
        axes.set_xticks([row["d"] for row in chain["sweep"]])
        axes.set_ylabel("cloud calls per token, % of cloud only")
        axes.set_ylim(0, 105)

    return [*made, Figure("spade-calls", "Cloud calls by block length", draw)]


def differences(found: dict[str, Any]) -> list[str]:
    chain = found["chain"]
    best = chain["spade"]
    calls = [row["cloud_calls_per_answer"] / row["tokens_per_answer"] for row in chain["sweep"]]
    falls = all(later <= earlier + 1e-9 for earlier, later in pairwise(calls))
    identical = all(row["identical"] for report in found.values() for row in report["sweep"])
    says = [
        f"SPADE needs {percent(best['call_reduction'])} fewer cloud calls per token at d = {best['d']} and "
        f"{best['cloud_time_ratio']:.2f} of the cloud's time (paper B: 77.4 % and 0.23).",
        f"Calls {'fall' if falls else 'do not always fall'} with every larger d here; in the paper they fall "
        "monotonically."
        + ("" if falls else " Where d is longer than what is ever accepted, a longer block only costs."),
        f"What drafts is {chain['draft']}, {percent(chain['edge_memory_share'])} of the model's weights, where the "
        "paper has a 1B model for an 8B one: it accepts fewer tokens, and calls fall less.",
        "Device and cloud are the same processor here, where a pass over d tokens costs more than one over one; the "
        "paper's cloud time falls with its calls. No GPU was measured.",
        "The paper's scores come from a judge model, which is not run here. None is needed: greedy text is the cloud's "
        "own, token by token"
        + (
            ", in every row."
            if identical
            else ", except where a near-tie flipped in 16 bits (see the last columns)."
        )
        + " The paper accepts by a random test, so its text differs and its scores fall a little.",
    ]
    if chain["data"] != "Spec-Bench":
        says.append(
            "Without `--data` the questions are a dozen of the project's own, too few for scores to say much."
        )
    else:
        says.append(
            "The summaries are those of Spec-Bench that come from CNN/DailyMail, not the whole test set."
        )
    return says
