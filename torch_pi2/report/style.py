"""Style sheet and script of the page."""

#: Colours by their names in figures (``@ink``) and in the style sheet (``--ink``): of a light page, and of a dark one.
THEMES = {
    "light": {"ink": "#20242b", "soft": "#68707c", "grid": "#e3e6ea", "card": "#ffffff", "page": "#f4f5f7"},
    "dark": {"ink": "#e6e8eb", "soft": "#9aa3af", "grid": "#353b45", "card": "#1d2127", "page": "#14171b"},
}


def _variables(theme: str) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())


CSS = (
    f":root{{color-scheme:light dark;{_variables('light')}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables('dark')}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:28px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:36px 0 12px}
h3{font-size:16px;margin:0 0 4px}
p{margin:0 0 8px}
.soft{color:var(--soft)}
.badge{display:inline-block;border-radius:999px;padding:1px 10px;margin:6px 6px 0 0;font-size:13px;
border:1px solid var(--grid);background:var(--card)}
.badge.warn{background:#f28e2b;border-color:#f28e2b;color:#20242b}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--grid);border-radius:12px;padding:16px;min-width:0}
.card.wide{grid-column:1/-1}
.card>p{color:var(--soft);font-size:14px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,200px),1fr));gap:12px;margin-top:16px}
.fact{background:var(--card);border:1px solid var(--grid);border-radius:12px;padding:12px 14px;min-width:0}
.fact b{display:block;font-size:18px;overflow-wrap:anywhere}
.fact span{color:var(--soft);font-size:13px}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;margin:10px 0 8px}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.verdict{margin-top:16px}.verdict h2{margin:0 0 8px}
.verdict dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0}
.verdict dd{overflow-wrap:anywhere}
abbr{text-decoration:underline dotted var(--soft);text-underline-offset:3px;cursor:help}
.updatemenu-item-rect[style*="244, 250, 255"]{fill:var(--grid)!important;stroke:var(--soft)!important}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
td.text,th.text{text-align:left}
code{display:block;overflow-x:auto;white-space:pre;background:var(--page);border:1px solid var(--grid);
border-radius:6px;padding:6px 10px;margin:4px 0 12px;font-size:13px}
dt{font-weight:600}dd{margin:0}
.plot{width:100%}
@media (max-width:600px){main{padding:16px 10px 40px}.card{padding:12px 8px}
.card>h3,.card>p{padding:0 4px}h1{font-size:23px}
.facts{grid-template-columns:1fr 1fr;gap:8px}.fact b{font-size:16px}}
@media print{.card{break-inside:avoid}}
"""
)

#: Draws every plot, and again when the system changes between light and dark.
JS = """
const themes = THEMES, dark = matchMedia('(prefers-color-scheme: dark)'), phone = matchMedia('(max-width: 600px)');
const options = {responsive: true, displaylogo: false, displayModeBar: phone.matches ? false : 'hover',
  modeBarButtonsToRemove: ['sendChartToCloud', 'select2d', 'lasso2d', 'autoScale2d']};
function draw() {
  const colours = themes[dark.matches ? 'dark' : 'light'];
  for (const plot of document.querySelectorAll('.plot')) {
    const text = document.getElementById(plot.id + '-figure').textContent;
    const figure = JSON.parse(text.replace(/"@(\\w+)"/g, (all, name) => JSON.stringify(colours[name] || all)));
    Plotly.react(plot, figure.data, figure.layout, options);
  }
}
// The page carries plotly.js compressed: a third of the bytes.
async function begin() {
  const packed = document.getElementById('plotly').textContent;
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const script = document.createElement('script');
  script.textContent = await new Response(plain).text();
  document.head.append(script);
  draw();
  dark.addEventListener('change', draw);
}
begin().catch((error) => {
  console.error(error);
  for (const plot of document.querySelectorAll('.plot')) plot.textContent = 'The plots need a newer browser: ' + error;
});
"""
