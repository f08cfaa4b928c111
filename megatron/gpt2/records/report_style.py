"""The looks of report.html, light and dark, and its script: both are written into the page, which loads nothing."""

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1c1f23; --soft: #666c75; --rule: #dddfe3; --card: #fff;
  --blue: #3568a8; --orange: #c4551d; --green: #4d7430; --alarm: #a3260f; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e4e6ea; --soft: #9aa1ab; --rule: #343942;
  --card: #1d2025; --blue: #7fb0ec; --orange: #f0935c; --green: #9cc97a; --alarm: #ff9a85; } }
body { margin: 0 auto; max-width: 1000px; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.status, .none { color: var(--soft); margin: .2rem 0 1rem; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(126px, 1fr)); gap: .6rem; margin: 0; }
dl.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .5rem .7rem; }
dl.figures dt, dl.figures span { color: var(--soft); font-size: .8rem; }
dl.figures dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
dl.figures span { display: block; min-height: 1.2em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
.charts figure:first-child { grid-column: 1 / -1; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .8rem; }
figcaption { font-size: .88rem; display: flex; flex-wrap: wrap; gap: 0 1rem; min-height: 1.5em; }
figcaption span::before { content: "\\25CF\\00A0"; }
figcaption span { color: var(--colour); }
output { margin-left: auto; color: var(--soft); font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
.blue { --colour: var(--blue); } .orange { --colour: var(--orange); } .green { --colour: var(--green); }
path { fill: none; } .grid { stroke: var(--rule); } .line { stroke: var(--colour); stroke-width: 1.6;
  stroke-linejoin: round; } .band { fill: var(--colour); opacity: .18; } circle { fill: var(--colour); }
.pointer { stroke: var(--soft); visibility: hidden; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .8rem .25rem 0; vertical-align: top; }
td { overflow-wrap: anywhere; } td:first-child { width: 1%; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.number { text-align: right; }
.sample { display: block; max-height: 11rem; overflow: auto; white-space: pre-wrap;
  font: .84rem/1.45 ui-monospace, monospace; }
.scroll { max-height: 34rem; overflow: auto; }
.alarm { color: var(--alarm); }
details { margin-top: .8rem; } summary { cursor: pointer; color: var(--soft); }
"""

# Under the pointer: the numbers nearest to it, above the drawing.
SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-curves]")) {
  const curves = JSON.parse(svg.dataset.curves), [x0, x1, left, right, width] = JSON.parse(svg.dataset.scale);
  const line = svg.querySelector(".pointer"), output = svg.parentNode.querySelector("output");
  const short = y => Math.abs(y) >= 1000 ? Math.round(y).toLocaleString("en") : String(+y.toPrecision(4));
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) * width / box.width - left) * (x1 - x0) / (right - left);
    const near = curves.map(([label, points]) =>
      [label, points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
    const at = left + (near[0][1][0] - x0) * (right - left) / (x1 - x0);
    line.setAttribute("transform", `translate(${at} 0)`);
    line.style.visibility = "visible";
    output.textContent = near.map(([label, [i, y]]) => `${label} ${short(y)} at ${i.toLocaleString("en")}`).join(", ");
  });
  svg.addEventListener("pointerleave", () => { line.style.visibility = "hidden"; output.textContent = ""; });
}
"""
