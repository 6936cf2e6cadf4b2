"""Interactive HTML pages of schedules."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from megapipe.schedules.drawing.bars import (
    NAMES,
    Bar,
    activation_curves,
    bars_of,
    counted,
    fill,
    ink,
    notes,
    shades,
)
from megapipe.schedules.simulation.simulate import Simulation

PAGE: Final = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { --ink: #1d2430; --soft: #5c6675; --line: #dfe3e9; --lane: #f1f3f6; --paper: #ffffff; --accent: #c8234a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebf0; --soft: #98a2b3; --line: #333b48; --lane: #232a35; --paper: #171c24; --accent: #ff5c7f; }
}
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.45 "Inter", "DejaVu Sans", system-ui, sans-serif; color: var(--ink);
       background: var(--paper); }
header { padding: 18px 24px 8px; }
h1 { margin: 0 0 12px; font-size: 20px; }
#figures { display: flex; flex-wrap: wrap; gap: 10px; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 6px 14px; min-width: 110px; }
.figure b { display: block; font-size: 17px; }
.figure span { color: var(--soft); font-size: 12px; }
#bar { display: flex; flex-wrap: wrap; gap: 16px; align-items: center; padding: 10px 24px; color: var(--soft); }
#bar i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
         vertical-align: -1px; }
#bar label { cursor: pointer; user-select: none; }
#bar button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
              padding: 2px 10px; cursor: pointer; }
#hint { margin-left: auto; font-size: 12px; }
canvas { display: block; width: 100%; cursor: grab; touch-action: none; }
canvas.dragging { cursor: grabbing; }
h2 { margin: 14px 24px 2px; font-size: 13px; color: var(--soft); font-weight: 600; }
#ranks span { margin-left: 14px; cursor: default; white-space: nowrap; }
#ranks i { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: 3px; }
#tooltip { position: fixed; pointer-events: none; display: none; z-index: 2; max-width: 360px; padding: 8px 12px;
           border-radius: 8px; background: #10141b; color: #f4f6f9; font-size: 13px;
           box-shadow: 0 6px 24px rgb(0 0 0 / 30%); }
#tooltip b { display: block; }
#tooltip span { color: #a9b4c4; }
</style>
</head>
<body>
<header><h1>@TITLE@</h1><div id="figures"></div></header>
<div id="bar"></div>
<canvas id="timeline"></canvas>
<h2>@CURVES@<span id="ranks"></span></h2>
<canvas id="curves"></canvas>
<div id="tooltip" role="tooltip"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const FIELDS = ["line", "rank", "lane", "kind", "stage", "label", "step", "start", "end", "wait", "critical",
                "text", "note", "fill", "ink", "left", "right", "place", "count"];
const bars = data.bars.map(row => Object.fromEntries(FIELDS.map((name, i) => [name, row[i]])));
const LEFT = 86, RIGHT = 24, AXIS = 24, CURVES = 150;
const lanes = ["compute", "send", "receive", "collectives", "copy out", "copy in"].filter(
  lane => bars.some(bar => bar.lane === lane));
const laneHeight = (line, lane) => lane === "compute" ? line.height : 7;
let bottom = AXIS;
for (const line of data.lines) {
  line.top = bottom;
  line.size = lanes.reduce((sum, lane) => sum + laneHeight(line, lane) + 2, 0);
  bottom += line.size + line.gap;
}
const view = { from: 0, to: data.finish };
let hovered = null, hoverTime = null, pointed = null, showCritical = true;
const timeline = document.getElementById("timeline"), curves = document.getElementById("curves");
const tooltip = document.getElementById("tooltip");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(parent, tag, html, title) {
  const node = document.createElement(tag);
  node.innerHTML = html;
  if (title) node.title = title;
  parent.append(node);
  return node;
}
for (const [name, value, title] of data.figures) {
  const node = element(document.getElementById("figures"), "div", `<b>${value}</b><span>${name}</span>`, title);
  node.className = "figure";
}
const controls = document.getElementById("bar");
for (const [name, colours] of data.legend) {
  element(controls, "span", colours.map(colour => `<i style="background:${colour}"></i>`).join("") + name);
}
for (const note of data.notes) element(controls, "span", note);
if (bars.some(bar => bar.critical)) {
  const toggle = element(controls, "label", '<input type="checkbox" id="critical" checked> critical path');
  toggle.firstChild.onchange = event => { showCritical = event.target.checked; draw(); };
}
const colourOf = rank => `hsl(${215 + 130 * rank / Math.max(1, data.curves.length - 1)} 60% 55%)`;
data.curves.forEach((_, rank) => {
  const mark = `<i style="background:${colourOf(rank)}"></i>`;
  const name = element(document.getElementById("ranks"), "span", `${mark}rank ${rank}`);
  name.onmouseenter = () => { pointed = rank; draw(); };
  name.onmouseleave = () => { pointed = null; draw(); };
});
element(controls, "button", "whole run").onclick = () => { view.from = 0; view.to = data.finish; draw(); };
element(controls, "span", "wheel: zoom, drag: move, hover: details").id = "hint";

const widthOf = canvas => canvas.clientWidth - LEFT - RIGHT;
const xOf = time => LEFT + (time - view.from) / (view.to - view.from) * widthOf(timeline);
const timeOf = x => view.from + (x - LEFT) / widthOf(timeline) * (view.to - view.from);
const heightOf = bar => laneHeight(data.lines[bar.line], bar.lane) / bar.count;
function yOf(bar) {
  let y = data.lines[bar.line].top;
  for (const lane of lanes) { if (lane === bar.lane) break; y += laneHeight(data.lines[bar.line], lane) + 2; }
  return y + bar.place * heightOf(bar);
}
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, canvas.clientWidth, height);
  context.font = '11px "Inter", "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  return context;
}
function ticks() {
  const span = view.to - view.from, rough = span / 10, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough);
  const times = [];
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) times.push(time);
  return times.map(time => Number(time.toPrecision(10)));
}
function drawTimeline() {
  const context = prepare(timeline, bottom + 6);
  context.textAlign = "center";
  context.fillStyle = css("--soft");
  context.fillText(data.unit, LEFT / 2, 10);
  for (const time of ticks()) context.fillText(String(time), xOf(time), 10);
  context.textAlign = "left";
  for (const line of data.lines) {
    context.fillStyle = css("--lane");
    context.fillRect(LEFT, line.top, widthOf(timeline), line.size);
    context.fillStyle = css(line.soft ? "--soft" : "--ink");
    context.fillText(line.label, 24, line.top + line.height / 2);
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, widthOf(timeline), timeline.clientHeight);
  context.clip();
  context.textAlign = "center";
  for (const bar of bars) drawBar(context, bar);
  if (hoverTime !== null) {
    context.fillStyle = css("--soft");
    context.fillRect(xOf(hoverTime), AXIS - 6, 1, timeline.clientHeight);
  }
  context.restore();
}
function drawBar(context, bar) {
  if (bar.end < view.from || bar.start - bar.wait > view.to) return;
  const x = xOf(bar.left), width = Math.max(xOf(bar.right) - x, 0.6), y = yOf(bar), height = heightOf(bar);
  if (bar.wait > 0 && bar.lane === "compute") {
    context.fillStyle = css("--soft");
    context.globalAlpha = 0.55;
    context.fillRect(xOf(bar.start - bar.wait), y + height / 2 - 0.75, x - xOf(bar.start - bar.wait), 1.5);
    context.globalAlpha = 1;
  }
  context.fillStyle = bar.fill;
  context.fillRect(x, y, Math.max(width - 0.7, 0.5), height);
  if (showCritical && bar.critical && bar.lane === "compute") {
    context.fillStyle = css("--accent");
    context.fillRect(x, y + height - 3, width, 3);
  }
  if (bar === hovered) {
    context.strokeStyle = css("--ink");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, width - 2, height - 2);
  }
  if (bar.lane === "compute" && width > 7 * bar.label.length + 3) {
    context.fillStyle = bar.ink;
    context.fillText(bar.label, x + width / 2, y + height / 2);
  }
}
function levelsOf(low, top) {
  // Below 0 and near to it, a label would lie on that of 0.
  const apart = value => Math.abs(value) / (top - low) * (CURVES - 34) > 12;
  return low < 0 ? [0, ...[low, top].filter(apart)] : [0, top / 2, top];
}
function drawCurves() {
  const context = prepare(curves, CURVES);
  const values = data.curves.flat().map(point => point[1]);
  const top = Math.max(data.curves_top, ...values), low = Math.min(0, ...values);
  const y = value => CURVES - 18 - (value - low) / (top - low) * (CURVES - 34);
  context.fillStyle = css("--soft");
  for (const value of levelsOf(low, top)) {
    context.fillText(String(Number(value.toPrecision(3))), 24, y(value));
    context.fillRect(LEFT, y(value), widthOf(curves), 0.5);
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, widthOf(curves), CURVES);
  context.clip();
  data.curves.forEach((curve, rank) => {
    const some = pointed !== null ? pointed : hovered && hovered.rank, chosen = some === rank;
    context.beginPath();
    let last = 0;
    context.moveTo(xOf(0), y(0));
    for (const [time, value] of curve) {
      context.lineTo(xOf(time), y(last));
      context.lineTo(xOf(time), y(value));
      last = value;
    }
    context.lineTo(xOf(data.finish), y(last));
    context.strokeStyle = colourOf(rank);
    context.globalAlpha = some !== null && !chosen ? 0.25 : 1;
    context.lineWidth = chosen ? 3 : 1.5;
    context.stroke();
  });
  context.restore();
}
function draw() { drawTimeline(); drawCurves(); }

function barAt(x, y) {
  const time = timeOf(x);
  return bars.find(bar => time >= bar.left && time < bar.right && y >= yOf(bar) && y < yOf(bar) + heightOf(bar));
}
function curveAt(rank, time) {
  let latest = 0;
  for (const [when, value] of data.curves[rank] || []) { if (when > time) break; latest = value; }
  return latest;
}
const format = number => String(Number(number.toPrecision(6)));
function hover(event) {
  const box = timeline.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  hovered = barAt(x, y) || null;
  hoverTime = x >= LEFT ? timeOf(x) : null;
  if (hovered) {
    const lines = [`rank ${hovered.rank}`, `${format(hovered.start)} to ${format(hovered.end)} ${data.unit}`];
    if (hovered.step > 0) lines.push(`step ${hovered.step}`);
    if (hovered.critical) lines.push("on the critical path");
    tooltip.innerHTML = `<b>${data.kinds[hovered.kind]}</b>${hovered.text}<br><span>${lines.join(" · ")}<br>` +
      `${hovered.note || format(curveAt(hovered.rank, hovered.start)) + " " + data.curves_name}</span>`;
    tooltip.style.display = "block";
    tooltip.style.left = Math.min(event.clientX + 14, innerWidth - tooltip.offsetWidth - 12) + "px";
    tooltip.style.top = Math.min(event.clientY + 16, innerHeight - tooltip.offsetHeight - 12) + "px";
  } else {
    tooltip.style.display = "none";
  }
  draw();
}
function move(from, span) {
  view.from = Math.min(Math.max(0, from), data.finish - span);
  view.to = view.from + span;
}
timeline.addEventListener("wheel", event => {
  event.preventDefault();
  const centre = timeOf(event.offsetX), span = view.to - view.from;
  const wanted = Math.min(data.finish, Math.max(data.finish / 2000, span * 1.0015 ** event.deltaY));
  move(centre - (centre - view.from) * wanted / span, wanted);
  hover(event);
}, { passive: false });
let grabbed = null;
timeline.addEventListener("pointerdown", event => {
  grabbed = { x: event.clientX, from: view.from };
  timeline.setPointerCapture(event.pointerId);
  timeline.classList.add("dragging");
});
timeline.addEventListener("pointermove", event => {
  const span = view.to - view.from;
  if (grabbed) move(grabbed.from - (event.clientX - grabbed.x) / widthOf(timeline) * span, span);
  hover(event);
});
timeline.addEventListener("pointerup", () => { grabbed = null; timeline.classList.remove("dragging"); });
timeline.addEventListener("pointerleave", () => {
  hovered = hoverTime = null;
  tooltip.style.display = "none";
  draw();
});
addEventListener("resize", draw);
draw();
</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Line:
    """One row of bars: its label, the height of its compute and the gap below it, in pixels."""

    label: str
    soft: bool = False
    height: int = 26
    gap: int = 8


@dataclass(frozen=True)
class Curves:
    """A curve below the bars: per rank (time, value) at every change; the axis ends at ``top``, or at the largest
    value above it."""

    title: str
    name: str
    values: list[list[tuple[float, float]]]
    top: float


def html_page(
    title: str,
    figures: list[list[str]],
    lines: list[Line],
    bars: Sequence[tuple[int, Bar, str]],
    finish: float,
    curves: Curves,
    unit: str,
) -> str:
    """Return an HTML document. bars: the line of each, and a note that is shown when the pointer is on it; if it is
    empty, the value of the curve is shown. unit: of all times, such as "ms"."""
    rows, all_bars = [_row(*each) for each in bars], [bar for _, bar, _ in bars]
    kinds = sorted({bar.kind for bar in all_bars})
    data = {
        "lines": [vars(line) for line in lines],
        "finish": finish,
        "unit": unit,
        "figures": figures,
        "kinds": {int(kind): NAMES[kind] for kind in kinds},
        "legend": [[NAMES[kind], colours] for kind, colours in shades(all_bars).items()],
        "notes": notes(all_bars),
        "bars": rows,
        "curves": curves.values,
        "curves_name": curves.name,
        "curves_top": curves.top,
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return PAGE.replace("@TITLE@", escape(title)).replace("@CURVES@", escape(curves.title)).replace("@DATA@", text)


def _row(line: int, bar: Bar, note: str) -> list[Any]:
    """Return the fields of a bar, in the order in which the page's script names them."""
    colour = fill(bar.kind, bar.shade)
    times = round(bar.start, 9), round(bar.end, 9), round(bar.wait, 9)
    place = line, bar.rank, bar.lane, int(bar.kind), bar.stage, bar.label, bar.step
    box = *(round(time, 9) for time in bar.drawn), *bar.part
    return [*place, *times, int(bar.critical), bar.text, note, colour, ink(colour), *box]


def draw_html(simulation: Simulation) -> str:
    """Return the simulated run as an HTML document."""
    header = simulation.table.header
    bars = bars_of(simulation)
    figures = [
        ["first to last action", f"{simulation.finish:g}", "over all ranks: the length of the time axis"],
        ["idle / ideal time", f"{simulation.idle:.2%}", "all idle time of the busiest rank over its work"],
        [
            "idle / makespan",
            f"{1 - simulation.ideal / simulation.finish:.2%}",
            "the same idle time over the time from first to last action",
        ],
        ["longest rank", f"{simulation.makespan:g}", "from a rank's first forward to its last action"],
        [
            "its bubble / ideal time",
            f"{simulation.bubble:.2%}",
            "idle time of the longest rank over the work, without the wait for its first forward",
        ],
        ["peak activations", f"{max(simulation.peak_activations):g}", "micro-batches on the fullest rank"],
        ["weight versions", f"{max(simulation.weight_versions)}", "copies of the weights a rank keeps"],
        ["class", header.numerical_class, "A: bit-equal to one process, B: to its own recursion, C: in tolerance"],
    ]
    return html_page(
        f"{header.name}, {header.num_ranks} ranks, {counted(header)}",
        figures,
        [Line(f"rank {rank}") for rank in range(header.num_ranks)],
        [(bar.rank, bar, "") for bar in bars],
        simulation.finish,
        Curves(
            "Activations alive on each rank, in micro-batches of the rank's layers",
            "micro-batches of activations alive",
            activation_curves(simulation),
            1.0,
        ),
        "time units",
    )
