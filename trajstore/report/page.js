// Draws the specs into their places, in light or in dark, and again when that changes.
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function look() {
  const css = getComputedStyle(document.documentElement);
  const color = (name) => css.getPropertyValue(name).trim();
  const ink = color("--ink"), soft = color("--soft"), line = color("--line");
  const category = dark.matches
    ? ["#86abf0", "#f0a35e", "#6cc4a1", "#e88bb3", "#b79cf0", "#c9c46a"]
    : ["#2f5fb3", "#c8691c", "#2a8563", "#b0417b", "#7150b8", "#7d7a1f"];
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: null, font, view: { stroke: null }, padding: 2,
    range: { category },
    mark: { color: category[0] }, bar: { color: category[0] }, line: { color: category[0], strokeWidth: 2 },
    point: { color: category[0] }, text: { color: ink, font, fontSize: 12 },
    axis: {
      labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, labelFont: font,
      titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8, gridOpacity: 0.8,
      labelPadding: 5, labelFlush: false, tickSize: 4,
    },
    axisX: { grid: false }, axisY: { domain: false, ticks: false, tickCount: 5 },
    legend: {
      labelColor: ink, labelFont: font, labelFontSize: 12, orient: "top", symbolType: "circle", symbolSize: 70,
      offset: 6, columnPadding: 14, labelLimit: 190, columns: innerWidth < 620 ? 2 : 3,
    },
  };
}

async function draw() {
  const config = look();
  for (const [id, spec] of Object.entries(specs)) {
    await vegaEmbed("#" + id, spec, {
      config, actions: false, renderer: "svg", ast: true, tooltip: { theme: "custom", disableDefaultStyle: true },
    });
  }
  document.documentElement.dataset.drawn = Object.keys(specs).length;
}

draw();
dark.addEventListener("change", draw);
