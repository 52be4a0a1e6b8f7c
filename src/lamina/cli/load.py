"""`lamina load URL`: open-loop load against any HTTP server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lamina.cli import EXIT_FAILED, EXIT_STOPPED
from lamina.cli._shared import FiniteFloat, InputFile
from lamina.errors import BadValue
from lamina.units import parse_us


@click.command()
@click.argument("url")
@click.option("--rate", default="50", show_default=True, help="Calls per second, or stages: 100x10s,400x30s.")
@click.option("--duration", default="10s", show_default=True, help="Duration, if --rate has no stages.")
@click.option(
    "--shape",
    type=click.Choice(["poisson", "gamma", "even", "steps", "ramp", "trace"]),
    default="poisson",
    show_default=True,
    help="Arrival process; ramp: the rate moves linearly from stage to stage.",
)
@click.option(
    "--cv",
    default=None,
    type=FiniteFloat(0, 100),
    help="Coefficient of variation of the gaps: 0 even, 1 Poisson, above 1 bursty; default for gamma: 4.",
)
@click.option("--trace", type=InputFile(), help="CSV file with a column t_us, for --shape trace.")
@click.option(
    "--speedup", type=FiniteFloat(0, min_open=True), default=1.0, show_default=True, help="Factor by which the trace is sped up."
)
@click.option("--slo", metavar="TIME", help="Latency within which an answer meets the SLO; default: the SLO of the target.")
@click.option("--deadline", metavar="TIME", help="Deadline to send with every call.")
@click.option("--body", help="JSON to send.")
@click.option("--file", type=InputFile(), help="Send this file instead.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="Additional header; repeatable.")
@click.option("--method", default="POST", show_default=True, help="HTTP method.")
@click.option(
    "--connections",
    type=click.IntRange(1, 65535),
    default=256,
    show_default=True,
    help="Most connections; one call at a time on each.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the arrivals.")
@click.option("--insecure", is_flag=True, help="Do not check the server's certificate.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no live view.")
def command(**given: Any) -> int:
    """Open-loop load generator for any HTTP server: how many calls met the SLO?

    \b
    Examples:
      lamina load http://127.0.0.1:8700/v1/functions/shout --rate 100 --duration 10s --body '"hi"'
      lamina load http://127.0.0.1:8700/v1/functions/shout --rate 50x10s,200x30s --shape ramp --html load.html
    """
    import msgspec

    from lamina.load.generator import run_load
    from lamina.load.load_plan import LoadPlan, check_trace, parse_stages

    for written in ("out", "html"):
        if given[written] is not None and not given[written].absolute().parent.is_dir():
            raise BadValue(f"--{written} {given[written]}: no such folder", hint="make it first")
    body, kind = _body(given["body"], given["file"])
    headers = [("content-type", kind)] if body else []
    if os.environ.get("LAMINA_TOKEN"):
        headers.append(("authorization", f"Bearer {os.environ['LAMINA_TOKEN']}"))
    if given["deadline"]:
        headers.append(("lamina-deadline-ms", f"{parse_us(given['deadline'], '--deadline') / 1000:g}"))
    shape, cv = given["shape"], given["cv"]
    plan = LoadPlan(
        url=given["url"],
        body=body,
        headers=(*headers, *map(_header, given["headers"])),
        method=given["method"].upper(),
        shape=shape,
        stages=parse_stages(given["rate"], parse_us(given["duration"], "--duration") / 1e6),
        cv=cv if cv is not None else (4.0 if shape == "gamma" else 1.0),
        trace=check_trace(given["trace"]) if shape == "trace" else "",
        speedup=given["speedup"],
        slo_us=parse_us(given["slo"], "--slo") if given["slo"] else _goal_us(given["url"]),
        seed=given["seed"],
        connections=given["connections"],
        check_tls=not given["insecure"],
    )
    result = run_load(plan) if given["as_json"] else _watched(plan)
    if given["as_json"]:
        click.echo(msgspec.json.encode(result).decode())
    if given["out"]:
        given["out"].write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    if given["html"]:
        from lamina.load.report import html_report

        given["html"].write_text(html_report(result), encoding="utf-8")
        click.echo(f"page: {given['html']}", err=True)
    if result.offered and not result.in_time + result.late + result.refused:
        hint = "send one alone to see why: curl -i URL -d BODY"
        click.echo(f"error: not one call was answered as it should be\n  hint: {hint}", err=True)
        return EXIT_FAILED
    return EXIT_STOPPED if result.stopped else 0


def _watched(plan: Any) -> Any:
    from rich.console import Console
    from rich.live import Live

    from lamina.load.generator import run_load
    from lamina.load.report import live_view, result_table
    from lamina.load.results import SecondStats

    console = Console()
    seen: list[SecondStats] = []
    slo_ms = plan.slo_us / 1000
    if not console.is_terminal:
        result = run_load(plan)
        console.print(live_view(result.series, slo_ms, is_over=True))
    else:
        with Live(live_view(seen, slo_ms), console=console, auto_refresh=False) as live:

            def on_second(second: SecondStats) -> None:
                seen.append(second)
                live.update(live_view(seen, slo_ms), refresh=True)

            result = run_load(plan, on_second)
            live.update(live_view(seen, slo_ms, is_over=True), refresh=True)
    console.print(result_table(result))
    if result.failed:
        shown = ", ".join(f"{count} x {status}" for status, count in sorted(result.statuses.items()))
        click.echo(f"answers: {shown}", err=True)
    if result.send_lag_ms.p99_ms > 5:
        lag_ms = result.send_lag_ms.p99_ms
        click.echo(f"warning: calls left {lag_ms:.0f} ms late (p99): the machine or --connections is too small", err=True)
    return result


def _body(text: str | None, file: Path | None) -> tuple[bytes, str]:
    if text is not None and file is not None:
        raise click.UsageError("give one of --body and --file")
    if file is not None:
        import mimetypes

        return file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return (text or "").encode(), "application/json"


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\r" in text or "\n" in text:
        raise click.UsageError(f"--header {text!r}: write NAME:VALUE")
    return name.strip(), value.strip()


def _goal_us(url: str) -> int:
    """SLO of a target as Lamina servers report it; 0 for other servers."""
    import urllib.request

    import msgspec

    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(1000 * (msgspec.json.decode(answer.read(65_536)).get("slo_ms") or 0))
    except (OSError, ValueError, AttributeError):
        return 0
