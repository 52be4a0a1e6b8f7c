"""Style sheet of the HTML report, in light and in dark, on a screen, a telephone and paper; colours are the console's."""

from __future__ import annotations

from lamina.gateway.console.theme import theme_css

COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b")
"""Of the series of a plot, in light; plots are drawn with them and shown with the page's variables `--c0` to `--c7`."""

INK, SOFT, LINE, CARD = "#22262b", "#5d6570", "#dfe3e8", "#f6f8fa"
"""Text, faint text, lines and the ground of figures, in light."""

CSS = theme_css() + (
    """
*{box-sizing:border-box}html{scroll-behavior:smooth;scroll-padding-top:1rem}
body{margin:0;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);background:var(--page);
 display:grid;grid-template-columns:15rem minmax(0,62rem);gap:2.5rem;padding:0 2rem}
nav{position:sticky;top:0;align-self:start;height:100vh;overflow:auto;padding:2rem 0;font-size:.9rem}
nav ol{list-style:none;padding:0;margin:0}nav li{margin:.5rem 0;line-height:1.35}
.brand{font-weight:700;margin:0 0 1.5rem}.brand span{font-weight:400;color:var(--soft);margin-left:.5em}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
main{padding:2rem 0 6rem}h1{font-size:1.9rem;line-height:1.2;margin:0 0 1rem;letter-spacing:-.01em}
h2{font-size:1.5rem;line-height:1.25;margin:0 0 1rem}h3{font-size:1.08rem;margin:2.2rem 0 .5rem}
p{margin:.6rem 0;max-width:46rem}article{margin-top:4rem;padding-top:2rem;border-top:1px solid var(--line)}
code,pre{font:.86em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.origin{display:flex;flex-wrap:wrap;gap:.25rem 1.6rem;margin:0 0 1.2rem;padding:.7rem 1rem;background:var(--card);
 border-radius:8px;font-size:.84rem}.origin div{display:flex;gap:.5em}.origin dt{color:var(--soft)}.origin dd{margin:0}
.wide{overflow-x:auto;margin:.8rem 0}table{border-collapse:collapse;font-size:.88rem;width:auto;min-width:50%}
th{font-weight:600;text-align:left;color:var(--soft);border-bottom:1px solid var(--line);white-space:nowrap}
th,td{padding:.34rem .9rem .34rem 0;vertical-align:top}tbody tr+tr td{border-top:1px solid var(--grid)}
.s{white-space:nowrap}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.reported{display:inline-block;font-size:.74rem;font-weight:600;color:var(--soft);border:1px solid var(--line);
 border-radius:99px;padding:0 .6em;vertical-align:.1em}
figure{margin:1rem 0;padding:.9rem .9rem .5rem;background:var(--card);border-radius:8px}
svg{display:block;width:100%;height:auto;stroke-linejoin:round}svg text{font-family:inherit}
details{margin-top:2rem;font-size:.88rem}summary{cursor:pointer;color:var(--link)}
pre{max-height:28rem;overflow:auto;background:var(--card);border-radius:8px;padding:1rem}
.failed{color:#b3261e}.nothing{color:var(--soft)}
@media(max-width:60rem){body{display:block;padding:0 1.1rem}nav{position:static;height:auto;padding:1.2rem 0 0}}
@media print{nav{display:none}body{display:block}article{break-before:page}}
"""
)
