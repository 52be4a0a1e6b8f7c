"""An echo to be attacked, and another function beside it."""

import lamina

app = lamina.App("bench-two")


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def echo(x):
    return x


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def quiet(x):
    return x
