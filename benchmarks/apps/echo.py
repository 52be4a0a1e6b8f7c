"""The least a served function can do."""

import lamina

app = lamina.App("bench-echo")


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def echo(x):
    return x
