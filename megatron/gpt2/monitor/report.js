// Of report.html: under the pointer, the numbers nearest to it, above the drawing.
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
