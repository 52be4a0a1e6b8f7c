"""The app of the simulated servers: functions that keep state, workflows that count what they did, triggers that follow."""

import lamina

app = lamina.App("world")


@app.function(batch=4, scale=lamina.Scale(max=2))
def echo(x):
    return x


@app.function(scale=lamina.Scale(max=2))
def add(name, n):
    """Counts, exactly once for each step of a durable run, whatever happens to the server."""
    app.state.counter(f"sum-{name}").add(n)
    return n


@app.function(scale=lamina.Scale(max=1))
def put_last(name, n):
    """Reads before it writes, so that two of them at once conflict and one runs again."""
    before = app.state.get(f"last-{name}") or 0
    app.state[f"last-{name}"] = before + n
    return before + n


@app.function(scale=lamina.Scale(max=1))
def fail(x):
    raise ValueError(f"never {x}")


@app.workflow()
def chain(name, n):
    return add(name, echo(add(name, n)))


@app.workflow()
def mixed(name, n):
    first = echo(n)
    return [add(name, first), put_last(name, first), echo(first)]


@app.workflow()
def hopeless(x):
    return fail(echo(x))


@app.on_change("sum-*")
@app.function(scale=lamina.Scale(max=1))
def followed(key, value, version):
    """Started by every change of a sum."""
    app.state.counter("followed").add(1)


@app.every("700ms")
@app.function(scale=lamina.Scale(max=1))
def tick(due):
    app.state.counter("ticks").add(1)


# What two tenants have deployed (`tests/world/tenants.py` says whose it is): the same, each with a state of its own.


@app.function(scale=lamina.Scale(max=1))
def keep_acme(n):
    app.state.counter("kept").add(n)
    return n


@app.function(scale=lamina.Scale(max=1))
def keep_evil(n):
    app.state.counter("kept").add(n)
    return n


@app.workflow()
def acme(n):
    return keep_acme(echo(n))


@app.workflow()
def evil(n):
    return keep_evil(echo(n))
