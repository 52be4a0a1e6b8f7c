"""Answers that cannot be mistaken for somebody else's."""

import hashlib
import time

import lamina

app = lamina.App("bench-nonce")


@app.function(batch=4, slo=lamina.SLO("1s"), scale=lamina.Scale(min=2, max=2))
def stamp(nonce):
    time.sleep(0.004)  # stands for a model: the worker is killed in the middle of it
    return [hashlib.sha256(one.encode()).hexdigest() for one in nonce]
